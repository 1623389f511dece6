"""The fault harness: injects faults, counts them, and judges the results with an independent checker.

The checker shares no code with the store.

`python -m crash --help` shows the modes; `make crash` runs all of them. `faults/README.md` maps faults to modes and
tests.
"""
