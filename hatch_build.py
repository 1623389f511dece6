"""The build hook: compiles the kernel into the source tree, gives the wheel its tag, and adds the commit.

Without a C compiler or Python's headers, the package is built without the kernel and works without it, more slowly. A
compiler that fails makes the build fail; `MESSAGESTORE_KERNEL=off` builds without the kernel then, too. If `CC` is a
compiler for another processor, the wheel is one for that processor.

A checkout is asked for its commit, which then stands in the file `commit.txt` of the package, in a source archive and
in a wheel; a source archive has that file, and hands it on. Without both, the package does not know its commit.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

OLDEST_PYTHON = (3, 11)
"""As `requires-python` says."""


class KernelBuildHook(BuildHookInterface[Any]):
    """Runs before wheels and editable installs are made; an sdist holds the sources."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile the kernel, and add it and the commit to what is built."""
        if self.target_name != "wheel":
            self._add_commit(build_data)
            return
        if sys.version_info < OLDEST_PYTHON:  # pip looks at requires-python only when the wheel is built
            found = ".".join(map(str, sys.version_info[:3]))
            wanted = ".".join(map(str, OLDEST_PYTHON))
            self.app.abort(
                f"pyspark-messagestore needs Python {wanted} or newer, and {sys.executable} is Python {found}. Run pip "
                "with a newer one."
            )
        if version != "editable":  # a checkout is asked when somebody wants to know
            self._add_commit(build_data)
        path = Path(self.root, "store", "kernel", "compile.py")
        spec = importlib.util.spec_from_file_location("messagestore_compile", path)
        assert spec is not None and spec.loader is not None  # noqa: PT018
        compile_ = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(compile_)
        reason = "MESSAGESTORE_KERNEL=off" if os.environ.get("MESSAGESTORE_KERNEL") == "off" else compile_.why_not()
        if reason:
            self.app.display_warning(f"The kernel is not compiled: {reason}. The store works without it, more slowly.")
            compile_.TARGET.unlink(missing_ok=True)  # what an earlier build left would not match this build's tag
            return
        compile_.compiled()
        build_data["pure_python"] = False
        platform = compile_.platform().replace("-", "_").replace(".", "_")
        build_data["tag"] = f"cp311-abi3-{platform}"
        build_data["artifacts"].append(str(compile_.TARGET.relative_to(self.root)))

    def _add_commit(self, build_data: dict[str, Any]) -> None:
        inside = Path("connector", "pyspark_messagestore", "commit.txt")
        if Path(self.root, inside).exists() or not Path(self.root, ".git").exists():
            return
        git = ["git", "-C", self.root]
        try:
            commit = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout
            changed = subprocess.run([*git, "diff", "--quiet", "HEAD"], capture_output=True, check=False).returncode
        except (OSError, subprocess.CalledProcessError) as error:
            self.app.display_warning(f"git does not say which commit this is, so the package does not know: {error}")
            return
        self._folder = tempfile.TemporaryDirectory()  # until the build has ended
        found = Path(self._folder.name, "commit.txt")
        found.write_text(commit.strip() + (" with changes" if changed else "") + "\n", encoding="utf-8")
        target = inside if self.target_name == "sdist" else inside.relative_to("connector")
        build_data["force_include"][str(found)] = str(target)
