"""The queue offset that the next message of a queue gets, and the check of the queue's files.

`QueueNumbers` checks a queue before it gives the queue's first number: the files must hold the units up to the end that
the log proves, and those that were sealed at the last clean end. A damaged queue is rebuilt from the log.
"""

from __future__ import annotations

import logging
import os

from messagestore.errors import (
    CorruptionError,
    MessageIllegalError,
)
from messagestore.files.consume_queue import queue_directory
from messagestore.files.consumer_offsets import lower_offsets, most_read
from messagestore.format.layout import UNIT
from messagestore.format.message import BATCH_TOPIC
from messagestore.log.dispatch import rebuild
from messagestore.log.log_end import Anchor
from messagestore.log.queue_proof import proven_queue_end
from messagestore.log.remembered import corrected
from messagestore.log.seal_check import (
    Fault,
    fault_of,
    is_without_crc,
    keep_number,
    listed,
    renew_seal,
    seal_of_file,
    sealed_at,
    short_queues,
    without_last_unit,
)
from messagestore.log.sealed_ends import Key, SealedEnds
from messagestore.log.store_files import StoreFiles
from messagestore.writer.standing import Standing

MAX_QUEUE_OFFSET = ((1 << 63) - 1) // UNIT.size - (1 << 31)
"""The largest queue offset whose position in the queue's files, and that of 2^31 messages after it, fits an int64."""
_log = logging.getLogger(__name__)


