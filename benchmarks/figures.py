"""One line a figure, `name value bar ok|below`, and at the end how many missed their bar.

The scripts beside this file call `figure` from their `main()`; run alone they end with `finish()`. `python figures.py
NAME...` runs the `main()` of each named script in one process and ends with a single last line, `N below`.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Literal

_below: list[str] = []


def figure(
    name: str, value: float, bar: float, *, better: Literal["lower", "higher"] = "lower", aim: float | None = None
) -> bool:
    """Print one measured figure beside its bar, and its aim if it has one. Returns whether the bar was met."""
    ok = value <= bar if better == "lower" else value >= bar
    if not ok:
        _below.append(name)
    tail = "" if aim is None else f"  (aim {aim:g})"
    print(f"{name} {value:.4g} {bar:g} {'ok' if ok else 'below'}{tail}", flush=True)
    return ok


def finish() -> int:
    """Print the last line, `N below`. Returns the exit code: 1 if a figure missed its bar."""
    print(f"{len(_below)} below", flush=True)
    return 1 if _below else 0


def main(names: list[str]) -> int:
    """Run the `main()` of each script named, in order; one that raises counts as a figure below its bar."""
    for name in names:
        try:
            importlib.import_module(name).main()
        except Exception as error:  # the figures of the other scripts are still wanted
            print(f"{name}: {type(error).__name__}: {error}", file=sys.stderr)
            figure(f"{name} ran", 0, 1, better="higher")
    return finish()


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    # The scripts import `figures`; without this they would count into a second copy of this module.
    sys.modules["figures"] = sys.modules["__main__"]
    sys.exit(main([Path(arg).stem for arg in sys.argv[1:]]))
