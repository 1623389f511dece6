"""Benchmarks: how fast the store is, and how close it comes to what the machine allows.

    python -m benchmarks store [--quick] [--rows N] [--only append read put open syncs recovery] [--folder DIR]

Every figure is the median of several rounds, and its floors are measured in the same rounds. `measure` describes the
output.
"""