class QueueNumbers:
    """The queue offsets that a writer gives next.

    Parameters
    ----------
    standing : Standing
    """

    def __init__(self, standing: Standing) -> None:
        self._standing = standing
        self._files = standing.files
        self.next_offsets: dict[tuple[str, int], int] = {}
        """The next queue offset of each queue that was checked."""
        self._most_read: dict[tuple[str, int], int] | None = None
        self.rebuilt: list[str] = []
        """What was done to queues whose files were damaged, one line for each repair."""

    def next_offset(self, topic: str, queue_id: int) -> int:
        """The queue offset that the next message of a queue gets."""
        key = (topic, queue_id)
        offset = self.next_offsets.get(key)
        if offset is None:
            offset = self.next_offsets[key] = self._checked_end(topic, queue_id)
        if offset > MAX_QUEUE_OFFSET:
            text = f"{topic}/{queue_id}: found queue offset {offset}; allowed is {MAX_QUEUE_OFFSET}. Use another queue"
            raise MessageIllegalError(text, field="queue_offset", size=offset, limit=MAX_QUEUE_OFFSET)
        return offset

    def _checked_end(self, topic: str, queue_id: int) -> int:
        """The end of a queue as the log proves it; units that a crashed broker left after the end are zeroed."""
        key = (topic, queue_id)
        self._files.disk.check_folders(f"{queue_directory(self._files.paths.root, topic, queue_id)}/{'0' * 20}")
        self._check_sound(key)

        queue = self._files.queue(topic, queue_id)
        if not queue.offsets and self._standing.journal.had_queue(topic, queue_id):
            folder = queue.directory
            if not self._files.disk.is_folder(folder):
                raise CorruptionError(
                    folder,
                    0,
                    f"the units of {topic}/{queue_id}, which had messages when the store was closed",
                    "no folder",
                    hint=f"Remove the folder {os.path.dirname(folder)} and run `messagestore recover`, which rebuilds "
                    "its queues from the log.",
                )

        sealed_end = self.sealed_ends().end_of(key)
        offset = (
            sealed_end
            if sealed_end is not None
            else proven_queue_end(self._files, topic, queue_id, self._standing.end.physical_offset, crc=False)
        )

        if queue.end(hint=offset) > offset:
            queue.truncate(offset)
        self._lower_groups(topic, queue_id, offset)
        return offset

    def _lower_groups(self, topic: str, queue_id: int, end: int) -> None:
        """Lower what consumer groups have read of a queue to what it has, before its numbers are given again."""
        files = self._files
        root = files.paths.root
        if self._most_read is None:
            try:
                self._most_read = most_read(root, files.disk)
            except CorruptionError as error:  # whoever needs the offsets gets it as an error
                _log.warning("%s: consumer groups may be beyond the ends of queues: %s", root, error)
                self._most_read = {}
        if self._most_read.get((topic, queue_id), 0) <= end:
            return
        begin = files.queue(topic, queue_id).search_physical(files.commit_log.min_offset) if end else 0
        # BATCH records that were settled must not be taken for others.
        right = end if topic == BATCH_TOPIC else corrected(end + 1, begin, end)
        for group, offset in lower_offsets(root, topic, queue_id, end, right, files.disk).items():
            _log.warning(
                "%s: consumer group %s had read %s/%d up to %d, but the queue ends at %d: it was rebuilt, cut, "
                "restored or made again. The group continues at %d",
                root,
                group,
                topic,
                queue_id,
                offset,
                end,
                right,
            )

    def sealed_ends(self) -> SealedEnds:
        """The ends of the queues in what has been dispatched, as far as they are known."""
        files = self._files
        if files.ends is None:
            files.ends = sealed_at(files, self._standing.state.clean_end, self._standing.state.visible_end)
            if not files.ends.anchor.size:
                self._check_unsealed()
        return files.ends

    def _check_unsealed(self) -> None:
        """Rebuild damaged queues that no seal covers, because `spark/ends` is lost or a broker wrote last."""
        files, faults = self._files, {}
        for key in short_queues(files, self._standing.state.visible_end):
            faults[key] = _no_unit(files, key)
        if faults:
            self.make_sound(faults)

    def make_sound(self, faults: dict[tuple[str, int], Fault]) -> str:
        """Rebuild damaged queues from the log, and return one line that says so. Call under the mutex.

        Raises
        ------
        CorruptionError
            The log does not contain what the queues had.
        StorePoisonedError
            A sync failed.
        """
        files, ends = self._files, self.sealed_ends()
        first = next(iter(faults.values()))

        try:
            rebuild(files, faults, self._standing.state.visible_end)
            for key in faults:
                keep_number(files, ends, key)
        except OSError as error:
            raise self._standing.poison(f"queues could not be rebuilt ({error})") from error

        for key in faults:
            fault = fault_of(files, ends, key)
            if fault is not None:
                raise CorruptionError(
                    fault.path,
                    fault.position,
                    fault.expected,
                    f"{fault.found}, also after it was rebuilt from the log",
                    hint=f"Restore the folder consumequeue from a copy. To continue with what the log holds, move "
                    f"{files.paths.ends} away and run `messagestore recover`.",
                )
            renew_seal(files, ends, key)

        count = f"{len(faults)} queue" + ("" if len(faults) == 1 else "s")
        line = (
            f"{count} did not agree with the log and were rebuilt from it ({listed(faults)}). "
            f"The first: {first.path}: offset {first.position}: expected {first.expected}, found {first.found}"
        )
        _log.warning("%s: %s", files.paths.root, line)
        self.rebuilt.append(line)
        return line

    def _check_sound(self, key: tuple[str, int]) -> None:
        """Check a queue's last unit. If it is missing, check all queues, and rebuild those that are damaged."""
        ends = self.sealed_ends()
        fault = fault_of(self._files, ends, key)
        if fault is None:
            return
        faults = {key: fault}
        for other_key in {*ends.seals, *ends.unsealed}:
            other_fault = fault_of(self._files, ends, other_key, thorough=True)
            if other_fault is not None:
                faults.setdefault(other_key, other_fault)
        self.make_sound(faults)

    def check_queues(self) -> str | None:
        """Check all units of all queues, rebuild damaged queues, and return one line that says what was done, or None.

        Queues that `spark/ends` does not know are compared with the log, and are known from then on. Call this when
        nothing is in flight.

        Raises
        ------
        CorruptionError
            The log does not contain what a queue had.
        """
        with self._standing.mutex:
            self._standing.check_usable()
            files, ends = self._files, self.sealed_ends()
            with_folder = {(t, q) for t, queue_ids in files.queue_names().items() for q in queue_ids}
            unknown = with_folder - ends.seals.keys() - ends.unsealed.keys()

            faults = self._faults(with_folder, unknown)
            if faults:
                self.make_sound(faults)
            line = "; ".join(self.rebuilt) or None

            without_crc = {key for key, seal in ends.seals.items() if is_without_crc(files, key, seal)}
            for key in unknown | without_crc:
                ends.ask(key)
            state = self._standing.state
            if (unknown or without_crc or faults) and state.clean_end == state.visible_end:
                self.seal_unsealed()
                self.write_ends()
            return line

    def _faults(self, with_folder: set[Key], unknown: set[Key]) -> dict[Key, Fault]:
        """The faults of the queues: of those with seals, of those about which nothing is known, and of those in the
        journal that have no folder.
        """
        files, ends = self._files, self.sealed_ends()
        checked = {key: fault_of(files, ends, key, thorough=True) for key in {*ends.seals, *ends.unsealed}}
        faults = {key: fault for key, fault in checked.items() if fault is not None}

        if unknown:
            end = self._standing.state.visible_end
            for key in without_last_unit(files, files.commit_log.min_offset, end, unknown):
                faults[key] = _no_unit(files, key)

        for topic, ranges in (self._standing.journal.queues or {}).items():
            for key in ((topic, queue_id) for first, last in ranges for queue_id in range(first, last + 1)):
                if key not in with_folder and key not in faults:
                    directory = files.queue(*key).directory
                    faults[key] = Fault(directory, 0, f"the units of {topic}/{key[1]}", "no folder")
        return faults

    def seal_unsealed(self) -> None:
        """Seal the queues that were not written through this object, by the last units in their files."""
        files, ends = self._files, self.sealed_ends()
        limit = self._standing.state.visible_end
        for last_try in (False, True):
            missing = []
            for key in list(ends.unsealed):
                known_end = ends.unsealed[key]
                seal = seal_of_file(files, ends, key, limit)
                if seal is None and known_end and not last_try:
                    missing.append(key)
                else:
                    ends.answer(key, seal)

            if not missing:
                return
            rebuild(files, missing, limit)

    def write_ends(self) -> None:
        """Write to `spark/ends` where the queues end at the clean end."""
        state, files = self._standing.state, self._files
        via, anchor = files.paths.temporary("ends"), Anchor.of(state)
        self.sealed_ends().write(files.disk, files.paths.ends, via, state.clean_end, anchor)


def _no_unit(files: StoreFiles, key: tuple[str, int]) -> Fault:
    directory = files.queue(*key).directory
    return Fault(directory, 0, f"a unit for the last record of {key[0]}/{key[1]}", "none")
