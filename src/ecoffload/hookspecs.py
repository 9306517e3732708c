"""The whole plugin surface: one hook, and the number that says which version of it a plugin speaks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pluggy

if TYPE_CHECKING:
    from ecoffload.backend import BackendSpec

__all__ = ["ECOFFLOAD_HOOK_API", "PROJECT", "SERVED_HOOK_APIS", "ecoffload_register_backend", "hookimpl"]

PROJECT = "ecoffload"

ECOFFLOAD_HOOK_API = 1
"""Current hook-API number. A plugin's module states, as a literal, the number it was written for."""

SERVED_HOOK_APIS = (1,)
"""Numbers that this core serves: the current one and, once there is one, the previous."""

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@hookspec(firstresult=True)
def ecoffload_register_backend() -> BackendSpec:  # type: ignore[empty-body]
    """Return the frozen declaration of one backend; import no driver and touch no device."""
