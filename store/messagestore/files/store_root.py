"""Defines where a store's root is, which links below it may be followed, and who owns new files there.

A writer creates, renames, truncates and deletes files below the store's root. Whoever can place a symbolic link there
could point it at somebody else's folder. Therefore each such operation walks from the root to the file's folder, one
descriptor per step, and acts relative to the last one: what was checked is what is used, even if somebody replaces a
folder with a link meanwhile.

    <root>                       may be reached through links: whoever opens the store chose them
    <root>/commitlog, ...        a folder, or a link made by the root folder's owner (or by uid 0) to a folder of
                                 the same owner: RocketMQ's folders may lie on another disk
    <root>/spark                 a folder
    everything further down      a folder

If uid 0 creates new files, they belong to the owner and the group of the root folder. Their mode is `fileMode`; without
it, the owner may read and write, the group gets the access that the root folder gives it, and others get none.

Roots are known by name for the life of the process (`known_root`). A path that is not below a known root is used as it
is. A session holds its root (`HeldRoots`): it acts in the folder that it opened, whatever is at the path by now.
Threads: safe.
"""

from __future__ import annotations

import contextlib
import grp
import os
import pwd
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType, TracebackType

from messagestore.errors import NotAStoreError, StorePermissionError
from messagestore.signal_handlers import is_of_handler, pass_on

_OWN_FOLDER = "spark"
_MOST_DEPTH = 8
_FOLDER_FLAGS = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
_PRIVATE = 0o600
_GROUP = 0o060

_modes: dict[str, int | None] = {}
"""Each known root, and the mode that is set for its files."""


def known_root(root: str, file_mode: int | None = None, *, only: bool = False) -> None:
    """Treat paths below `root` as those of a store from now on.

    Parameters
    ----------
    root : str
        An absolute path, spelled as in all paths below it.
    file_mode : int | None
        The mode of new files; None: the known mode stays.
    only : bool
        Forget the known mode, also for None.
    """
    if only or file_mode is not None or root not in _modes:
        _modes[root] = file_mode


class HeldRoot:
    """The folder of a root, held open: whatever is done below the path of the root is done below this folder.

    A folder that is renamed takes its files with it, and another folder or a link in its place gets none of them.

    Parameters
    ----------
    root : str
        As for `known_root`.
    file_mode : int | None
        The mode of new files, whatever another user of the same path has set.

    Attributes
    ----------
    folder : int
        A descriptor of the folder, which closes with the last reference to the object.

    Raises
    ------
    OSError
        There is no such folder.
    """

    __slots__ = ("_identity", "file_mode", "folder", "root")

    def __init__(self, root: str, file_mode: int | None) -> None:
        self.root = root
        self.file_mode = file_mode
        self.folder = os.open(root, _FOLDER_FLAGS)
        info = os.fstat(self.folder)
        self._identity = info.st_dev, info.st_ino

    def relative(self, path: str) -> str | None:
        """Return the path from the folder on, "." for the folder itself; None for a path that is not below the root."""
        root = self.root
        if not path.startswith(root):
            return None
        size = len(root)
        if len(path) == size:
            return "."
        return path[size + 1 :] if path[size] == "/" else None

    def at_path(self) -> bool:
        """Whether the folder is still the one at its path."""
        try:
            info = os.stat(self.root)
        except (FileNotFoundError, NotADirectoryError) as error:
            pass_on(error)
            return False
        return self._identity == (info.st_dev, info.st_ino)

    def __del__(self) -> None:
        if hasattr(self, "folder"):  # false if the folder could not be opened
            os.close(self.folder)


def root_of(path: str) -> str | None:
    """Return the known root above a path."""
    for _ in range(_MOST_DEPTH):
        path, _, name = path.rpartition("/")
        if path in _modes:
            return path
        if not name:
            return None
    return None


