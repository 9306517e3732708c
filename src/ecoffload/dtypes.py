"""Torch dtypes by name: what plans and the region's journal carry instead of torch objects."""

from __future__ import annotations

import functools
import math

import torch

from ecoffload.errors import ConfigError

__all__ = ["dtype_name", "dtype_of", "nbytes_of"]


@functools.cache
def dtype_name(dtype: torch.dtype) -> str:
    """torch's name of a dtype, without "torch."."""
    return str(dtype).removeprefix("torch.")


@functools.cache
def dtype_of(name: str) -> torch.dtype:
    """The dtype of that name. Raises :class:`ConfigError` for one that this torch does not have."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype) or dtype_name(dtype) != name:
        raise ConfigError(f"torch {torch.__version__} has no dtype {name!r}", option="dtype", value=name)
    return dtype


def nbytes_of(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """Bytes of a contiguous tensor."""
    return math.prod(shape) * dtype.itemsize
