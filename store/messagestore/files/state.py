"""`spark/state`: records how far readers may see, and what the next writer must examine.

`spark/state` is 4 096 bytes with two slots, 512 bytes apart so that no torn sector hits both. A change is one pwrite of
one slot. A slot counts if its CRC matches; if both match, the one with the higher counter counts. A torn write
therefore leaves the previous state.

    0         64    80        512       576   592            4096
    | slot 0  | F   | zeros   | slot 1  | F   | zeros        |       a state with counter n is in slot n % 2

F, the flushed end, is written together with the slot before it. It counts if its own CRC matches and it names the CRC
of that slot; otherwise the flushed end is unknown.

Written only under the writer lock; read by any thread and process at any time.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass, replace
from operator import attrgetter

from messagestore.files.disk import Disk, File, replace_file
from messagestore.files.unsynced import WrittenFiles
from messagestore.format.layout import (
    STATE_ASYNC,
    STATE_CLEAN,
    STATE_FILE_SIZE,
    STATE_FLUSHED,
    STATE_OWN,
    STATE_POISONED,
    STATE_RECOVERING,
    STATE_SLOT,
    STATE_SLOT_POSITIONS,
)
from messagestore.signal_handlers import pass_on

NOTHING_IN_FLIGHT = -1
UNKNOWN_FLUSHED_END = -1
_BOOT_ID = "/proc/sys/kernel/random/boot_id"
_SIZE = STATE_SLOT.size + STATE_FLUSHED.size
_READ_SIZE = STATE_SLOT_POSITIONS[-1] + _SIZE
_READ_TRIES = 3

_SLOT, _FLUSHED = STATE_SLOT.struct, STATE_FLUSHED.struct
_FLUSHED_CRC_POSITION = STATE_SLOT.size + STATE_FLUSHED.offset("crc")
_CRC_POSITION = STATE_SLOT.offset("crc")
_PACKED, _FLUSHED_FIELDS = struct.Struct(_SLOT.format[:-1]), struct.Struct(_FLUSHED.format[:-1])  # without the CRC

_values = attrgetter(*(field.name for field in STATE_SLOT.fields if field.name != "crc"))

_boot_hash: int | None = None


def boot_hash() -> int:
    """Return the CRC-32 of this boot's id: what was written in another boot and not synced may be lost."""
    global _boot_hash  # noqa: PLW0603 - one value per boot
    if _boot_hash is None:
        with open(_BOOT_ID, encoding="ascii") as file:
            _boot_hash = zlib.crc32(file.read().strip().encode())
    return _boot_hash


@dataclass(frozen=True, slots=True)
class State:
    """One slot, and the flushed end behind it.

    Parameters
    ----------
    counter : int
        The generation, from 1; every change is a new one.
    in_flight : int
        S: bytes at or above it may be unfinished; `NOTHING_IN_FLIGHT`: no bytes are.
    visible_end : int
        V: readers see the records that end at or below it.
    clean_end : int
        C: below it, CommitLog, ConsumeQueues and index are synced.
    anchor_position, anchor_size, anchor_crc : int
        The last record below C: its physical offset, bytes, and CRC-32. Size 0: there is none.
    boot_hash : int
        `boot_hash()` of the process that wrote the slot.
    flags : int
        STATE_POISONED, STATE_ASYNC, STATE_CLEAN, STATE_RECOVERING, STATE_OWN of `layout`.
    writer_pid : int
        The process that wrote the slot; for messages only.
    known_flushed_end : int
        F: the end up to which the log was synced, which matters while the state is asynchronous;
        `UNKNOWN_FLUSHED_END` if its bytes are damaged.
    """

    counter: int = 1
    in_flight: int = NOTHING_IN_FLIGHT
    visible_end: int = 0
    clean_end: int = 0
    anchor_position: int = 0
    anchor_size: int = 0
    anchor_crc: int = 0
    boot_hash: int = 0
    flags: int = 0
    writer_pid: int = 0
    known_flushed_end: int = UNKNOWN_FLUSHED_END

    @property
    def poisoned(self) -> bool:
        """A sync failed in the process that wrote this state."""
        return bool(self.flags & STATE_POISONED)

    @property
    def asynchronous(self) -> bool:
        """Bytes above C were appended in ASYNC_FLUSH, so a ConsumeQueue unit there proves nothing."""
        return bool(self.flags & STATE_ASYNC)

    @property
    def flushed_end(self) -> int:
        """The end of what survives a power cut, as far as this state says. It never goes back.

        SYNC_FLUSH makes bytes visible when they are on the disk.
        """
        if not self.asynchronous:
            return self.visible_end
        return min(self.visible_end, max(self.clean_end, self.known_flushed_end))

    @property
    def clean(self) -> bool:
        """The store was closed with everything synced up to C, and this project has not written since."""
        return bool(self.flags & STATE_CLEAN)

    @property
    def closed(self) -> bool:
        """Whether a writer of this project closed the store with all that it shows below C."""
        return self.clean and self.visible_end == self.clean_end

    @property
    def nothing_in_flight(self) -> bool:
        """Whether no append and no recovery was under way."""
        return self.in_flight == NOTHING_IN_FLIGHT

    @property
    def recovering(self) -> bool:
        """A recovery is at work or died, so what is derived from the log above C may be incomplete."""
        return bool(self.flags & STATE_RECOVERING)

    @property
    def own(self) -> bool:
        """Only this project has ever written the store, as far as there is evidence.

        A broker was never at work there, so every unit has the number that its record says.
        """
        return bool(self.flags & STATE_OWN)

    @property
    def idle(self) -> bool:
        """Whether no append and no recovery was under way when this was written, in this boot of the machine.

        Everything that was written since the machine was started is then still there.
        """
        return self.nothing_in_flight and not self.poisoned and not self.recovering and self.boot_hash == boot_hash()

    def to_bytes(self) -> bytes:
        """Return the bytes of the slot and of the flushed end.

        Raises
        ------
        ValueError
            A field cannot hold its value.
        """
        values = _values(self)
        try:
            crc = zlib.crc32(_PACKED.pack(*values))
            flushed = _FLUSHED_FIELDS.pack(self.known_flushed_end, crc)
            return _SLOT.pack(*values, crc) + flushed + zlib.crc32(flushed).to_bytes(4, "big")
        except struct.error as error:
            raise ValueError(f"state: {error}; found {self}") from error

    @classmethod
    def from_bytes(cls, data: bytes) -> State | None:
        """Return the state in a slot, with what lies behind it; None if the slot was never written or is torn."""
        if len(data) != _SIZE:
            return None
        *values, crc = _SLOT.unpack_from(data)
        if crc != zlib.crc32(data[:_CRC_POSITION]):
            return None
        flushed_end, slot_crc, flushed_crc = _FLUSHED.unpack_from(data, STATE_SLOT.size)
        if slot_crc != crc or flushed_crc != zlib.crc32(data[STATE_SLOT.size : _FLUSHED_CRC_POSITION]):
            flushed_end = UNKNOWN_FLUSHED_END
        return cls(*(*values, flushed_end))


