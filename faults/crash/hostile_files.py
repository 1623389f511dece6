"""Files and folders as somebody leaves them who wants whoever reads them to hang, to fail, or to give something away.

Each form takes the place of a file or folder: as a link, a FIFO, a socket, a folder, a file that is huge, or a text
that no parser likes. `SECRET` is in a file outside that only root may read, to which some forms lead.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from messagestore import CorruptionError
from messagestore.files.config_file import ConfigFile
from messagestore.files.disk import Disk
from messagestore.files.staging_files import STAGED, process_token, sweep

SECRET = "correct horse battery staple"
HUGE = 1 << 40
_DEEP = 200_000


def _linked(path: Path, secret: Path) -> None:
    path.symlink_to(secret)


def _dangling(path: Path, secret: Path) -> None:
    path.symlink_to(secret.with_name("nowhere"))


def _loop(path: Path, secret: Path) -> None:
    path.symlink_to(path.name)


def _linked_folder(path: Path, secret: Path) -> None:
    path.symlink_to(secret.parent, target_is_directory=True)


def _hard_link(path: Path, secret: Path) -> None:
    os.link(secret, path)


def _fifo(path: Path, secret: Path) -> None:
    os.mkfifo(path)


def _socket(path: Path, secret: Path) -> None:
    here = os.getcwd()
    os.chdir(path.parent)  # the path of a socket is short
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(path.name)
    finally:
        os.chdir(here)


def _device(path: Path, secret: Path) -> None:
    os.mknod(path, 0o600 | 0o020000, os.makedev(1, 5))  # /dev/zero has no end


def _folder(path: Path, secret: Path) -> None:
    path.mkdir()
    (path / "1").write_text(SECRET)


def _deep_folders(path: Path, secret: Path) -> None:
    here = os.getcwd()
    path.mkdir()
    os.chdir(path)
    try:
        for _ in range(100):
            os.mkdir("d")
            os.chdir("d")
    finally:
        os.chdir(here)


def _sparse(path: Path, secret: Path) -> None:
    with path.open("wb") as file:
        file.truncate(HUGE)


def _text(*lines: str) -> Callable[[Path, Path], None]:
    return lambda path, secret: path.write_bytes("\n".join(lines).encode("utf-8", "surrogatepass")) and None


_HEAD = ("v1", '{"batchTimestampMs":1700000000000}')


def _offset(queues: str, more: str = "") -> tuple[str, ...]:
    return (*_HEAD, f'{{"formatVersion":1,"last":null,"physicalOffset":0,"queues":{queues},"storeId":"s"{more}}}')


_NESTED_BEGINNINGS = _offset('{"t":{"0":1}}')[-1][:-1] + ',"begin":'

FORMS: dict[str, Callable[[Path, Path], None]] = {
    "a link to a secret": _linked,
    "a link to nothing": _dangling,
    "a link to itself": _loop,
    "a link to a folder": _linked_folder,
    "a hard link to a secret": _hard_link,
    "a FIFO": _fifo,
    "a socket": _socket,
    "a device": _device,
    "a folder": _folder,
    "folders without end": _deep_folders,
    "a sparse file": _sparse,
    "no byte": _text(""),
    "zeros": _text("\0" * 4096),
    "no UTF-8": lambda path, secret: path.write_bytes(b"v1\n\xff\xfe\n") and None,
    "a surrogate": _text(*_HEAD, '{"\ud800":1}'),
    "brackets": _text("[" * _DEEP),
    "brackets in an offset": _text(*_HEAD, "[" * _DEEP + "]" * _DEEP),
    "brackets in the settings": _text("v1", '{"a":' * _DEEP + "1" + "}" * _DEEP, "{}"),
    "brackets in all fields": _text("v1", '{"stateUniqueIds":' + "[" * _DEEP + "]" * _DEEP + "}"),
    "a hundred brackets": _text(*_HEAD, '{"queues":' + "[" * 100 + "]" * 100 + "}"),
    "nested beginnings": _text(*_HEAD, _NESTED_BEGINNINGS * 800 + "null" + "}" * 800),
    "escaped quotes": _text(*_HEAD, '"' + '\\"' * 100_000),
    "an id of another kind": _text('{"id":{"a":[1]}}'),
    "a list": _text("[]"),
    "a number": _text("1"),
    "a time of another kind": _text("v1", '{"batchTimestampMs":[1]}', "{}"),
    "a time without end": _text("v1", '{"batchTimestampMs":1e999}', "{}"),
    "a time that is no number": _text("v1", '{"batchTimestampMs":NaN}', "{}"),
    "a secret as time": _text("v1", json.dumps({"batchTimestampMs": SECRET}), "{}"),
    "a far time": _text("v1", '{"batchTimestampMs":%s}' % ("9" * 4000), "{}"),
    "a long number": _text(*_HEAD, "9" * 100_000),
    "an endless offset": _text(*_offset('{"t":{"0":1e999}}')),
    "an offset of 4,000 digits": _text(*_offset('{"t":{"0":%s}}' % ("9" * 4000))),
    "an offset below 0": _text(*_offset('{"t":{"0":-1}}')),
    "a queue of 4,000 digits": _text(*_offset('{"t":{"%s":1}}' % ("9" * 4000))),
    "queues of another kind": _text(*_offset("[1]")),
    "a topic that climbs": _text(*_offset('{"../../t":{"0":1}}')),
    "five hundred topics": _text(*_offset(json.dumps({f"t{n}": {"0": n} for n in range(500)}))),
    "five hundred queues": _text(*_offset(json.dumps({"t": {str(n): n for n in range(500)}}))),
    "a hundred thousand sources": _text(*_HEAD, *["-"] * 100_000),
    "control characters": _text("\x1b[2J\x1b]0;x\x07" * 3, "{}", "{}"),
}
"""What takes the place of a file or folder, by its name; the second argument is the file with the secret."""

_NEED_ROOT = ("a device",)


def forms(*, texts: bool = True) -> Iterator[str]:
    """Return the names of the forms that this user can make; without `texts`, of those that differ before a parser sees them."""
    names = list(FORMS)
    if not texts:
        names = names[: names.index("zeros")]
    return (name for name in names if os.geteuid() == 0 or name not in _NEED_ROOT)


def place(form: str, path: Path, secret: Path) -> None:
    """Put a form in the place of a file or folder."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    FORMS[form](path, secret)


