"""The folders of a store that was opened, and its identity, kept open, in order to notice others at their paths."""

from __future__ import annotations

from messagestore.errors import NotAStoreError, StoreError, StoreWentBackwardsError
from messagestore.files.disk import Disk, File
from messagestore.log.store_files import Identity, Paths, looks_like_store
from messagestore.signal_handlers import pass_on


class PinnedFolders:
    """The root and the folder of the log, and `spark/store.json`, each with a descriptor.

    Parameters
    ----------
    disk : Disk
    paths : Paths
    """

    def __init__(self, disk: Disk, paths: Paths) -> None:
        self._disk, self._paths = disk, paths
        self._folders: dict[str, File] = {}
        self._identity_file: File | None = None
        self._pin()
        self.identity: Identity | None = None
        self.read_identity()

    @property
    def _store_id(self) -> str:
        return "" if self.identity is None else self.identity.store_id

    def _pin(self) -> None:
        for path in (self._paths.root, self._paths.commit_log):
            if path not in self._folders:
                try:
                    self._folders[path] = self._disk.open_folder(path)
                except FileNotFoundError as error:
                    pass_on(error)
                    continue  # a store without messages has no log folder yet

    def read_identity(self) -> Identity | None:
        """Read `spark/store.json`, and keep the file open in order to notice another one; None: there is none."""
        try:
            self._identity_file = self._disk.open(self._paths.identity)
        except (FileNotFoundError, NotADirectoryError):
            return None
        identity = Identity.read(self._disk, self._paths.identity)
        if identity is not None:
            self.identity = identity
        return identity

    def check(self) -> Identity | None:
        """Check that the folders at the paths, and the identity in them, are those that were opened.

        This takes three system calls. Returned is an identity that was written anew, with other delay levels.

        Raises
        ------
        NotAStoreError
            Nothing, or something that is not a store, is there now.
        StoreWentBackwardsError
            Another store, or a copy of this one, is there.
        """
        for folder in self._folders.values():
            if not self._disk.folder_at_path(folder):
                raise self._moved()
        if len(self._folders) < 2:  # root and log
            self._pin()

        if self._identity_file is None or self._disk.at_path(self._identity_file):
            return None
        now = Identity.read(self._disk, self._paths.identity)
        if now is not None and now.store_id != self._store_id:
            raise self._moved()
        return self.read_identity()

    def _moved(self) -> StoreError:
        """The error for a folder that is no longer at its path."""
        disk, root = self._disk, self._paths.root
        opened = f"the folder that was opened (store {self._store_id or 'without an id'})"
        what = "Open the store at the place where it is now"

        if not looks_like_store(disk, self._paths):
            place_now = "another folder, without a store in it," if disk.is_folder(root) else "nothing"
            text = f"{root}: found {place_now} where {opened} was: it was renamed, deleted or unmounted. {what}"
            return NotAStoreError(text, path=root)

        try:
            identity = Identity.read(disk, self._paths.identity)
            place_now = f"store {identity.store_id}" if identity is not None else "a store without an id"
            if identity is not None and identity.store_id == self._store_id:
                place_now = f"a copy of store {identity.store_id}"
        except StoreError as error:
            place_now = f"a store that cannot be read ({error})"

        return StoreWentBackwardsError(
            f"{root}: found {place_now} in another folder than {opened}: it was restored, replaced or created "
            f"again. {what}"
        )

    def close(self) -> None:
        """Close what is held."""
        for held in (*self._folders.values(), self._identity_file):
            if held is not None:
                held.close()
        self._folders.clear()
        self._identity_file = None
