"""The mode `spark` of `make crash`: random histories of a fake Spark, and kills of a real one.

`run` is a mode of `make crash`. By hand:

    PYTHONPATH=faults:tests .venv/bin/python -m spark_faults --seconds 60 --seed 1
    PYTHONPATH=faults:tests .venv/bin/python -m spark_faults --only 12345             one history again
    PYTHONPATH=faults:tests .venv/bin/python -m spark_faults --cell write-half:zombie one cell again; also `quick` and `all`
"""

from __future__ import annotations


def run(seconds: float, seed: int, quick: bool) -> dict[str, int]:
    """What the crash runner calls: histories, then cells on a real Spark; counts by class.

    Parameters
    ----------
    seconds : float
        Roughly how long, but never less than the quick profile: 2 000 histories and 14 cells.
    seed : int
    quick : bool
        The quick profile, however long it takes.

    Raises
    ------
    AssertionError
        What is wrong, and the command that does it again.
    """
    from spark_faults import runner

    return runner.run(seconds, seed, quick)
