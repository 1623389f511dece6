"""How much memory can be had, by what the kernel says about the machine and about control groups."""

from __future__ import annotations

import pytest

from messagestore.files.disk import Disk
from messagestore.files.machine_memory import available_bytes

MACHINE = {"/proc/meminfo": "MemTotal:       64 kB\nMemAvailable:   40 kB\n"}
V1, V2 = "/sys/fs/cgroup/memory", "/sys/fs/cgroup"


def group_1(folder: str, limit: int, used: int, cached: str = "") -> dict[str, str]:
    return {
        f"{folder}/memory.limit_in_bytes": f"{limit}\n",
        f"{folder}/memory.usage_in_bytes": f"{used}\n",
        f"{folder}/memory.stat": cached,
    }


def group_2(folder: str, limit: int | str, used: int, cached: str = "") -> dict[str, str]:
    return {
        f"{folder}/memory.max": f"{limit}\n",
        f"{folder}/memory.current": f"{used}\n",
        f"{folder}/memory.stat": cached,
    }


CASES: dict[str, tuple[dict[str, str], int | None]] = {
    "the kernel says nothing": ({}, None),
    "no groups": (MACHINE, 40960),
    "no limit": ({**MACHINE, "/proc/self/cgroup": "0::/a\n", **group_2(f"{V2}/a", "max", 99)}, 40960),
    "a limit of the own group": (
        {**MACHINE, "/proc/self/cgroup": "0::/a/b\n", **group_2(f"{V2}/a/b", 5000, 1000)},
        4000,
    ),
    "a limit of the group around it": (
        {
            **MACHINE,
            "/proc/self/cgroup": "0::/a/b\n",
            **group_2(f"{V2}/a/b", "max", 1),
            **group_2(f"{V2}/a", 5000, 2000),
        },
        3000,
    ),
    "in a container, with its own view of the groups": (
        {**MACHINE, "/proc/self/cgroup": "0::/\n", **group_2(V2, 5000, 1000)},
        4000,
    ),
    "in a container, with the host's path": (
        {**MACHINE, "/proc/self/cgroup": "4:memory:/docker/0a1b\n0::/docker/0a1b\n", **group_1(V1, 5000, 500)},
        4500,
    ),
    "the page cache is given back": (
        {
            **MACHINE,
            "/proc/self/cgroup": "0::/a\n",
            **group_2(f"{V2}/a", 5000, 5000, "anon 100\nfile 900\ninactive_file 700\nactive_file 200\n"),
        },
        900,
    ),
    "the page cache in version 1": (
        {
            **MACHINE,
            "/proc/self/cgroup": "8:cpu,memory:/a\n",
            **group_1(f"{V1}/a", 5000, 5000, "inactive_file 1\ntotal_inactive_file 700\ntotal_active_file 200\n"),
        },
        900,
    ),
    "version 1 without a limit": (
        {**MACHINE, "/proc/self/cgroup": "4:memory:/a\n", **group_1(f"{V1}/a", 2**63 - 4096, 500)},
        40960,
    ),
    "more is used than allowed": (
        {**MACHINE, "/proc/self/cgroup": "0::/a\n", **group_2(f"{V2}/a", 5000, 6000)},
        0,
    ),
    "the machine has less than the group": (
        {**MACHINE, "/proc/self/cgroup": "0::/a\n", **group_2(f"{V2}/a", 1 << 30, 0)},
        40960,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_the_limit_of_a_container_counts_as_the_machines_memory_does(case: str) -> None:
    texts, expected = CASES[case]
    assert available_bytes(texts.get) == expected


def test_this_machine_says_how_much_it_has() -> None:
    with open("/proc/meminfo", encoding="ascii") as file:
        total = int(file.readline().split()[1]) * 1024
    available = Disk().available_memory()
    assert available is not None
    assert 0 < available <= total


def test_text_that_no_kernel_writes_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Disk, "_kernels_text", lambda _self, _path: "MemAvailable: plenty")
    assert Disk().available_memory() is None
