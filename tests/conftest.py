"""Two ways to run the random tests: `quick`, the same cases every time, and `deep`, many new ones.

    make test ARGS="tests/property --hypothesis-profile=deep"

Neither has a deadline: a test that is slow on a busy machine is not wrong.

Ctrl-C has its usual effect in the processes that the tests start, also where a shell has started the tests in the
background and let them ignore it.
"""

from __future__ import annotations

import signal

from hypothesis import HealthCheck, settings

import crash.harness  # noqa: F401 - tests drop stores as a killed process does; `test_dropped_stores` has its own
from messagestore.format import kernel

settings.register_profile(
    "quick", max_examples=25, derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("deep", max_examples=2000, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("quick")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_report_header() -> str:
    """Which of the two codecs is tested."""
    return (
        f"no compiled kernel: {kernel.why_not}"
        if kernel.lib is None
        else f"compiled kernel, CRC-32 by {kernel.lib.CRC32_METHOD}"
    )
