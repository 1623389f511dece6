"""The command line of a release that speaks other versions of the protocol: `python -m crash.another_release 1-2 serve ...`."""

from __future__ import annotations

import sys

from messagestore.spi.wire import versions
from pyspark_messagestore import command

if __name__ == "__main__":
    oldest, _, newest = sys.argv.pop(1).partition("-")
    versions.SPOKEN = (int(oldest), int(newest))
    command.main()
