"""Checks whole stores with code that is not shared with the package.

The checker is slow and uses only `struct`. It is written from store/FORMAT.md and shares `tests/reference.py` (also
only `struct`) with the other tests. It examines the bytes of a whole small store (path below the root -> bytes; folders
end with a slash), reports every fault with file, offset, expected and found, and lists the messages of each queue in
order, as the log holds them.

It knows only stores that this project alone has written. `verify` checks what a Java broker may leave.
"""

from __future__ import annotations

import binascii
import json
import os
import re
import struct
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import reference
from crash.checker_records import (
    BATCH_TOPIC,
    DIGESTS,
    Record,
    Slot,
    broken,
    digest_holds,
    ends_of,
    journal_of,
    parse,
    slot_of,
)

CHUNK_SIZE = 16 * 1024 * 1024
_DIGITS = re.compile(r"[0-9]{20}")
_TOP = {"commitlog/", "consumequeue/", "index/", "config/", "spark/", "abort", "checkpoint", "lock"}
_OURS = {"state", "store.json", "journal", "ends", "writer.lock", "serve", "staging/", "cut/"}
_OURS |= {"consumer-offsets.lock", "consumer-offsets.json", "consumers.lock", "broker.json"}
_FILES_OF_CONFIG = ("topics.json", "consumerOffset.json", "subscriptionGroup.json", "delayOffset.json")
_SCHEDULE_TOPIC, _DELIVERY_APP = "SCHEDULE_TOPIC_XXXX", "rmq_sys_schedule"
_CONFIG = {"", *(name + end for name in _FILES_OF_CONFIG for end in ("", ".bak"))}
# What a killed writer was creating: each file has one name, and the next writer that creates it removes it first.
_OURS |= {
    f"new-{name}" for name in ("store.json", "state", "journal", "ends", "topics.json", "checkpoint", "abort", "cut")
}
_OURS |= {
    "new-subscription-group.json",
    "new-broker.json",
    "settings.json",
    "new-settings.json",
    "new-delay-offset.json",
    "put-times.json",
    "new-put-times.json",
    "recoveries.json",
    "new-recoveries.json",
}
_FILLER_SIZE = 0x7FFFFFFF
_UNITS_MS = {"s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
_CLEAN, _RECOVERING, _OWN, _KNOWN_FLAGS = 4, 8, 16, 31


class Fault(NamedTuple):
    path: str
    offset: int
    expected: str
    found: str


@dataclass
class Checked:
    """The findings of one check."""

    faults: list[Fault] = field(default_factory=list)
    records: list[Record] = field(default_factory=list)
    batches: list[tuple[int, dict[str, Any], list[Record]]] = field(default_factory=list)
    end: int = 0

    def find(self, path: str, offset: int, expected: object, found: object) -> None:
        self.faults.append(Fault(path, offset, str(expected), str(found)))

    @property
    def queues(self) -> dict[tuple[str, int], list[bytes]]:
        """Return (topic, queue id) -> bodies, in the order of the queue, without the BATCH records."""
        found: dict[tuple[str, int], list[bytes]] = {}
        for record in self.records:
            if record.topic != BATCH_TOPIC:
                found.setdefault((record.topic, record.queue_id), []).append(record.body)
        return found

    @property
    def bodies(self) -> list[bytes]:
        """Return all bodies, in the order of the log."""
        return [record.body for record in self.records if record.topic != BATCH_TOPIC]


Tree = Mapping[str, bytes]


def read_tree(root: Path) -> dict[str, bytes]:
    """Read a real folder as a tree."""
    found = {}
    for folder, folders, files in os.walk(root):
        inside = os.path.relpath(folder, root)
        prefix = "" if inside == "." else inside + "/"
        found.update({f"{prefix}{name}/": b"" for name in folders})
        found.update({prefix + name: Path(folder, name).read_bytes() for name in files})
    return found


def check(tree: Tree, *, settled: bool = True, uninterrupted: bool = False) -> Checked:
    """Check a store.

    Parameters
    ----------
    tree : mapping of str to bytes
    settled : bool
        Nothing is in flight: zeros follow the end, and no unit points there. False for a store whose writer was killed
        and that is not recovered yet: it is checked up to its visible end.
    uninterrupted : bool
        No writer ever failed or was killed: each BLANK exists because what follows it had no room.
    """
    return _Check(tree, settled, uninterrupted).run()


class _Check:
    def __init__(self, tree: Tree, settled: bool, uninterrupted: bool) -> None:
        self.tree = tree
        self.settled = settled
        self.uninterrupted = uninterrupted
        self.found = Checked()
        self.log: dict[int, bytes] = {}
        self.segment_size = 0
        self.store: dict[str, Any] = {}
        self.slot: Slot | None = None
        self.begin = 0
        """Where the log begins: above 0 after retention has deleted the first segments."""

    def run(self) -> Checked:
        found = self.found
        self._names()
        self._small_files()

        self.log = self._files("commitlog/", self.store.get("mappedFileSizeCommitLog"))
        self.segment_size = len(next(iter(self.log.values()), b""))
        self.begin = min(self.log, default=0)
        limit = self.slot.visible_end if self.slot is not None else 0

        self._walk(limit)
        self._state_and_checkpoint()
        self._batches()

        if not self._recovering:
            self._queues(limit)
        if self.store.get("messageIndexEnable", True) and not self._recovering:
            self._index()

        self._journal()
        self._ends()
        if self.settled:
            self._zeros(limit)
        return found

    @property
    def _recovering(self) -> bool:
        """Whether a recovery was killed, so that what is derived from the log is incomplete until the next one ends."""
        return self.slot is not None and bool(self.slot.flags & _RECOVERING)

    # ---- names and small files

    def _names(self) -> None:
        for path in self.tree:
            parts = path.split("/")
            top = parts[0] + ("/" if len(parts) > 1 else "")
            if top not in _TOP:
                self.found.find(path, 0, "a file of the store", "a stray one")
            elif top == "spark/" and len(parts) > 1 and parts[1]:
                name = parts[1] + ("/" if len(parts) > 2 else "")
                unfinished = name == "rebuild" or name.startswith("new-")  # left by a writer that was killed
                # What a deletion could not remove, as it has told, the next recovery removes (mode `deletions`).
                taken_away = name.startswith("new-deleted-topic-")
                if name not in _OURS and not taken_away and (self.settled or not unfinished):
                    self.found.find(path, 0, "a file of spark/", "a stray one")
            elif top == "config/" and parts[1] not in _CONFIG:
                self.found.find(path, 0, "a file of config/", "a stray one")

    def _json(self, path: str) -> dict[str, Any]:
        try:
            value = json.loads(self.tree[path])
        except KeyError:
            return {}
        except ValueError as error:
            self.found.find(path, 0, "JSON", error)
            return {}
        if not isinstance(value, dict):
            self.found.find(path, 0, "a JSON object", type(value))
            return {}
        return value

    def _small_files(self) -> None:
        found, tree = self.found, self.tree

        self.store = self._json("spark/store.json")
        if not re.fullmatch("[0-9a-f]{32}", str(self.store.get("storeId"))) or self.store.get("formatVersion") != 1:
            found.find("spark/store.json", 0, "a store id and format version 1", self.store)

        text, comma, last = tree.get("spark/store.json", b"").rpartition(b",\n")
        if last != f'  "crc": "{binascii.crc32(text):08x}"\n}}\n'.encode() or not comma:
            found.find("spark/store.json", len(text), f"CRC-32 {binascii.crc32(text):08x} as the last field", last)

        for topic, config in self._json("config/topics.json").get("topicConfigTable", {}).items():
            if config.get("topicName") != topic or not config.get("writeQueueNums", 0) > 0:
                found.find("config/topics.json", 0, f"a topic {topic}", config)

        data = tree.get("spark/state")
        if data is None or len(data) != 4096:
            found.find("spark/state", 0, "4096 bytes", None if data is None else len(data))
            return

        self.slot = slot_of(data)
        if self.slot is None:
            found.find("spark/state", 0, "a valid slot", "none")
        rest = data[80:512] + data[592:]
        if rest.count(0) != len(rest):
            found.find("spark/state", 80, "zeros beside the slots", "other bytes")

        for position in (0, 512):
            flushed_end, slot_crc, crc = struct.unpack_from(">qII", data, position + 64)
            whole = crc == binascii.crc32(data[position + 64 : position + 76]) and flushed_end >= -1
            if slot_crc == struct.unpack_from(">I", data, position + 60)[0] and slot_crc and not whole:
                found.find("spark/state", position + 64, "a flushed end", data[position + 64 : position + 80].hex())

    def _files(self, folder: str, size: object) -> dict[int, bytes]:
        """Read files named by offsets; they must have one size and no gap."""
        files = {}
        for path in sorted(self.tree):
            if path.startswith(folder) and path != folder:
                name = path[len(folder) :]
                if not _DIGITS.fullmatch(name):
                    self.found.find(path, 0, "20 digits", name)
                elif len(self.tree[path]) != size:
                    self.found.find(path, 0, f"{size} bytes", len(self.tree[path]))
                else:
                    files[int(name)] = self.tree[path]
        for first, second in pairwise(files):
            if second != first + len(files[first]):
                self.found.find(f"{folder}{second:020d}", 0, f"a file at {first + len(files[first])}", "a gap")
        return files

    def _segment_path(self, position: int) -> str:
        first = position // self.segment_size * self.segment_size if self.segment_size else 0
        return f"commitlog/{first:020d}"

    def _bytes(self, start: int, end: int) -> bytes:
        parts = []
        while start < end:
            first = start // self.segment_size * self.segment_size
            part = self.log.get(first, b"")[start - first : end - first]
            if not part:
                break
            parts.append(part)
            start += len(part)
        return b"".join(parts)

    # ---- the log

    def _walk(self, limit: int) -> None:
        found, position = self.found, self.begin
        group_begins = -1
        while position < limit:
            first = position // self.segment_size * self.segment_size if self.segment_size else 0
            data = self.log.get(first)
            if data is None:
                found.find(f"commitlog/{first:020d}", position, f"a segment (the log goes on to {limit})", "none")
                break

            at = position - first
            size, magic = struct.unpack_from(">iI", data, at) if at + 8 <= len(data) else (0, 0)
            if magic == reference.BLANK:
                rest = data[at + 8 :]
                if size != len(data) - at or rest.count(0) != len(rest):
                    found.find(self._segment_path(position), position, "a BLANK to the end, and zeros", f"size {size}")
                    break
                group_begins = position
                position += size
                continue

            record = parse(data[at : at + size]) if 0 < size <= len(data) - at - 8 else broken(0, f"size {size}")
            if record.fault or record.physical_offset != position:
                at_place = record.fault or f"one that says {record.physical_offset}"
                found.find(self._segment_path(position), position, f"a record (the log goes on to {limit})", at_place)
                break

            found.records.append(record)
            position += record.size
            if group_begins >= 0 and self.uninterrupted:
                self._blank_was_needed(group_begins, position - record.size, record)
                group_begins = -1

        found.end = position
        if position > limit:
            found.find(self._segment_path(limit), limit, "the end of a record", "the middle of one")
        self._follow()

    def _blank_was_needed(self, blank: int, start: int, record: Record) -> None:
        """Check that a BLANK fills a segment only if the next record, or what is written with it, does not fit."""
        size, position = 0, start
        first = record
        while record.fault == "" and (record.topic, record.queue_id, record.store_ms) == (
            first.topic, first.queue_id, first.store_ms,
        ):  # fmt: skip
            size += record.size
            position += record.size
            head = self._bytes(position, position + 4)
            following = struct.unpack(">i", head)[0] if len(head) == 4 else 0
            if not 0 < following <= self.segment_size or position // self.segment_size != start // self.segment_size:
                break
            record = parse(self._bytes(position, position + following))
        if size + 8 <= start - blank:
            self.found.find(
                self._segment_path(blank), blank, "a record, for which there is room", f"BLANK, then {size} bytes"
            )

    def _follow(self) -> None:
        """Check that queue offsets have no gap, and that store times do not go back by an hour or less."""
        following: dict[tuple[str, int], int] = {}
        last_ms = 0
        for record in self.found.records:
            key = (record.topic, record.queue_id)
            path, at = self._segment_path(record.physical_offset), record.physical_offset
            expected = following.get(key, 0 if not self.begin else record.queue_offset)
            if record.queue_offset != expected:
                self.found.find(path, at, f"queue offset {expected} of {key}", record.queue_offset)
            following[key] = record.queue_offset + 1
            # If they go back further, the clock had been far ahead.
            if last_ms - 3_600_000 <= record.store_ms < last_ms:
                self.found.find(path, at, f"a store time from {last_ms} on", record.store_ms)
            last_ms = record.store_ms

    def _zeros(self, limit: int) -> None:
        for first, data in self.log.items():
            start = max(0, limit - first)
            tail = data[start:]
            if tail.count(0) != len(tail):
                at = start + len(tail) - len(tail.lstrip(b"\0"))
                self.found.find(f"commitlog/{first:020d}", first + at, "zeros behind the log's end", "other bytes")

    # ---- state, store checkpoint, journal

    def _state_and_checkpoint(self) -> None:
        found, slot = self.found, self.slot
        last = found.records[-1] if found.records else None

        abort = self.tree.get("abort")
        token = f"messagestore {self.store.get('storeId')}\n".encode()
        if abort is not None and abort != token:
            found.find("abort", 0, token, abort)
        if slot is None:
            return

        problems = []
        if slot.clean_end > slot.visible_end:
            problems.append("the clean end is above the visible end")
        if slot.in_flight != -1 and slot.in_flight < slot.visible_end:
            problems.append("bytes in flight below the visible end")
        if slot.flags & ~_KNOWN_FLAGS:
            problems.append(f"flags {slot.flags}")
        if (
            abort is None
            and slot.visible_end
            and (slot.flags & ~_OWN, slot.in_flight, slot.clean_end) != (_CLEAN, -1, slot.visible_end)
        ):
            problems.append("closed, but not clean up to its end")

        if slot.anchor_size:
            anchor = self._bytes(slot.anchor_position, slot.anchor_position + slot.anchor_size)
            end = slot.anchor_position + slot.anchor_size
            blank = end // self.segment_size * self.segment_size + self.segment_size if self.segment_size else 0
            if binascii.crc32(anchor) != slot.anchor_crc or slot.clean_end not in (end, blank):
                problems.append("the record below the clean end is another one")
        elif slot.clean_end:
            problems.append("no record below the clean end")

        for problem in problems:
            found.find("spark/state", 0, "a state that holds", f"{problem}: {slot}")

        data = self.tree.get("checkpoint")
        if data is None:
            if slot.clean_end and abort is None:
                found.find("checkpoint", 0, "a store checkpoint", "none")
            return
        if len(data) != 4096 or data[40:].count(0) != len(data) - 40:
            found.find("checkpoint", 40, "4096 bytes, zeros behind the fields", f"{len(data)} bytes, or others")
            return

        physic, logics, index, _, confirm = struct.unpack_from(">qqqqq", data)
        newest = last.store_ms if last is not None else 0
        if max(physic, logics, index) > newest or (abort is None and physic != newest):
            found.find("checkpoint", 0, f"times up to {newest}", (physic, logics, index))
        if (last is None and confirm) or (last is not None and confirm > last.physical_offset):
            found.find("checkpoint", 32, "an offset of a record", confirm)

    def _journal(self) -> None:
        found, path = self.found, "spark/journal"
        journal = journal_of(self.tree.get(path))
        if journal is None:
            if self.slot is not None and self.slot.clean_end and self.tree.get("abort") is None:
                found.find(path, 0, "a journal", "none")
            return
        if "fault" in journal:
            found.find(path, 0, "a journal whose checksums hold", journal["fault"])
            return
        wanted: dict[str, dict[int, list[Any]]] = {}
        replaced: dict[str, list[str]] = {}
        before: dict[str, list[list[Any]]] = {}
        for at, body, _ in found.batches:
            if body["versionSource"] != "none":
                if body.get("replaces"):
                    wanted[body["app"]] = {}
                    replaced.setdefault(body["app"], []).extend(body["replaces"])
                replaced.setdefault(body["app"], []).extend(body.get("refused", ()))
                versions = wanted.setdefault(body["app"], {})
                older = versions.pop(body["version"], None)
                if older is not None and body.get("restated"):  # the journal may be older than the restated record
                    before.setdefault(body["app"], []).append(older)
                versions[body["version"]] = [
                    body["version"], body["versionSource"], body["queryId"], at, body["end"], body["rows"], body["digest"],
                    sorted(body["ranges"]), bool(body.get("start")),
                ]  # fmt: skip
        closed = self.tree.get("abort") is None
        entries = journal["apps"]
        count = found.batches[-1][1]["queueOffset"] + 1 if found.batches else journal["covered"] * bool(self.begin)
        if journal["covered"] > count or (closed and journal["covered"] != count):
            found.find(path, 0, f"covered {count}", journal["covered"])
        for app, versions in wanted.items():
            rows = [row for row in entries.get(app, []) if row[3] >= self.begin]
            entries_wanted = list(versions.values())
            if app == _DELIVERY_APP:  # of deliveries, only the newest are kept, since only the last one counts
                entries_wanted = entries_wanted[-max(len(rows), 1) :]
            if closed and rows != entries_wanted:
                found.find(path, 0, f"{app}: {list(versions.values())[-3:]}", rows[-3:])
        for app, rows in entries.items():
            for row in rows:
                same = wanted.get(app, {}).get(row[0]) == row or (not closed and row in before.get(app, ()))
                if row[3] >= self.begin and not same:
                    found.find(path, 0, f"an entry of the log for {app}", row)
        for app, query_ids in replaced.items():
            if closed and not set(query_ids) <= set(journal["replaced"].get(app, ())):
                found.find(path, 0, f"{app}: {query_ids} refused", journal["replaced"].get(app))
        checkpoint = self.tree.get("checkpoint", b"")[:40].ljust(40, b"\0")
        if closed and journal["checkpoint_crc"] != binascii.crc32(checkpoint):
            found.find(path, 0, f"checkpoint_crc {binascii.crc32(checkpoint)}", journal["checkpoint_crc"])
        if journal["identity"].get("storeId") != self.store.get("storeId"):
            found.find(path, 0, f"the identity of {self.store.get('storeId')}", journal["identity"])
        queues = {(record.topic, record.queue_id) for record in found.records}
        listed = {(t, q) for t, ranges in journal["queues"].items() for a, b in ranges for q in range(a, b + 1)}
        if closed and not queues <= listed:
            found.find(path, 0, f"queues {sorted(queues)}", sorted(listed))

    def _ends(self) -> None:
        """Check that each seal is its queue's last unit at the clean end.

        A newly written clean end must have a seal for each queue.
        """
        data, slot, path = self.tree.get("spark/ends"), self.slot, "spark/ends"
        if data is None or slot is None:
            return
        ends = ends_of(data, slot.clean_end)
        last: dict[tuple[str, int], tuple[int, int, int]] = {}
        for record in self.found.records:
            if record.physical_offset + record.size <= ends["end"]:
                last[record.topic, record.queue_id] = record.queue_offset + 1, record.physical_offset, record.size
        for key, seal in ends["queues"].items():
            if last.get(key) != seal[:3] and (key in last or seal[1] >= self.begin):
                self.found.find(path, 0, f"{key}: {last.get(key)}", seal)
        if self.uninterrupted and self.tree.get("abort") is None and last.keys() - ends["queues"].keys():
            self.found.find(path, 0, f"queues {sorted(last)}", sorted(ends["queues"]))

    # ---- batches

    def _batches(self) -> None:
        records = self.found.records
        covered = -1
        for number, record in enumerate(records):
            if record.topic != BATCH_TOPIC:
                continue
            at = record.physical_offset

            try:
                body = json.loads(record.body)
                end = body["end"]
                rows = []
                for other in records[number + 1 :]:
                    if other.physical_offset >= end:
                        break
                    rows.append(other)
                self._batch(record, body, rows)
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                self.found.find(self._segment_path(at), at, "the body of a BATCH record", f"{error!r}")
                continue

            if at < covered:
                self.found.find(self._segment_path(at), at, f"no BATCH inside another one (up to {covered})", "one")
            covered = end
            self.found.batches.append((at, body, rows))

    def _batch(self, record: Record, body: dict[str, Any], rows: list[Record]) -> None:
        at = record.physical_offset
        end, start = body["end"], at + record.size

        ranges: dict[tuple[str, int], list[int]] = {}
        for row in rows:
            ranges.setdefault((row.topic, row.queue_id), []).append(row.queue_offset)

        said: dict[tuple[str, int], list[int]] = {}
        for topic, runs in body["ranges"].items():
            for queue_id, first, count in runs:
                said.setdefault((topic, queue_id), []).extend(range(first, first + count))

        crcs = [
            f"{binascii.crc32(self._bytes(begin, min(begin + CHUNK_SIZE, end))):08x}"
            for begin in range(start, end, CHUNK_SIZE)
        ]
        last_end = rows[-1].physical_offset + rows[-1].size if rows else start
        restated = body.get("restated", False)

        for what, is_so in {
            "begins as a BATCH record": record.body.startswith(b'{"messagestore":1,"app":'),
            "store": body["store"] in (self.store.get("storeId"), *self.store.get("ancestors", ())),
            "offset": body["offset"] == at,
            "queueOffset": body["queueOffset"] == record.queue_offset,
            "end": last_end == end,
            "rows": body["rows"] == len(rows) or (restated and self._repeats(body)),
            "ranges": ranges == said,
            "crc": body["crc"] == "".join(crcs) and body["chunkSize"] == CHUNK_SIZE,
            "flush": body["flush"] in ("SYNC_FLUSH", "ASYNC_FLUSH"),
            "keys": dict(record.properties).get("KEYS") == body["app"],
            "digest": body["digestName"] in DIGESTS
            and (
                restated
                or _has_none(body)
                or digest_holds(body["digestName"], body["digest"], rows)
                or any(self._may_have_asked_for_more(row) for row in rows)
            ),
            "one store time": all(row.store_ms == record.store_ms for row in rows),
        }.items():
            if not is_so:
                self.found.find(self._segment_path(at), at, f"a batch whose {what} holds", body)

    def _repeats(self, body: dict[str, Any]) -> bool:
        """Whether a restated record says what the record of its batch says, if that is still there."""
        same = ("version", "versionSource", "queryId", "rows", "digest", "digestName", "origin", "start")
        return all(
            [body.get(name) for name in same] == [other.get(name) for name in same]
            and sorted(body["ranges"]) == sorted(other["ranges"])
            for _, other, _ in self.found.batches
            if (other["app"], other["version"]) == (body["app"], body["version"])
        )

    # ---- derived files

    def _queues(self, limit: int) -> None:
        units: dict[tuple[str, int], list[tuple[int, bytes]]] = {}
        for record in self.found.records:
            tags_code = record.tags_code
            if record.topic == _SCHEDULE_TOPIC:  # the time at which it is due
                tags_code = self._due(record)
            unit = struct.pack(">qiq", record.physical_offset, record.size, tags_code)
            units.setdefault((record.topic, record.queue_id), []).append((record.queue_offset, unit))
        folders = {}
        for path in self.tree:
            parts = path.split("/")
            if parts[0] == "consumequeue" and len(parts) >= 4 and parts[3]:
                folders[(parts[1], parts[2])] = f"consumequeue/{parts[1]}/{parts[2]}/"
            elif parts[0] == "consumequeue" and ((len(parts) < 3 and parts[1]) or (len(parts) == 3 and parts[2])):
                self.found.find(path, 0, "folders of queues", "a file")
        for (topic, queue_id), wanted in units.items():
            folder = folders.pop((topic, str(queue_id)), None)
            if folder is None:
                self.found.find(f"consumequeue/{topic}/{queue_id}", 0, f"{len(wanted)} units", "no file")
                continue
            self._units(folder, wanted, limit)
        for folder in folders.values():
            self._units(folder, [], limit)

    def _delays_ms(self, record: Record) -> list[int]:
        """Return the delays that count where a record begins; none if the store does not say any."""
        entries = self.store.get("delayLevels") or [[0, ""]]
        levels = [levels for begin, levels in entries if begin <= record.physical_offset][-1:] or [entries[0][1]]
        return [int(part[:-1]) * _UNITS_MS[part[-1]] for part in levels[0].split()]

    def _may_have_asked_for_more(self, record: Record) -> bool:
        """Whether the row of a record may have had a level above the last one, of which its digest is then."""
        return dict(record.properties).get("DELAY") == str(len(self._delays_ms(record)))

    def _due(self, record: Record) -> int:
        """Return when a delayed message is due. If the store does not say the levels: as the unit says it, or its store
        time if that is impossible.
        """
        level, delays_ms = dict(record.properties).get("DELAY", ""), self._delays_ms(record)
        if level.isdigit() and int(level) and delays_ms:
            return record.store_ms + delays_ms[min(int(level), len(delays_ms)) - 1]
        size = self.store.get("mappedFileSizeConsumeQueue") or 20
        at = record.queue_offset * 20
        data = self.tree.get(f"consumequeue/{record.topic}/{record.queue_id}/{at // size * size:020d}", b"")
        place, _, due_ms = struct.unpack_from(">qiq", data.ljust(size, b"\0"), at % size)
        return due_ms if due_ms > record.store_ms and place == record.physical_offset else record.store_ms

    def _units(self, folder: str, wanted: list[tuple[int, bytes]], limit: int) -> None:
        files = self._files(folder, self.store.get("mappedFileSizeConsumeQueue"))
        first = min(files, default=0)
        data = b"".join(files[offset] for offset in sorted(files))
        left = wanted[0][0] * 20 - first if wanted else len(data.rstrip(b"\0")) * bool(self.begin)
        for at in range(0, max(left, 0), 20):  # units of deleted records
            place, size, _ = struct.unpack_from(">qiq", data.ljust(at + 20, b"\0"), at)
            if self.begin <= place < limit and size != _FILLER_SIZE:
                self.found.find(folder, first + at, f"no unit at or above {self.begin} without a record", place)
                return
        for queue_offset, unit in wanted:
            at = queue_offset * 20 - first
            if at < 0 or data[at : at + 20] != unit:
                there = data[max(at, 0) : max(at, 0) + 20]
                self.found.find(folder, queue_offset * 20, f"unit {queue_offset}: {unit.hex()}", there.hex())
                return
        end = (wanted[-1][0] + 1) * 20 - first if wanted else -(-left // 20) * 20
        if not wanted and self.settled and not self.begin:
            self.found.find(folder, 0, "no queue without a record", f"{len(files)} files")
        behind = data[end:]
        if not self.settled:
            place = struct.unpack_from(">q", behind.ljust(8, b"\0"))[0]
            if behind.strip(b"\0") and place < limit:
                self.found.find(folder, first + end, f"no unit below {limit} without a record", place)
        elif behind.count(0) != len(behind):
            self.found.find(folder, first + end, "zeros behind the last unit", behind[:20].hex())

    def _index(self) -> None:
        wanted = Counter(
            (key_hash, record.physical_offset) for record in self.found.records for key_hash in record.key_hashes
        )
        times = {record.physical_offset: record.store_ms for record in self.found.records}
        slots, most = self.store.get("maxHashSlotNum", 0), self.store.get("maxIndexNum", 0)

        there: Counter[tuple[int, int]] = Counter()
        for path in sorted(self.tree):
            if not path.startswith("index/") or path == "index/":
                continue
            data = self.tree[path]
            if not re.fullmatch(r"index/[0-9]{17}", path) or len(data) != 40 + 4 * slots + 20 * most:
                self.found.find(path, 0, f"17 digits, {40 + 4 * slots + 20 * most} bytes", len(data))
                continue
            there.update(self._index_file(path, data, slots, times))

        for key_hash, at in list(wanted - there):
            self.found.find("index/", 0, f"an entry for the key {key_hash} of the record at {at}", "none")
        for key_hash, at in list(there - wanted):
            if at >= self.begin and (self.settled or at < self.found.end):
                self.found.find("index/", 0, "entries of keys of records only", f"{key_hash} at {at}")

    def _index_file(self, path: str, data: bytes, slots: int, times: dict[int, int]) -> Iterator[tuple[int, int]]:
        """Yield the entries that a search finds."""
        begin_ms, end_ms, begin, end, slot_count, entry_count = struct.unpack_from(">qqqqii", data)
        entries = list(struct.iter_unpack(">iqii", data[40 + 4 * slots :]))
        heads = struct.unpack_from(f">{slots}i", data, 40)

        reached, used = set(), 0
        for slot, head in enumerate(heads):
            number = head
            used += number != 0
            before = entry_count if self.settled else len(entries)
            while number:
                if not 0 < number < before:
                    self.found.find(path, 40 + 4 * slot, f"an entry below {before}", number)
                    return
                if entries[number][0] % slots != slot:
                    self.found.find(path, 40 + 4 * slot, f"a chain of entries of slot {slot}", f"entry {number}")
                    return
                reached.add(number)
                before, number = number, entries[number][3]

        counted = entries[1:entry_count]
        problems = []
        if self.settled and (used != slot_count or len(reached) != entry_count - 1):
            problems.append(f"{used} slots in use, {len(reached)} entries reached")
        if counted and (begin, end) != (counted[0][1], counted[-1][1]):
            problems.append(f"entries from {counted[0][1]} to {counted[-1][1]}")

        there = [
            (times[at], said) for at, said in ((begin, begin_ms), (end, end_ms)) if at >= self.begin and at in times
        ]
        if counted and self.settled and (any(a != b for a, b in there) or (end >= self.begin and end not in times)):
            problems.append(f"times {times.get(begin)} to {times.get(end)}")

        for number, (key_hash, at, seconds, _) in enumerate(counted, 1):
            if number not in reached:
                continue
            if number > 1 and at in times and seconds != min(max(0, times[at] - begin_ms) // 1000, (1 << 31) - 1):
                problems.append(f"entry {number}: {seconds} s")
            yield key_hash, at

        behind = data[40 + 4 * slots + 20 * entry_count :]
        if self.settled and behind.count(0) != len(behind):
            problems.append(f"other bytes behind entry {entry_count - 1}")

        for problem in problems[:3]:
            self.found.find(path, 0, f"header {(begin_ms, end_ms, begin, end, slot_count, entry_count)}", problem)


def _has_none(body: dict[str, Any]) -> bool:
    """Whether the store made the records itself: nobody sends such a batch again, so it has no digest."""
    own = body["versionSource"] == "none" or body["app"] == _DELIVERY_APP
    return bool(own and body["digest"] == f"{0:016x}")
