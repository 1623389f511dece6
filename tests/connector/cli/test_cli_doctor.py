"""`messagestore doctor` and `demo`, on machines that lack something and on one that does not."""

from __future__ import annotations

import errno
import itertools
import json
import os
import re
import stat
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cli_runs import error, finish, lines, objects, run, start
from messagestore import MessageExt, MessageStore, StorePermissionError
from messagestore.inspect import host
from pyspark_messagestore.cli.commands import doctor as cli_doctor
from small import SMALL, ClockDisk, filled

BOX = Path(sys.prefix) / "bin"


def checks(*arguments: object, code: int = 0) -> dict[str, dict[str, str]]:
    return {row["name"]: row for row in objects(run("doctor", *arguments, "--json", code=code))}


def program(path: Path, text: str) -> Path:
    path.write_text(f"#!{sys.executable}\n{text}")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


@pytest.fixture(autouse=True)
def this_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYSPARK_PYTHON", sys.executable)


# ---- doctor


def test_a_machine_that_is_well(tmp_path: Path) -> None:
    """Every check has a result; what Spark's workers would find is found as they do it."""
    root = filled(tmp_path / "store", 10)
    before = sorted(root.rglob("*"))
    found = checks(root)
    names = ["Python", "packages", "PySpark", "Java", "discovery", "clock", "file system", "room", "locks", "leases"]
    assert list(found) == [*names, "store"]
    assert found["discovery"] == {
        "name": "discovery",
        "result": "ok",
        "found": f"{sys.executable} finds the format messagestore",
        "remedy": "",
    }
    assert found["locks"]["result"] == "ok"
    assert "left closed, 10 messages" in found["store"]["found"]
    assert sorted(root.rglob("*")) == before
    assert lines(run("doctor"))[0].startswith("ok       Python          3.")


def test_doctor_where_there_is_no_store_makes_none(tmp_path: Path) -> None:
    assert checks(tmp_path / "new" / "store")["store"]["found"].endswith("new/store yet")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("answer", "name", "result", "words"),
    [
        ('print(\'{"error": "No module"}\')', "discovery", "warning", "No module"),
        ("raise SystemExit('broken')", "discovery", "warning", "it could not be asked"),
        ('print(\'{"pyspark": "4.1.1", "broken": {}, "sources": {}}\')', "PySpark", "fault", "needs PySpark 4.2"),
        (
            'print(\'{"pyspark": "4.3.0", "broken": {"pyspark_huggingface": "ImportError: x"}, "sources": {}}\')',
            "discovery",
            "fault",
            "cannot import pyspark_huggingface (ImportError: x), so Spark finds no Python data source at all",
        ),
        (
            'print(\'{"pyspark": "4.3.0", "broken": {}, "sources": {}}\')',
            "discovery",
            "fault",
            "does not find the format messagestore",
        ),
        (
            'print(\'{"pyspark": "4.3.0", "broken": {}, "unusable": "the package isal is not installed", "sources": {"messagestore": "0"}}\')',
            "discovery",
            "fault",
            "but cannot import itthe package isal is not installed",
        ),
        (
            'print(\'{"pyspark": "4.3.0", "broken": {}, "sources": {"messagestore": "0.0.1"}}\')',
            "discovery",
            "warning",
            "has version 0.0.1, and this is",
        ),
    ],
)
def test_a_python_that_spark_cannot_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: str, name: str, result: str, words: str
) -> None:
    """PYSPARK_PYTHON names a python with an old PySpark, a broken package, or without ours: each says what to do."""
    text = answer if "executable" in answer else answer.replace("'{", f'\'{{"executable": "{tmp_path}/python", ')
    monkeypatch.setenv("PYSPARK_PYTHON", str(program(tmp_path / "python", text)))
    found = checks(code=int(result == "fault"))[name]
    assert found["result"] == result
    assert words in found["found"] + found["remedy"]
    assert found["remedy"]


def test_a_python_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYSPARK_PYTHON", "/nowhere/python")
    found = checks()
    assert "there is no such program" in found["discovery"]["found"]
    assert "none in /nowhere/python; the store and this command line do without" in found["PySpark"]["found"]


