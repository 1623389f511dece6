"""Which kinds of file systems may lose or misread a store, and which kind a folder is on.

On a file system of the network, leases are not given, a lock may be lost in silence, and another host's page cache may
show a record as zeros. In memory, everything is gone after a reboot.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re

_NETWORK = frozenset(
    [
        "nfs",
        "nfs4",
        "cifs",
        "smb3",
        "smbfs",
        "9p",
        "afs",
        "ceph",
        "glusterfs",
        "lustre",
        "gpfs",
        "beegfs",
        "ocfs2",
        "gfs2",
        "fuse",
        "virtiofs",
    ]
)
MEMORY = frozenset(["tmpfs", "ramfs"])
"""File systems whose files are gone after a reboot."""
_MOUNTS = "/proc/self/mountinfo"
_warned: set[str] = set()
_log = logging.getLogger(__name__)


def is_network(kind: str) -> bool:
    """Return whether other hosts may write to the files of this kind of file system."""
    return kind in _NETWORK or kind.startswith("fuse.")


def mounted(folder: str) -> tuple[str, str]:
    """Return the kind of a folder's file system, and where it begins."""
    best = ("unknown", "/")
    with contextlib.suppress(OSError), open(_MOUNTS, encoding="utf-8", errors="surrogateescape") as file:
        for line in file:
            fields, _, rest = line.partition(" - ")
            mount = re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), fields.split()[4])
            if (folder + "/").startswith(mount.rstrip("/") + "/") and len(mount) >= len(best[1]):
                best = (rest.split()[0], mount)
    return best


def warn_of_network(root: str) -> None:
    """Warn once per process if a store that is about to be written is on a file system of the network."""
    path = os.path.realpath(root)
    if path in _warned:
        return
    _warned.add(path)
    kind, mount = mounted(path)
    if is_network(kind):
        _log.warning(
            "%s: this store is on a file system of the network (%s, mounted on %s). Locks may be lost there, and "
            "readers on another host may see old bytes. Put the store on a disk of one host, and let other hosts reach "
            "it with `messagestore serve`",
            root,
            kind,
            mount,
        )


def was_warned_of(root: str) -> None:
    """Note that another process has given the warning."""
    _warned.add(os.path.realpath(root))
