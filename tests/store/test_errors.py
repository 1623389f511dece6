"""The errors: whose turn it is, what they carry, and that they arrive whole."""

from __future__ import annotations

import copy
import errno
import inspect
import pickle

import pytest

from messagestore import errors
from messagestore.errors import (
    AccessDeniedError,
    BatchConflictError,
    BrokerError,
    ChecksumError,
    CommitUnknownError,
    ConfigError,
    CorruptionError,
    HalfMessageEndedError,
    LostBatchesError,
    MagicError,
    MessageIllegalError,
    NotAStoreError,
    NotRecoveredError,
    OffsetOutOfRangeError,
    ProgressConflictError,
    ProtocolError,
    QueryConflictError,
    StoreClosedError,
    StoreError,
    StoreFullError,
    StoreLockedError,
    StorePermissionError,
    StorePoisonedError,
    StoreUnavailableError,
    StoreWentBackwardsError,
    SyncFailedError,
    TornRecordError,
    UnknownTopicError,
    VersionRegressionError,
)

EXAMPLES: list[tuple[StoreError, type[Exception]]] = [
    (ConfigError("m", key="perm", value=9), ValueError),
    (MessageIllegalError("m", field="body", size=9, limit=8, row=3), ValueError),
    (OffsetOutOfRangeError("m", topic="t", queue_id=1, queue_offset=9, min=2, max=8), IndexError),
    (UnknownTopicError("t", ["b", "a"]), LookupError),
    (StoreClosedError("m"), RuntimeError),
    (NotAStoreError("m", path="/p"), ValueError),
    (StoreLockedError("m", path="/p", holder="pid 7"), RuntimeError),
    (StorePermissionError("m", path="/p"), PermissionError),
    (StoreFullError("m", path="/p", needed=9, free=8), OSError),
    (SyncFailedError("m", path="/p"), OSError),
    (StorePoisonedError("m"), RuntimeError),
    (StoreWentBackwardsError("m"), RuntimeError),
    (NotRecoveredError("m"), RuntimeError),
    (BatchConflictError("m", app_id="a", version=3), RuntimeError),
    (QueryConflictError("m", app_id="a", version=3), BatchConflictError),
    (ProgressConflictError("m", group="g", topic="t", queue_id=0, offset=-1), RuntimeError),
    (VersionRegressionError("m", app_id="a", version=3), RuntimeError),
    (LostBatchesError("m", app_id="a", version=3), RuntimeError),
    (HalfMessageEndedError("m", message_id="7F", outcome="committed"), RuntimeError),
    (StoreUnavailableError("m"), ConnectionError),
    (CommitUnknownError("m"), StoreUnavailableError),
    (AccessDeniedError("m"), PermissionError),
    (BrokerError("m", broker="b", address="a:1", code=16, remark="r"), RuntimeError),
    (ProtocolError("m"), ValueError),
    (CorruptionError("/p", 7, "this", "that"), Exception),
    (TornRecordError("/p", 7, "this", "that"), CorruptionError),
    (ChecksumError("/p", 7, "this", "that", hint="Do something."), CorruptionError),
    (MagicError("/p", 7, "this", "that"), CorruptionError),
]
IDS = [type(error).__name__ for error, _ in EXAMPLES]


def test_every_error_has_an_example_here():
    """A new error is tested, too."""
    classes = {value for _, value in inspect.getmembers(errors, inspect.isclass) if issubclass(value, StoreError)}
    assert classes == {type(error) for error, _ in EXAMPLES} | {StoreError}


@pytest.mark.parametrize(("error", "second"), EXAMPLES, ids=IDS)
def test_one_root_and_a_second_base(error: StoreError, second: type[Exception]):
    """`except StoreError` catches all; the second base says what kind of error it is to Python."""
    assert isinstance(error, StoreError)
    assert isinstance(error, second)


@pytest.mark.parametrize("error", [error for error, _ in EXAMPLES], ids=IDS)
def test_an_error_from_another_process_arrives(error: StoreError):
    """A worker's error that cannot be unpickled breaks its whole pool and hides what happened."""
    error.add_note("in /data/store")
    for found in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(found) is type(error)
        assert str(found) == str(error)
        assert vars(found) == vars(error)
    del error.__notes__


def test_the_errno_of_a_full_disk_arrives():
    """It is not among the attributes Python sends by itself."""
    full = StoreFullError("m", path="/p", needed=9, free=8)
    full.errno = errno.EDQUOT
    assert pickle.loads(pickle.dumps(full)).errno == errno.EDQUOT


def test_a_row_is_named_in_front():
    """The number of the row in the batch the caller gave; without one, the reason alone."""
    assert str(MessageIllegalError("topic: empty", field="topic", row=0)) == "row 0: topic: empty"
    assert str(MessageIllegalError("topic: empty", field="topic")) == "topic: empty"
    assert MessageIllegalError("topic: empty", field="topic", row=0).reason == "topic: empty"


def test_an_unknown_topic_lists_the_known_ones():
    """Sorted, at most twenty, and how many more."""
    assert str(UnknownTopicError("x", {"b", "a"})) == "topic 'x' is not in the store. Its topics are: a, b"
    assert "It has no topics" in str(UnknownTopicError("x", []))
    many = UnknownTopicError("x", (f"t{i:02d}" for i in range(23)))
    assert str(many).endswith("t19 and 3 more")
    assert len(many.topics) == 23


def test_corruption_says_where_what_and_what_to_do():
    """File, offset, expected, found, and a way on."""
    text = str(CorruptionError("/p", 7, "this", "that"))
    assert text.startswith("/p: offset 7: expected this, found that.")
    assert "messagestore verify" in text
    assert (
        str(CorruptionError("/p", 7, "this", "that", hint="Do it."))
        == "/p: offset 7: expected this, found that. Do it."
    )
