"""Backends for the conformance suite: ``ecoffload-rocm`` on the emulated runtime, in the variants that differ.

Named in the entry points of the folder beside this file, which is on ``sys.path`` in these tests only:

    PYTHONPATH=tests/emulated pytest --pyargs ecoffload.testing.conformance --ecoffload-backend=rocm-old-high

Each object loads a copy of the library of its own, so that a fault in one leaves the others alone.
"""

from __future__ import annotations

from typing import Any, ClassVar

from ecoffload_rocm.backend import RocmBackend
from ecoffload_rocm.plugin import SPEC as ROCM
from emulated_drivers import HIGH, LOW, Emulated, EmulatedDeviceOps, load

from ecoffload.backend import Availability, BackendSpec
from ecoffload.hookspecs import hookimpl

ECOFFLOAD_HOOK_API = 1

OLD, NEW, BEFORE_BATCHES = 70_200_002, 71_500_000, 60_400_000


def inject(emulated: Emulated, kind: str, index: int) -> bool:
    """The conformance suite's faults. "late" is not offered: on these devices it means "lost"."""
    if kind == "submit":
        emulated.set("fail_submit_index", index)
        emulated.set("fail_submit", 1)
    elif kind == "register":
        emulated.set("refusals", 1)
        emulated.set("refuse_registration", 801)
    elif kind == "lost":
        emulated.set("fail_late", 719)
    else:
        return False
    return True


class EmulatedRocm(RocmBackend):
    """``ecoffload-rocm`` on an emulated runtime; subclasses say which."""

    defines: ClassVar[tuple[str, ...]] = ()
    knobs: ClassVar[dict[str, int]] = {}

    def __init__(self, spec: BackendSpec, device_index: int = 0) -> None:
        self.emulated = load("hip", *self.defines, **self.knobs)
        ops = EmulatedDeviceOps(self.emulated, device_index)
        super().__init__(spec, device_index, ops, library=self.emulated.path)

    @classmethod
    def availability(cls, *, probe: bool = False) -> Availability:
        return Availability(True, "emulated")

    def inject_fault(self, kind: str, index: int = 0) -> bool:
        return inject(self.emulated, kind, index)

    def stats(self) -> dict[str, Any]:
        return {**super().stats(), "ran_on": "an emulated HIP runtime"}


class RocmOldLow(EmulatedRocm):
    """7.2.2: attributes refused, a loop."""

    knobs: ClassVar = {"version": OLD, "base": LOW}


class RocmOldHigh(EmulatedRocm):
    """7.2.2, device memory above 2**63, registered host memory under another address."""

    knobs: ClassVar = {"version": OLD, "base": HIGH, "alias_offset": 1 << 46}


class RocmNewLow(EmulatedRocm):
    """7.15: attributes taken, batches, more than 8192 end the process."""

    knobs: ClassVar = {"version": NEW, "base": LOW, "alias_offset": 1 << 46}


class RocmNewHigh(EmulatedRocm):
    """7.15, device memory above 2**63."""

    knobs: ClassVar = {"version": NEW, "base": HIGH}


class RocmCopies(EmulatedRocm):
    """6.4: no batched copy."""

    defines: ClassVar = ("-DWITHOUT_BATCH",)
    knobs: ClassVar = {"version": BEFORE_BATCHES, "base": HIGH}


class RocmPerCopy(EmulatedRocm):
    """7.15 with the switch that forces copies one by one, as ECOFFLOAD_PER_COPY does."""

    knobs: ClassVar = {"version": NEW, "base": LOW}

    def __init__(self, spec: BackendSpec, device_index: int = 0) -> None:
        super().__init__(spec, device_index)
        self.per_copy = True


class Plugin:
    """An entry point's object: the package's own declaration under the name of a variant."""

    def __init__(self, name: str, base: BackendSpec, factory: type) -> None:
        of = {
            "name": name,
            "device_type": name,
            "factory": f"{factory.__module__}:{factory.__name__}",
            "test_only": True,
        }
        self._spec = BackendSpec.model_validate({**base.model_dump(), **of})

    @hookimpl
    def ecoffload_register_backend(self) -> BackendSpec:
        return self._spec


rocm_old_low = Plugin("rocm-old-low", ROCM, RocmOldLow)
rocm_old_high = Plugin("rocm-old-high", ROCM, RocmOldHigh)
rocm_new_low = Plugin("rocm-new-low", ROCM, RocmNewLow)
rocm_new_high = Plugin("rocm-new-high", ROCM, RocmNewHigh)
rocm_copies = Plugin("rocm-copies", ROCM, RocmCopies)
rocm_per_copy = Plugin("rocm-per-copy", ROCM, RocmPerCopy)
