"""Mutants of what is read and copied though somebody else wrote it: checkpoints, a broker's settings, staging names."""

from __future__ import annotations

import os
import re

from crash.mutants_hygiene import hostile
from crash.planting import Mutant, patched
from messagestore.files import config_file, staging_files
from pyspark_messagestore.checkpoint import files as checkpoint_files

_TRIED_FROM_EVERY_QUOTE = re.compile(r'"(?:[^"\\]|\\.)*"|([{,]\s*)(-?\d+)(?=\s*:)', re.DOTALL)

MUTANTS = (
    Mutant(
        "a rewound checkpoint takes over every bit of a mode",
        patched(checkpoint_files, "_USE", lambda _: 0o7777),
        "fuzz: checkpoints of a stranger",
        hostile("checkpoints of a stranger"),
    ),
    Mutant(
        "links in a checkpoint are followed",
        patched(checkpoint_files, "_FILE_FLAGS", lambda flags: flags & ~os.O_NOFOLLOW),
        "fuzz: checkpoints of a stranger",
        hostile("checkpoints of a stranger"),
    ),
    Mutant(
        "a FIFO in a checkpoint is waited for",
        patched(checkpoint_files, "_FILE_FLAGS", lambda flags: flags & ~os.O_NONBLOCK),
        "fuzz: checkpoints of a stranger",
        hostile("checkpoints of a stranger"),
    ),
    Mutant(
        "a string without an end is tried from each of its quotes",
        patched(config_file, "_UNQUOTED_KEY", lambda _: _TRIED_FROM_EVERY_QUOTE),
        "fuzz: settings without an end",
        hostile("settings without an end"),
    ),
    Mutant(
        "the kernel is asked for any pid in a name",
        patched(staging_files, "_MOST_DIGITS", lambda _: 1000),
        "fuzz: pids that were made up",
        hostile("pids that were made up"),
    ),
)
