"""The mode `spark` of `make crash`: random histories of a fake Spark, and kills of a real one.

`run` is a mode of `make crash`. To run it by hand:

    PYTHONPATH=faults:tests .venv/bin/python -m spark_faults --seconds 60 --seed 1
    PYTHONPATH=faults:tests .venv/bin/python -m spark_faults --only 12345             repeats one history
    PYTHONPATH=faults:tests .venv/bin/python -m spark_faults --cell write-half:zombie one cell, `quick` or `all`
"""

from __future__ import annotations


def run(seconds: float, seed: int, quick: bool) -> dict[str, int]:
    """Run histories, then cells on a real Spark, for the crash runner; return counts by class.

    Parameters
    ----------
    seconds : float
        The approximate duration; never less than the quick profile: 2 000 histories and 15 cells.
    seed : int
    quick : bool
        Run the quick profile, however long it takes.

    Raises
    ------
    AssertionError
        Something is wrong; the message has the command that repeats it.
    """
    from spark_faults import runner

    return runner.run(seconds, seed, quick)
