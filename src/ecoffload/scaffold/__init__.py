"""``ecoffload new-backend``: a complete package for a new backend, which installs and passes the suite as it is.

The templates are the files beside this one; nothing here knows a device.
"""

from __future__ import annotations

import re
from importlib.resources import files
from pathlib import Path
from string import Template

from ecoffload import __version__
from ecoffload.errors import ConfigError
from ecoffload.hookspecs import ECOFFLOAD_HOOK_API

__all__ = ["new_backend"]

_NAME = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")
_TAKEN = ("cpu", "cuda", "rocm", "xpu", "toy", "sim-int64", "sim-uint64", "sim-top")


def new_backend(name: str, directory: str | Path) -> Path:
    """Write the package ``ecoffload-NAME`` into ``directory``, which must not exist or be empty. Returns its path.

    ``name`` is the backend's: lower-case letters, digits and single dashes, beginning with a letter. Raises
    :class:`ConfigError` for another name, one that is taken, or a directory that holds something.
    """
    if not _NAME.fullmatch(name) or len(name) > 40:
        raise ConfigError(
            f"{name!r} is no name for a backend: write at most 40 lower-case letters, digits and single dashes, "
            "beginning with a letter, for example 'acme-npu'",
            option="name",
            value=name,
        )
    if name in _TAKEN:
        raise ConfigError(
            f"the name {name!r} is taken by a backend of ecoffload's own; choose another", option="name", value=name
        )
    target = Path(directory)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(
            f"{target} exists and is not an empty directory; name one that does not exist",
            option="directory",
            value=str(directory),
        )
    module = "ecoffload_" + name.replace("-", "_")
    words = {
        "name": name,
        "module": module,
        "distribution": f"ecoffload-{name}",
        "class_name": "".join(part.capitalize() for part in name.split("-")) + "Backend",
        "version": ".".join(__version__.split(".")[:2]),
        "hook_api": str(ECOFFLOAD_HOOK_API),
    }
    templates = files(__name__) / "templates"
    for template, place in (
        ("pyproject.toml", "."),
        ("README.md", "."),
        ("__init__.py", f"src/{module}"),
        ("plugin.py", f"src/{module}"),
        ("backend.py", f"src/{module}"),
        ("test_conformance.py", "tests"),
    ):
        text = Template((templates / f"{template}.tmpl").read_text(encoding="utf-8")).substitute(words)
        path = target / place / template
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return target