def secret_file(folder: Path) -> Path:
    """Make the file with the secret, in a folder of its own beside what is hostile."""
    outside = folder / "outside"
    outside.mkdir(mode=0o700)
    secret = outside / "secret"
    secret.write_text(f"{SECRET}\n{SECRET}\n{SECRET}\n")
    secret.chmod(0o600)
    return secret


@contextmanager
def within(seconds: int, what: str) -> Iterator[None]:
    """Fail instead of waiting: a process that opens a FIFO waits for ever."""

    def late(*_: object) -> None:
        raise AssertionError(f"{what}: more than {seconds} s")

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


# ---- cases of `fuzz`

_HANGS_S = 20
_USER = 1234


def _checkpoints(folder: Path) -> None:
    """What is no file in a checkpoint is named; a copy that root makes of a user's program is no program of root's."""
    from checkpoints import checkpoint, offset
    from pyspark_messagestore.checkpoint.spark_checkpoint import copy_rewound, read_checkpoint

    secret = secret_file(folder)
    for number, form in enumerate(("a link to a secret", "a FIFO", "a socket", "a folder")):
        path = checkpoint(folder / f"ck-{number}", [[offset("s", each)] for each in range(3)])
        place(form, path / "offsets" / "1", secret)
        with within(_HANGS_S, form):
            found = read_checkpoint(str(path)).batches[1]
        assert "found a" in found.fault, (form, found)
    path = checkpoint(folder / "ck", [[offset("s", each)] for each in range(3)])
    program = path / "program"
    program.write_bytes(b"#!/bin/true")
    if os.geteuid() == 0:
        os.chown(program, _USER, _USER)
    program.chmod(0o6755)
    copy_rewound(read_checkpoint(str(path)), 1, str(folder / "copy"))
    made, theirs = (folder / "copy" / "program").stat(), program.stat()
    assert made.st_mode & 0o7777 == 0o644, oct(made.st_mode)
    assert (made.st_uid, made.st_gid) == (theirs.st_uid, theirs.st_gid)


def _settings(folder: Path) -> None:
    """A broker's table that never ends is refused in time that is in proportion to its bytes."""
    (folder / "config").mkdir()
    (folder / "config" / "x.json").write_text('{"table":{"' + '\\"' * 20_000)
    file = ConfigFile(Disk(), str(folder), "x.json", "table", via="new-x", meaning="a table", hint="")
    began_s = time.process_time()
    try:
        file.load(dict)
    except CorruptionError:
        pass
    else:
        raise AssertionError("a text without an end was read")
    assert time.process_time() - began_s < 2


def _staging_names(folder: Path) -> None:
    """A name with a pid that no kernel has does not stop those who sweep."""
    token = process_token(os.getpid()).partition(".")[2]
    (folder / f"{'9' * 20}.{token}-{'0' * 16}.0-0-00000000{STAGED}").write_bytes(b"x")
    try:
        sweep(str(folder), 3600)
    except OverflowError as error:
        raise AssertionError(str(error)) from error


HOSTILE_FILES: dict[str, Callable[[Path], None]] = {
    "checkpoints of a stranger": _checkpoints,
    "settings without an end": _settings,
    "pids that were made up": _staging_names,
}
"""Cases of `fuzz`, by their names."""
