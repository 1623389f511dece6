"""Makes the next two segments before they are needed (RocketMQ's AllocateMappedFileService).

A new segment costs a put about half a millisecond, and several with `preallocate=true`: the file is created, gets its
size and its blocks, and the name of the segment before it is synced. A thread does this as soon as less than an eighth
of the last segment is left, and after each new segment. RocketMQ's next segment lies in `commitlog` without a byte in
it. Ours waits in `spark/` under a temporary name, and gets its name with its first record in it, as every new file
does. So a kill leaves no segment that a broker or a reader would have to explain, and the next writer removes the file.

Its name says which process made it, because several may have the store open, one after the other. A writer that opens
the store removes the files of all others that it does not see alive. If it is wrong about one, that one makes a new
file: both look only while they hold the writer lock.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import uuid
from collections import deque

from messagestore.errors import StoreError
from messagestore.files.disk import File
from messagestore.files.staging_files import PROCESS, is_alive, own_token
from messagestore.log.store_files import StoreFiles
from messagestore.writer.log_writer import LogWriter
from messagestore.writer.service_thread import ServiceThread

AHEAD = 2
"""How many segments are made ahead: the next and the next but one."""
_NAME = re.compile(rf"new-segment-({PROCESS})-[0-9a-f]{{8}}")
_log = logging.getLogger(__name__)


def remove_orphans(files: StoreFiles) -> None:
    """Remove the segments that nobody will take: those of processes that are not known to be alive, and those of this
    process, which has just opened the store.

    The caller holds the writer lock.
    """
    for name in files.disk.names(files.paths.spark):
        match = _NAME.fullmatch(name)
        if match is not None and (match[1] == own_token() or not is_alive(match[1])):
            with contextlib.suppress(FileNotFoundError):  # its process has just removed it
                files.disk.unlink(os.path.join(files.paths.spark, name))


class AllocateService(ServiceThread):
    """The segments that are made ahead for one writer, and the thread that makes them.

    Parameters
    ----------
    writer : LogWriter
    """

    def __init__(self, writer: LogWriter) -> None:
        super().__init__("messagestore-allocate")
        self.writer = writer
        self._spares: deque[File] = deque()

    def ask(self) -> None:
        """Have the next segments made; the thread starts with the first call."""
        self.start()
        self.wake_thread()

    def take(self) -> File | None:
        """A file for the next segment, or None if none is ready. The caller gives it its name."""
        while self._spares:
            file = self._spares.popleft()
            if self.writer.files.disk.at_path(file):
                return file
            file.close()  # another process took its turn and removed it
        return None

    def run(self) -> None:
        """Make what is missing, each time that somebody asks."""
        while not self.stopped:
            self._work.acquire()
            try:
                if not self.stopped:
                    self.writer.sync_segment_name()
                while self._may_make():
                    self._spares.append(self._make())
            except (StoreError, OSError) as error:  # the put that needs the segment makes it, or gets its own error
                _log.info("%s: no segment was made ahead (%s)", self.writer.files.paths.root, error)

    def _may_make(self) -> bool:
        """Whether a segment is missing, and its blocks do not take the last room from what is appended now."""
        log, disk = self.writer.log, self.writer.files.disk
        if self._stopped or len(self._spares) >= AHEAD:
            return False
        return not log.preallocate or disk.free(self.writer.files.paths.root) >= (AHEAD + 1) * log.segment_size

    def _make(self) -> File:
        log, disk = self.writer.log, self.writer.files.disk
        path = self.writer.files.paths.temporary(f"segment-{own_token()}-{uuid.uuid4().hex[:8]}")
        file = disk.open_new(path, log.segment_size)
        if log.preallocate:
            try:
                disk.fallocate(file, log.segment_size)
            except BaseException:
                file.close()
                disk.unlink(path)
                raise
        return file

    def remove(self) -> None:
        """Remove the files that nobody took. Call it after `stop`, before the writer lock is released."""
        disk = self.writer.files.disk
        while self._spares:
            file = self._spares.popleft()
            file.close()
            with contextlib.suppress(FileNotFoundError):
                disk.unlink(file.path)

    def forget(self) -> None:
        """Close the files that nobody took, and leave them to the next writer, who removes them."""
        while self._spares:
            self._spares.popleft().close()
