"""Backups: a store's prefix, copied beside its writers, and made a store again.

    snapshot    a store at one moment, as files that only grow
    points      what a backup folder holds: its points, listed and pruned
    copying     takes a backup, into a folder or as a stream
    restoring   makes a store of a backup

This package stands above the store: it reads one as any reader does, and opens the store that it has restored as any
writer does. README.md has the decisions.
"""

from messagestore.backup.copying import back_up, stream
from messagestore.backup.points import Point, points, prune
from messagestore.backup.restoring import restore

__all__ = ["Point", "back_up", "points", "prune", "restore", "stream"]
