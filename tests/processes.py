"""Processes of the tests that begin with the store imported: 30 ms each instead of 500."""

from __future__ import annotations

import multiprocessing

# Each process is forked from one that only imported these: it has no store, no lock and no thread of the test's own
# process, as one that Spark starts.
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["messagestore", "messagestore.verify", "hypothesis", "pytest"])