@pytest.mark.parametrize(
    ("version", "modules", "words"),
    [
        ('openjdk version "11.0.2" 2019', "jdk.incubator.vector", "11.0.2"),
        ('java version "1.8.0_292"', "", "8.0_292"),
        ('openjdk version "17.0.15" 2025', "java.base", "without the module jdk.incubator.vector"),
        ("what?", "", "unknown"),
    ],
)
def test_a_java_that_spark_cannot_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str, modules: str, words: str
) -> None:
    (tmp_path / "bin").mkdir()
    text = f"import sys\nprint({version!r} if sys.argv[1] == '-version' else {modules!r}, file=sys.stderr)"
    program(tmp_path / "bin" / "java", text)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    found = checks(code=1)["Java"]
    assert found["result"] == "fault"
    assert words in found["found"]
    assert "full JRE 17 or newer" in found["remedy"]
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "nowhere"))
    assert checks()["Java"]["result"] == "warning"


@pytest.mark.parametrize(
    ("changes", "name", "result", "words"),
    [
        ({"file_system": "tmpfs"}, "file system", "warning", "it is in memory"),
        ({"file_system": "nfs4"}, "file system", "warning", "it is on the network"),
        ({"file_system": "fuse.gcsfuse"}, "file system", "warning", "it is on the network"),
        ({"file_system": "zfs"}, "file system", "warning", "Power cuts are tried on ext4 and XFS"),
        ({"locks": "Operation not supported"}, "locks", "fault", "Two writers are not kept apart"),
        ({"leases": "Permission denied"}, "leases", "warning", "Do not start a broker while writers may run"),
        ({"free_size": 5}, "room", "warning", "A segment has 1 GiB by default"),
        ({"free_size": 0}, "room", "fault", "Nothing can be put. Make room on /."),
        ({"full": "No space left on device"}, "room", "fault", "No space left on device"),
        ({"writable": "Permission denied"}, "permission", "fault", "It is no store. Give a folder"),
        ({"writable": "Read-only file system"}, "permission", "fault", "is mounted read-only. Mount it for writing"),
    ],
)
def test_a_folder_that_does_not_suit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, object], name: str, result: str, words: str
) -> None:
    fields = {"folder": str(tmp_path), "file_system": "ext4", "mount": "/", "free_size": 1 << 40} | changes
    monkeypatch.setattr(cli_doctor, "probe_folder", lambda path: host.FolderProbe(**fields))
    found = checks(tmp_path, code=int(result == "fault"))[name]
    assert found["result"] == result
    assert words in found["found"] + " " + found["remedy"]


def test_the_kernel_is_asked_what_is_mounted() -> None:
    """Of the mounts above a folder the innermost counts, also when one hides another."""
    probe = host.probe_folder("/dev/shm/no/such/folder")
    assert (probe.folder, probe.file_system, probe.in_memory) == ("/dev/shm", "tmpfs", True)
    assert host.probe_folder("/proc").file_system == "proc"
    assert host.probe_folder("/proc").writable


def test_messages_from_the_future(tmp_path: Path) -> None:
    root = filled(tmp_path / "store", 4, disk=ClockDisk(4_000_000_000_000))
    found = checks(root)["future"]
    assert found["result"] == "warning"
    assert re.search(r"the last message was stored [\d,]+ days in the future", found["found"])


def test_names_of_folders_do_not_act_on_the_terminal(tmp_path: Path) -> None:
    shown = run("doctor", tmp_path / "\x1b[2Jx").stdout
    assert "\\x1b[2Jx" in shown
    assert "\x1b" not in shown


# ---- demo


def test_the_demo_kills_a_process_and_counts(tmp_path: Path) -> None:
    """As a user runs it, in an empty folder: a process is killed, and nothing that it acknowledged is lost or doubled."""
    stdout, _ = finish(start("demo", cwd=tmp_path, env={**os.environ, "TMPDIR": str(tmp_path)}))
    assert "kill -9 " in stdout
    assert "the process is dead (exit code -9)" in stdout
    assert "verify` checked" in stdout
    assert "lost 0, duplicated 0; batches in part: 0" in stdout
    assert list(tmp_path.iterdir()) == []


def test_the_demo_shows_each_message_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """It looks again if there were too few messages yet: the first ones then stood there twice, as if doubled."""
    from pyspark_messagestore.cli.commands import demo as cli_demo

    looks = itertools.count(1)

    class Slow(cli_demo.Cursor):
        """Sees one message more at each look."""

        def once(self) -> Iterator[MessageExt]:
            return itertools.islice(super().once(), next(looks))

    monkeypatch.setattr(cli_demo, "Cursor", Slow)
    shown = [line for line in run("demo").stdout.splitlines() if line.startswith("  flights/")]
    assert len(shown) == len(set(shown)) == cli_demo._SHOWN
    assert next(looks) > 2


