"""Builds the shim with the wheel, with a plain C++ compiler; says so clearly where there is none.

Run by hatchling for wheels and editable installs; the tests call :func:`compile_shim` to build it from source. Without
a compiler the wheel is a pure one, and at run time the package takes its next way, visibly.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

FLAGS = ("-std=c++17", "-O2", "-fPIC", "-shared", "-fvisibility=hidden", "-Wall", "-Wextra")
PACKAGE = Path("src") / "ecoffload_xpu"


def compile_shim(source: Path, target: Path) -> str | None:
    """Compile ``source`` to the shared library ``target``. None, or why it could not be built (``$CXX`` or g++)."""
    compiler = shlex.split(os.environ.get("CXX") or "g++")
    if shutil.which(compiler[0]) is None:
        return f"there is no C++ compiler ({compiler[0]!r}); install g++ or set CXX"
    # To a name of its own first: a half-written library must never be found, and builds may run at the same time.
    partial = target.with_name(f"{target.name}.{os.getpid()}")
    run = subprocess.run(
        [*compiler, *FLAGS, "-o", str(partial), str(source)], capture_output=True, text=True, check=False
    )
    if run.returncode != 0:
        partial.unlink(missing_ok=True)
        return f"{' '.join(compiler)} failed with exit status {run.returncode}:\n{run.stderr}"
    partial.replace(target)
    return None


class ShimHook(BuildHookInterface):  # type: ignore[type-arg]
    """Adds ``_shim.so`` to the wheel and tags the wheel with the platform."""

    PLUGIN_NAME = "custom"

    _folder: tempfile.TemporaryDirectory[str] | None = None

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        source = Path(self.root) / PACKAGE / "shim.cpp"
        if version == "editable":  # found beside its source
            target = source.with_name("_shim.so")
        else:
            self._folder = tempfile.TemporaryDirectory()
            target = Path(self._folder.name) / "_shim.so"
        problem = compile_shim(source, target)
        if problem is not None:
            target.unlink(missing_ok=True)  # one of an older source would be worse than none
            self.app.display_warning(
                f"ecoffload-xpu: building WITHOUT its shim: {problem}\n"
                "At run time the package falls to libDPCTLSyclInterface (dpctl) or to vllm-xpu-kernels' operator, and "
                "is unavailable if neither is installed."
            )
            return
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"
        if version != "editable":
            build_data["force_include"][str(target)] = "ecoffload_xpu/_shim.so"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        if self._folder is not None:
            self._folder.cleanup()
