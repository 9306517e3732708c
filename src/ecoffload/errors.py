"""Every error that ecoffload raises, in one tree under :class:`EcoffloadError`.

The lowest file of the house: it imports nothing. Messages name the thing, the value and the remedy; where a caller
may want to act on the details they are attributes as well (``index``, ``value``, ...).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__all__ = [
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
]


class EcoffloadError(Exception):
    """Base of all errors of this library.

    Keyword arguments become attributes, so that a handler needs not parse the message.
    """

    def __init__(self, message: str, **details: Any) -> None:
        super().__init__(message)
        self.details = details
        for name, value in details.items():
            setattr(self, name, value)

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

    def __reduce__(self) -> tuple[Any, ...]:
        # Errors cross process boundaries (workers, child probes); keyword details must survive pickling.
        return _rebuild, (type(self), str(self), self.details)


def _rebuild(kind: type[EcoffloadError], message: str, details: dict[str, Any]) -> EcoffloadError:
    return kind(message, **details)


class AddressError(EcoffloadError, ValueError):
    """A value that is no unsigned 64-bit address, or arithmetic that leaves 0..2**64-1. Details: index, value."""


class EncodingMismatch(EcoffloadError, TypeError):
    """A pointer table of another dtype, device or layout than a kernel declares. Details: expected, actual."""


class ConfigError(EcoffloadError, ValueError):
    """An option, size, key or file that is wrong. Details: option, value."""


class UnknownBackend(EcoffloadError, LookupError):
    """No installed backend has the asked name. Details: name, known."""


class BackendUnavailable(EcoffloadError, RuntimeError):
    """The backend is installed, but its device or driver cannot be used here. Details: name, reason."""


class AmbiguousBackend(EcoffloadError, LookupError):
    """More than one backend could serve, and nothing chose between them. Details: candidates."""


class PluginError(EcoffloadError, RuntimeError):
    """A third party's plugin failed to load or to declare itself; the cause is chained. Details: name, distribution."""


class DescriptorError(EcoffloadError, ValueError):
    """A descriptor of a batch is refused before a driver sees it. Details: index, src, dst, size."""


class StaleBatch(EcoffloadError, RuntimeError):
    """A batch was used after it went back to its pool."""


class SwapFailed(EcoffloadError, RuntimeError):
    """A submitted batch did not complete. Details where known: index (global descriptor index), code, keys."""


class DeviceLost(SwapFailed):
    """The device or its context is gone; no later call on it can succeed. Details: code, keys."""


class RegistrationRefused(EcoffloadError, RuntimeError):
    """The driver would not make a host range DMA-able. Details: address, nbytes, code."""


class RegionError(EcoffloadError, RuntimeError):
    """The shared host region cannot be created, joined or trusted. Details: path, expected, actual."""


class NoSpace(RegionError):
    """The tmpfs or the cgroup is too small for the region. Details: asked, free, headroom, path."""


class CacheClosed(EcoffloadError, RuntimeError):
    """The cache, region or engine part was used after ``close()``."""