class Place:
    """A name in a folder: `with Place(path) as place: os.unlink(place.name, dir_fd=place.folder)`.

    Parameters
    ----------
    path : str
    checked : bool
        Walk from the root to the folder; False for reads of RocketMQ's folders, where a link does no harm.
    held : HeldRoot | None
        The root, if the path is below one that is held.

    Attributes
    ----------
    folder : int | None
        A descriptor of the folder; None if the name is the whole path.

    Raises
    ------
    NotAStoreError
        On entering, if there is a link or a file where a folder must be.
    """

    __slots__ = ("_held", "_root_folder", "folder", "name", "path", "root")

    def __init__(self, path: str, *, checked: bool = True, held: HeldRoot | None = None) -> None:
        self.path = path
        self.name = path
        self.folder: int | None = None
        self._held = held
        self._root_folder: os.stat_result | None = None
        root = root_of(path) if held is None else held.root
        self.root = root if root is not None and (checked or path.startswith(f"{root}/{_OWN_FOLDER}/")) else None

    def __enter__(self) -> Place:
        held = self._held
        if self.root is None:
            if held is not None:
                self.name, self.folder = held.relative(self.path) or ".", held.folder
            return self

        *folders, self.name = self.path[len(self.root) + 1 :].split("/")
        fd = os.open(self.root, _FOLDER_FLAGS) if held is None else held.folder
        try:
            self._root_folder = os.fstat(fd)
            for depth, name in enumerate(folders):
                below = self._step(fd, name, "/".join([self.root, *folders[: depth + 1]]), first=depth == 0)
                above, fd = fd, below  # first: what a signal handler raises must not have it closed twice
                self._close(above)
        except BaseException:
            self._close(fd)
            raise

        self.folder = fd
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        fd, self.folder = self.folder, None
        if fd is not None:
            self._close(fd)

    def _close(self, fd: int) -> None:
        if self._held is None or fd != self._held.folder:
            os.close(fd)

    def _step(self, fd: int, name: str, path: str, *, first: bool) -> int:
        try:
            return os.open(name, _FOLDER_FLAGS | os.O_NOFOLLOW, dir_fd=fd)
        except NotADirectoryError:
            if not stat.S_ISLNK(os.stat(name, dir_fd=fd, follow_symlinks=False).st_mode):
                raise NotAStoreError(f"{path}: found a file where a folder must be", path=path) from None
        except OSError as error:
            error.filename = path
            raise

        if not first or name == _OWN_FOLDER:
            raise NotAStoreError(
                f"{path}: found a symbolic link where a folder must be. Writers do not follow it, and nothing was "
                f"changed. Replace the link by the folder itself",
                path=path,
            )
        return self._linked(fd, name, path)

    def _linked(self, fd: int, name: str, path: str) -> int:
        """Return the folder to which a link of the first level leads, if the folder is the owner's."""
        assert self._root_folder is not None
        owner = self._root_folder.st_uid
        link = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=fd)
        try:
            made_by = os.fstat(link).st_uid
            target = os.readlink("", dir_fd=link)  # of the link that was examined, whatever has its name by now
        finally:
            os.close(link)
        try:
            folder = os.open(target, _FOLDER_FLAGS, dir_fd=fd)
        except OSError as error:
            raise NotAStoreError(
                f"{path}: found a link to {target!r}, which is no folder that can be opened ({error.strerror})",
                path=path,
            ) from error
        of = os.fstat(folder).st_uid
        if made_by not in (owner, 0) or of != owner:
            os.close(folder)
            raise NotAStoreError(
                f"{path}: found a link made by {_user(made_by)} to a folder of {_user(of)}; allowed is a link of "
                f"{_user(owner)}, who owns {self.root}, to a folder of the same user",
                path=path,
            )
        return folder

    # ---- new files

    def take_file(self, fd: int, *, writers_only: bool = False) -> None:
        """Give a new file its owner, group and mode, before anybody else knows its name.

        With `writers_only`, only those who may write it may read it: a lock file, which a reader could lock as well.
        """
        self._take(fd, _PRIVATE, writers_only=writers_only)

    def take_folder(self, fd: int) -> None:
        """Do the same for a new folder: whoever may read a file may enter."""
        self._take(fd, _PRIVATE | stat.S_IXUSR)

    def _take(self, fd: int, private: int, *, writers_only: bool = False) -> None:
        root = self._root_folder
        if root is None:
            return

        made = os.fstat(fd)
        uid, gid = made.st_uid, made.st_gid
        if os.geteuid() == 0:
            uid, gid = root.st_uid, root.st_gid
        elif gid != root.st_gid and root.st_gid in os.getgroups():
            gid = root.st_gid
        if (uid, gid) != (made.st_uid, made.st_gid):
            os.fchown(fd, uid, gid)

        assert self.root is not None
        mode = _modes.get(self.root) if self._held is None else self._held.file_mode
        if mode is None:  # a group other than the root folder's gets no access
            mode = _PRIVATE | (root.st_mode & _GROUP if gid == root.st_gid else 0)

        if writers_only:
            mode = of_writers(mode)
        if private & stat.S_IXUSR:
            mode |= (mode & 0o444) >> 2

        if mode != made.st_mode & 0o777:
            os.fchmod(fd, mode | (made.st_mode & stat.S_ISGID))


class Opening(Place):
    """A `Place` whose folder an operation uses; if the system refuses, the error says who owns the file."""

    __slots__ = ()

    def __enter__(self) -> Opening:
        try:
            super().__enter__()
        except PermissionError as error:
            pass_on(error)
            raise no_access(error, self.path) from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)
        if (
            isinstance(error, PermissionError)
            and not isinstance(error, StorePermissionError)
            and not is_of_handler(error)
        ):
            raise no_access(error, self.path) from error
        if isinstance(error, OSError) and error.filename == self.name:
            error.filename = self.path