def test_the_store_of_the_demo_can_be_kept(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    found = json.loads(run("demo", "--folder", folder, "--json").stdout)
    assert found["exitCode"] == -9
    assert found["acknowledged"] >= 600
    assert (found["lost"], found["duplicated"], found["partialBatches"], found["faults"]) == (0, 0, 0, 0)
    with MessageStore.open_read_only(folder, SMALL) as store:
        ends = sum(store.max_offset("flights", queue_id) for queue_id in store.topics()["flights"])
    assert ends == found["messages"] >= found["acknowledged"]
    assert "exists already. Give a folder that does not exist" in error("demo", "--folder", folder, code=2)


def test_a_demo_that_lost_something_would_say_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The count is a count: a message that is taken for acknowledged and is not there is lost."""
    from pyspark_messagestore.cli.commands import demo as cli_demo

    counted = cli_demo._Story._counted

    def with_one_more(story: cli_demo._Story) -> dict[str, int]:
        story.puts.append(b"put 999999")
        return counted(story)

    monkeypatch.setattr(cli_demo._Story, "_counted", with_one_more)
    assert "lost 1, duplicated 0" in run("demo", code=1).stdout


def test_a_writer_that_cannot_start_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", str(program(tmp_path / "python", "raise SystemExit(3)")))
    result = run("demo", code=2)
    assert "ended with exit code 3. Run `messagestore doctor`" in result.stderr


def test_a_package_that_the_source_needs_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Discovery finds the format without importing the source; doctor imports it, and shows what that needs."""
    text = (
        "import os, sys\n"
        f"os.execv({sys.executable!r}, [{sys.executable!r}, '-c', \"import sys; sys.modules['isal'] = None\\n\" + sys.argv[2]])\n"
    )
    monkeypatch.setenv("PYSPARK_PYTHON", str(program(tmp_path / "python", text)))
    found = checks(code=1)["discovery"]
    assert found["result"] == "fault"
    assert "the package isal is not installed" in found["remedy"]


ABOVE = ["/", "/etc", "/home", "/opt", "/srv", "/tmp", "/usr/local", "/var", "/var/lib", "/run"]


@pytest.mark.parametrize("below", ["", "messagestore-of-nobody/deep er"])
@pytest.mark.parametrize("above", ABOVE)
def test_no_advice_touches_a_folder_that_is_not_the_stores(
    monkeypatch: pytest.MonkeyPatch, above: str, below: str
) -> None:
    """For a path whose parents do not exist it was `sudo chown -R 65534 /`."""

    def refused(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "geteuid", lambda: 65534)
    monkeypatch.setattr(host.tempfile, "mkstemp", refused)
    path = os.path.join(above, below)
    found = {check.name: check for check in cli_doctor._folder(path)}["permission"]
    assert found.result == "fault"
    assert "chown" not in found.remedy
    if below:
        assert f"Run `sudo install -d -o 65534 -m 700 '{path}'`" in found.remedy
    else:
        assert found.remedy.startswith("It is no store. Give a folder for the store alone")


def test_the_stores_own_folder_may_be_given_to_its_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root, empty = filled(tmp_path / "store", 2), tmp_path / "empty"
    empty.mkdir()
    fields = {"file_system": "ext4", "mount": "/", "free_size": 1 << 40, "writable": "Permission denied"}
    monkeypatch.setattr(cli_doctor, "probe_folder", lambda path: host.FolderProbe(folder=str(path), **fields))
    user = os.geteuid()
    assert checks(root, code=1)["permission"]["remedy"].startswith(f"Run `sudo chown -R {user} {root}`")
    assert checks(empty, code=1)["permission"]["remedy"].startswith("It is no store.")


def test_a_folder_that_this_user_may_not_enter_does_not_end_the_checks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether it holds a store cannot be known, and the rest was not said."""
    root = filled(tmp_path / "store", 2)

    def refused(path: str) -> bool:
        raise StorePermissionError(f"{path}: Permission denied", path=path)

    fields = {"file_system": "ext4", "mount": "/", "free_size": 1 << 40, "writable": "Permission denied"}
    monkeypatch.setattr(cli_doctor, "probe_folder", lambda path: host.FolderProbe(folder=str(path), **fields))
    monkeypatch.setattr(cli_doctor.operator, "holds_store", refused)
    found = checks(root, code=1)
    assert found["permission"]["remedy"].startswith("This user may not look into it. Work as its owner")
    assert (found["store"]["result"], found["store"]["found"]) == ("fault", f"{root}: Permission denied")


def test_a_disk_without_room_for_a_name_is_full_and_not_somebody_elses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(host.tempfile, "mkstemp", refused)
    found = checks(tmp_path, code=1)
    assert found["room"]["result"] == "fault"
    assert "permission" not in found
