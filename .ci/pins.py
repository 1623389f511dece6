"""Writes `constraints.txt` anew: to each pin, the hashes of all files from which pip may install it.

    make pins        after a version in it was changed, or a line `name==version` added

A file counts if pip takes it on Linux (glibc or musl), on x86-64 or AArch64, by Python 3.11 to 3.14. Pip itself is
asked, with the index that this machine is configured with: its name stays out of the file.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from pip._internal.commands.install import InstallCommand
from pip._internal.models.target_python import TargetPython

PINS = Path(__file__).resolve().parent.parent / "constraints.txt"
PYTHONS = ((3, 11), (3, 12), (3, 13), (3, 14))
PROCESSORS = ("x86_64", "aarch64")
LIBRARIES = (
    "linux",
    *(f"manylinux{year}" for year in ("1", "2010", "2014")),
    *(f"manylinux_2_{minor}" for minor in range(5, 51)),
    *(f"musllinux_1_{minor}" for minor in range(1, 6)),
)


def main() -> None:
    """Replace the hashes in the file, and end with a list of the pins that cannot be installed everywhere."""
    command = InstallCommand("install", "")
    options, _ = command.parse_args([])
    text = re.sub(r" \\\n +--hash=\S+", "", PINS.read_text(encoding="utf-8"))
    lines, missing = [], []
    with command.main_context():
        session = command.get_default_session(options)
        finders = {
            f"Python {python[0]}.{python[1]} on {processor}": command._build_package_finder(
                options, session, TargetPython([f"{library}_{processor}" for library in LIBRARIES], python)
            )
            for python in PYTHONS
            for processor in PROCESSORS
        }
        for line in text.splitlines():
            name, _, version = line.partition("#")[0].partition("==")
            hashes = set()
            for target, finder in finders.items() if version else ():
                links = [found.link for found in finder.find_all_candidates(name) if str(found.version) == version]
                digests = {f"--hash=sha256:{link.hash}" for link in links if link.hash_name == "sha256"}
                hashes |= digests
                missing += [] if digests else [f"{line}: found no file for {target}. Pin a version that has one"]
            lines.append(" \\\n    ".join([line, *sorted(hashes)]))
    PINS.write_text("\n".join(lines) + "\n", encoding="utf-8")
    sys.exit("\n".join(missing) or None)


if __name__ == "__main__":
    main()