class HeldRoots:
    """The roots that a disk holds. A path below one of them leads into the folder that was opened.

    An object never changes; `holding` and `without` make another one.
    """

    __slots__ = ("_roots",)

    def __init__(self, roots: Mapping[str, HeldRoot] = MappingProxyType({})) -> None:
        self._roots = roots

    def holding(self, root: str, file_mode: int | None) -> HeldRoots:
        """Return these roots, and the folder that is at `root` now; raises `OSError` if there is none."""
        return HeldRoots({**self._roots, root: HeldRoot(root, file_mode)})

    def without(self, root: str) -> HeldRoots:
        """Return these roots without `root`, which need not be among them."""
        return HeldRoots({path: held for path, held in self._roots.items() if path != root})

    def at_path(self, root: str) -> bool:
        """Whether the folder that is held for `root` is still the one at this path; True if none is held."""
        held = self._roots.get(root)
        return held is None or held.at_path()

    def above(self, path: str) -> HeldRoot | None:
        """Return the held root that a path belongs to."""
        for held in self._roots.values():
            if held.relative(path) is not None:
                return held
        return None

    def opening(self, path: str | Path, *, checked: bool = True) -> Opening:
        """Return the place of a path, for one operation; `checked` as for `Place`."""
        text = os.fspath(path)
        return Opening(text, checked=checked, held=self.above(text) if self._roots else None)

    def stat(self, path: str | Path) -> os.stat_result:
        """Examine what has a name, without following a link."""
        text = os.fspath(path)
        held = self.above(text) if self._roots else None
        if held is None:
            return os.stat(text, follow_symlinks=False)
        try:
            return os.stat(held.relative(text) or ".", dir_fd=held.folder, follow_symlinks=False)
        except OSError as error:
            error.filename = text
            raise

    @contextlib.contextmanager
    def folder(self, path: str | Path) -> Iterator[str | int]:
        """Yield what names a folder where there is no `dir_fd`: its path, or a descriptor below a held root."""
        text = os.fspath(path)
        held = self.above(text) if self._roots else None
        if held is None:
            yield text
            return

        try:
            fd = os.open(held.relative(text) or ".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=held.folder)
        except OSError as error:
            error.filename = text
            raise

        try:
            yield fd
        finally:
            os.close(fd)


def of_writers(mode: int) -> int:
    """Return a mode without the right to read for those who may not write."""
    return mode & ~sum(0o4 << shift for shift in (0, 3, 6) if not mode & 0o2 << shift)


def writable_by_others(root: str) -> bool:
    """Whether every user may create and remove names in the root folder."""
    return bool(os.stat(root).st_mode & stat.S_IWOTH)


def other_names(path: str) -> int:
    """Return how many names (hard links) a file has besides this one; 0 if there is no such file."""
    try:
        return os.stat(path, follow_symlinks=False).st_nlink - 1
    except FileNotFoundError as error:
        pass_on(error)
        return 0


def is_owners_link(path: str, held: HeldRoot | None = None) -> bool:
    """Whether a permitted link stands in the place of one of RocketMQ's folders and leads to a permitted folder."""
    try:
        with Place(f"{path}/.", held=held) as place:
            return place.folder is not None
    except (NotAStoreError, OSError):
        return False


def no_access(error: PermissionError, path: str) -> StorePermissionError:
    """Return an error that says who owns what cannot be used, and what to do.

    Parameters
    ----------
    error : PermissionError
    path : str
        What was to be used; the error names its folder if that is what refuses.
    """
    root = root_of(path)

    status, at = None, path
    while status is None and at != "/":
        try:
            status = os.stat(at, follow_symlinks=False)
        except OSError:
            at = os.path.dirname(at)

    reason = f"{path}: {error.strerror}"
    if status is not None:
        owned_by = f"{_user(status.st_uid)}, group {_group(status.st_gid)}, mode {status.st_mode & 0o7777:04o}"
        reason += f": {at} belongs to {owned_by}"
    reason += f", and this process runs as {_user(os.geteuid())}"

    if root is not None:
        owner = os.stat(root)
        if status is not None and status.st_uid == os.geteuid() and not status.st_mode & 0o200:
            reason += f". Run: chmod u+rwX {at}"
        elif status is not None and (status.st_uid, os.geteuid()) == (0, owner.st_uid):
            reason += f". Run: sudo chown -R {owner.st_uid}:{owner.st_gid} {root}"
        else:
            may_read = status is not None and os.access(at, os.R_OK, effective_ids=True)
            reason += (
                f". The store belongs to {_user(owner.st_uid)}. Run as that user, or make the store "
                f"{'writable' if may_read else 'readable'} for a group that both are in (chgrp, chmod, and fileMode in "
                f"store.properties)" + (", or open it read-only" if may_read else "")
            )

    made = StorePermissionError(reason, path=path)
    made.errno = error.errno
    return made


def _user(uid: int) -> str:
    try:
        return f"{pwd.getpwuid(uid).pw_name} (uid {uid})"
    except KeyError:
        return f"uid {uid}"


def _group(gid: int) -> str:
    try:
        return f"{grp.getgrgid(gid).gr_name} (gid {gid})"
    except KeyError:
        return f"gid {gid}"