class StateFile:
    """The file `spark/state`, kept open.

    Parameters
    ----------
    disk : Disk
    path : str
        The file; it may be missing until `create`.
    """

    def __init__(self, disk: Disk, path: str) -> None:
        self.disk = disk
        self.path = path
        self.written = WrittenFiles(disk)
        self._file: File | None = None
        self._last: State | None = None

    @property
    def last_counter(self) -> int:
        """The counter of the state that this object last read or wrote; -1 before the first."""
        return self._last.counter if self._last is not None else -1

    @property
    def inode(self) -> int:
        """The inode of the file that was last read; -1 without one.

        If it changes, the file was recreated or restored.
        """
        return self._file.inode if self._file is not None else -1

    def create(self, via: str, state: State) -> State:
        """Create the file, whole and synced, with `state` in its slot; an existing one is replaced."""
        data = bytearray(STATE_FILE_SIZE)
        position = STATE_SLOT_POSITIONS[state.counter % 2]
        data[position : position + _SIZE] = state.to_bytes()
        self.close()
        replace_file(self.disk, self.path, bytes(data), via=via)
        self._last = state
        return state

    def read(self) -> State | None:
        """Return the state that counts; None without a file or a valid slot. This takes a few microseconds."""
        for _ in range(_READ_TRIES):  # a reader that was stopped between two writes may see both slots torn
            data = self._read_slots()
            if data is None:
                return None

            state: State | None = None
            for position in STATE_SLOT_POSITIONS:
                slot = State.from_bytes(data[position : position + _SIZE])
                if slot is not None and (state is None or slot.counter > state.counter):
                    state = slot

            if state is not None:
                self._last = state
                return state
        return None

    def _read_slots(self) -> bytes | None:
        file = self._file
        if file is None or not self.disk.at_path(file):
            self.close()
            try:
                file = self._file = self.disk.open(self.path)
            except (FileNotFoundError, NotADirectoryError) as error:
                pass_on(error)
                return None
            self.written.files[self.path] = (file.device, file.inode)
        return self.disk.pread(file, _READ_SIZE, 0)

    def write(self, state: State) -> State:
        """Write one slot, never the one that counts. It is not synced.

        Raises
        ------
        ValueError
            The counter is not above the last one, or would fall into its slot.
        FileReplaced
            The file is missing, or is not the one that was last read or written: whoever restores a store while a
            writer runs puts another store's state there.
        """
        last = self._last if self._last is not None else self.read()
        if last is not None and (state.counter <= last.counter or (state.counter - last.counter) % 2 == 0):
            raise ValueError(f"state: counter: found {state.counter}; after {last.counter} comes {last.counter + 1}")
        self.disk.pwrite(self.written.writable(self.path), state.to_bytes(), STATE_SLOT_POSITIONS[state.counter % 2])
        self._last = state
        return state

    def write_both(self, state: State) -> State:
        """Write the same content into both slots, with counters +0 and +1, so that no slot shows the previous state.

        Returns
        -------
        State
            The state that counts now: `state` with its counter plus 1.
        """
        self.write(state)
        return self.write(replace(state, counter=state.counter + 1))

    def sync(self) -> None:
        """Force what was written to disk."""
        self.disk.fdatasync(self.written.writable(self.path))

    def close(self) -> None:
        """Drop the file, which closes when no thread reads it any more. The next call opens it again."""
        self._file = None
        self.written.clear()
