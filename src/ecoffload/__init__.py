"""ecoffload: encoder outputs in host memory, reloaded instead of encoded again, on any accelerator with a backend.

The public face. Importing it imports neither torch nor pydantic nor a backend: each public name is fetched from its
module at first use (PEP 562), because engines import this package in processes that never touch it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOMES: dict[str, tuple[str, ...]] = {
    "pointers": (
        "PointerEncoding",
        "PointerTable",
        "as_addresses",
        "block_addresses",
        "offset_addresses",
        "pointer_table",
    ),
    "swaps": ("swap_blocks", "swap_blocks_batch"),
    "backend": (
        "Availability",
        "BackendSpec",
        "Capabilities",
        "Completion",
        "DeviceOps",
        "KernelSpec",
        "Limits",
        "PointerRange",
        "Registration",
        "SwapBackend",
    ),
    "hookspecs": ("ECOFFLOAD_HOOK_API", "hookimpl"),
    "registry": ("BackendRecord", "backend_for", "get_backend", "list_backends"),
    "descriptors": ("Batch", "DescriptorPool"),
    "extents": ("Extent", "ExtentAllocator"),
    "region": ("HostRegion",),
    "index": ("EntryIndex",),
    "plan": ("Plan",),
    "scheduler": ("OffloadScheduler",),
    "worker": ("OffloadWorker",),
    "cache": ("CacheStats", "EncoderCache"),
    "errors": (
        "AddressError",
        "AmbiguousBackend",
        "BackendUnavailable",
        "CacheClosed",
        "ConfigError",
        "DescriptorError",
        "DeviceLost",
        "EcoffloadError",
        "EncodingMismatch",
        "NoSpace",
        "PluginError",
        "RegionError",
        "RegistrationRefused",
        "StaleBatch",
        "SwapFailed",
        "UnknownBackend",
    ),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = sorted(_HOME_OF)  # noqa: PLE0605 - derived, so that a name is written once


def __getattr__(name: str) -> Any:
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module 'ecoffload' has no attribute {name!r}")
    value = getattr(import_module(f"ecoffload.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


if TYPE_CHECKING:  # the same names for type checkers; a test holds the two lists together
    from ecoffload.backend import (
        Availability as Availability,
    )
    from ecoffload.backend import (
        BackendSpec as BackendSpec,
    )
    from ecoffload.backend import (
        Capabilities as Capabilities,
    )
    from ecoffload.backend import (
        Completion as Completion,
    )
    from ecoffload.backend import (
        DeviceOps as DeviceOps,
    )
    from ecoffload.backend import (
        KernelSpec as KernelSpec,
    )
    from ecoffload.backend import (
        Limits as Limits,
    )
    from ecoffload.backend import (
        PointerRange as PointerRange,
    )
    from ecoffload.backend import (
        Registration as Registration,
    )
    from ecoffload.backend import (
        SwapBackend as SwapBackend,
    )
    from ecoffload.cache import (
        CacheStats as CacheStats,
    )
    from ecoffload.cache import (
        EncoderCache as EncoderCache,
    )
    from ecoffload.descriptors import (
        Batch as Batch,
    )
    from ecoffload.descriptors import (
        DescriptorPool as DescriptorPool,
    )
    from ecoffload.errors import (
        AddressError as AddressError,
    )
    from ecoffload.errors import (
        AmbiguousBackend as AmbiguousBackend,
    )
    from ecoffload.errors import (
        BackendUnavailable as BackendUnavailable,
    )
    from ecoffload.errors import (
        CacheClosed as CacheClosed,
    )
    from ecoffload.errors import (
        ConfigError as ConfigError,
    )
    from ecoffload.errors import (
        DescriptorError as DescriptorError,
    )
    from ecoffload.errors import (
        DeviceLost as DeviceLost,
    )
    from ecoffload.errors import (
        EcoffloadError as EcoffloadError,
    )
    from ecoffload.errors import (
        EncodingMismatch as EncodingMismatch,
    )
    from ecoffload.errors import (
        NoSpace as NoSpace,
    )
    from ecoffload.errors import (
        PluginError as PluginError,
    )
    from ecoffload.errors import (
        RegionError as RegionError,
    )
    from ecoffload.errors import (
        RegistrationRefused as RegistrationRefused,
    )
    from ecoffload.errors import (
        StaleBatch as StaleBatch,
    )
    from ecoffload.errors import (
        SwapFailed as SwapFailed,
    )
    from ecoffload.errors import (
        UnknownBackend as UnknownBackend,
    )
    from ecoffload.extents import (
        Extent as Extent,
    )
    from ecoffload.extents import (
        ExtentAllocator as ExtentAllocator,
    )
    from ecoffload.hookspecs import (
        ECOFFLOAD_HOOK_API as ECOFFLOAD_HOOK_API,
    )
    from ecoffload.hookspecs import (
        hookimpl as hookimpl,
    )
    from ecoffload.index import (
        EntryIndex as EntryIndex,
    )
    from ecoffload.plan import (
        Plan as Plan,
    )
    from ecoffload.pointers import (
        PointerEncoding as PointerEncoding,
    )
    from ecoffload.pointers import (
        PointerTable as PointerTable,
    )
    from ecoffload.pointers import (
        as_addresses as as_addresses,
    )
    from ecoffload.pointers import (
        block_addresses as block_addresses,
    )
    from ecoffload.pointers import (
        offset_addresses as offset_addresses,
    )
    from ecoffload.pointers import (
        pointer_table as pointer_table,
    )
    from ecoffload.region import (
        HostRegion as HostRegion,
    )
    from ecoffload.registry import (
        BackendRecord as BackendRecord,
    )
    from ecoffload.registry import (
        backend_for as backend_for,
    )
    from ecoffload.registry import (
        get_backend as get_backend,
    )
    from ecoffload.registry import (
        list_backends as list_backends,
    )
    from ecoffload.scheduler import (
        OffloadScheduler as OffloadScheduler,
    )
    from ecoffload.swaps import (
        swap_blocks as swap_blocks,
    )
    from ecoffload.swaps import (
        swap_blocks_batch as swap_blocks_batch,
    )
    from ecoffload.worker import (
        OffloadWorker as OffloadWorker,
    )
