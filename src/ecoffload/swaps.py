"""Swaps as plain functions: drop-ins for the operators that engines call today, over any backend.

Addresses come from the caller here, so every one is checked first: against the tensors given, or by the driver's
pointer query where it has one (drivers answer a foreign address with a segmentation fault).
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch

from ecoffload.backend import D2H, H2D, Completion, Direction, PointerRange, SwapBackend
from ecoffload.descriptors import AddressRanges, Batch, DescriptorPool
from ecoffload.errors import ConfigError, DescriptorError
from ecoffload.pointers import as_addresses, block_addresses
from ecoffload.registry import find_backend
from ecoffload.submission import submit_batch

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

__all__ = ["swap_blocks", "swap_blocks_batch"]

_pool = DescriptorPool()


def _after_fork() -> None:
    """In a forked child: another thread of the parent may have held the pool's lock."""
    global _pool
    _pool = DescriptorPool()


os.register_at_fork(after_in_child=_after_fork)


def swap_blocks(
    src: torch.Tensor,
    dst: torch.Tensor,
    block_mapping: ArrayLike | torch.Tensor,
    block_size_in_bytes: int | None = None,
    *,
    backend: str | SwapBackend | None = None,
    stream: Any = None,
) -> Completion:
    """Copy whole blocks of ``src`` over blocks of ``dst``.

    ``block_mapping``: (n, 2) integers, rows of source and destination block; ``block_size_in_bytes``: default the
    bytes of ``src[0]``. Both tensors are contiguous; the direction follows from their devices, and the copy is ordered
    on ``stream`` (default: the device's current one). Raises :class:`DescriptorError` naming the pair that leaves a
    tensor, :class:`ConfigError` for tensors that cannot be swapped.
    """
    for name, tensor in (("src", src), ("dst", dst)):
        if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.strided:
            what = f"layout {tensor.layout}" if isinstance(tensor, torch.Tensor) else f"type {type(tensor).__name__}"
            raise ConfigError(
                f"{name} is of {what}; swap_blocks takes dense tensors, and swap_blocks_batch takes addresses",
                option=name,
                value=what,
            )
    backend = find_backend(backend, device=(src if src.device.type != "cpu" else dst).device)
    ops = backend.ops
    src_there, dst_there = ops.owns(src), ops.owns(dst)
    both_cpu = ops.host_ordered and src_there and dst_there
    if src_there == dst_there and not both_cpu:
        raise ConfigError(
            f"swap_blocks copies between the host and {ops.device}; got tensors on {src.device} and {dst.device}",
            option="src",
            value=str(src.device),
        )
    for name, tensor in (("src", src), ("dst", dst)):
        if tensor.is_conj() or tensor.is_neg():
            raise ConfigError(
                f"{name} is a conjugated or negated view, whose memory holds other values; pass resolve_conj() or "
                f"resolve_neg() of it",
                option=name,
                value=str(tensor.dtype),
            )
        if not tensor.is_contiguous():
            raise ConfigError(
                f"{name} is not contiguous (strides {tuple(tensor.stride())}): its blocks do not lie one after another",
                option=name,
                value=tuple(tensor.stride()),
            )
    if block_size_in_bytes is None:
        if src.dim() == 0 or src.shape[0] == 0:
            raise ConfigError("src has no blocks; give block_size_in_bytes", option="block_size_in_bytes", value=None)
        block_size_in_bytes = src.stride(0) * src.element_size()
    size: Any = block_size_in_bytes
    if isinstance(size, bool) or not isinstance(size, int | np.integer) or not 0 < size < 1 << 63:
        raise ConfigError(
            f"block_size_in_bytes {block_size_in_bytes!r} must be an integer above zero",
            option="block_size_in_bytes",
            value=block_size_in_bytes,
        )
    pairs = _pairs(block_mapping)
    if pairs.size == 0:
        pairs = pairs.reshape(0, 2).astype(np.int64)
    if pairs.ndim != 2 or pairs.shape[1] != 2 or pairs.dtype.kind not in "iu":
        raise ConfigError(
            f"block_mapping must be (n, 2) integers, got {pairs.dtype} of shape {pairs.shape}",
            option="block_mapping",
            value=pairs.shape,
        )
    bases = [(ops if there else _host).address_of(t) for t, there in ((src, src_there), (dst, dst_there))]
    for side, tensor in enumerate((src, dst)):
        blocks = tensor.numel() * tensor.element_size() // block_size_in_bytes
        bad = np.flatnonzero((pairs[:, side] < 0) | (pairs[:, side] >= blocks))
        if len(bad):
            at = int(bad[0])
            raise DescriptorError(
                f"pair {at} of block_mapping {tuple(pairs[at].tolist())}: {('src', 'dst')[side]} has blocks 0 to "
                f"{blocks - 1} of {block_size_in_bytes} bytes",
                index=at,
                value=int(pairs[at, side]),
            )
    batch = _pool.lease(len(pairs))
    batch.extend(
        block_addresses(bases[0], pairs[:, 0], block_size_in_bytes),
        block_addresses(bases[1], pairs[:, 1], block_size_in_bytes),
        np.full(len(pairs), block_size_in_bytes, dtype=np.uint64),
    )
    if _no_edges(backend):
        batch.merge()
    elif batch.count > 1:
        edges = [_ranges_of(backend, base, each.nbytes) for base, each in zip(bases, (src, dst), strict=True)]
        if None not in edges:
            batch.merge(*edges)
    direction: Direction = D2H if src_there and not both_cpu else H2D
    return _submit(backend, batch, direction, stream, keep=(src, dst))


def _pairs(block_mapping: ArrayLike | torch.Tensor) -> NDArray[Any]:
    try:
        return block_mapping.numpy(force=True) if isinstance(block_mapping, torch.Tensor) else np.asarray(block_mapping)
    except (ValueError, TypeError, RuntimeError) as exc:  # ragged rows; a tensor without values or of no dense layout
        raise ConfigError(
            f"block_mapping must be (n, 2) integers, got a {type(block_mapping).__name__} that is no such table: {exc}",
            option="block_mapping",
            value=type(block_mapping).__name__,
        ) from exc


def _submit(backend: SwapBackend, batch: Batch, direction: Direction, stream: Any, keep: Any = None) -> Completion:
    """In order of ``stream``, both ways. Every descriptor has been checked."""
    if stream is None:
        stream = backend.ops.current_stream()
    completion = submit_batch(backend, batch, direction, stream, keep=keep, checked=True)
    if backend.spec.capabilities.submission == "blocking":
        completion.block(stream)  # the copy runs on a thread, behind the stream; what comes later is to wait for it
    return completion


def _no_edges(backend: SwapBackend) -> bool:
    """Whether host memory has no registrations, whose edges a copy must not cross."""
    return backend.ops.host_ordered or backend.spec.capabilities.host_memory in ("none", "unified")


def _ranges_of(backend: SwapBackend, address: int, nbytes: int) -> AddressRanges | None:
    """The driver's ranges that make up a tensor's memory; None if it cannot tell of all of it."""
    ranges: list[tuple[int, int]] = []
    at, end = address, address + nbytes
    while at < end:
        found = backend.pointer_range(at)
        if found is None:
            return None
        ranges.append((found.start, found.nbytes))
        at = found.start + found.nbytes
    return AddressRanges(ranges)


class _Host:
    """Addresses of host tensors, for the side that is not the device's."""

    @staticmethod
    def address_of(tensor: torch.Tensor) -> int:
        return tensor.data_ptr()


_host = _Host()


def swap_blocks_batch(
    src_ptrs: ArrayLike | torch.Tensor,
    dst_ptrs: ArrayLike | torch.Tensor,
    sizes: ArrayLike | torch.Tensor,
    is_src_access_order_any: bool = False,
    *,
    direction: Direction | None = None,
    device: str | torch.device | int | None = None,
    stream: Any = None,
    backend: str | SwapBackend | None = None,
) -> Completion:
    """Copy ``sizes[i]`` bytes from ``src_ptrs[i]`` to ``dst_ptrs[i]``.

    Three 1-D tables of one length on the host, int64 or uint64, read by bits; sizes in bytes, zero ones are left out.
    ``direction`` None: asked of the driver for the first address. Every address is checked by the driver's pointer
    query where it has one, and must be of the kind that the direction says, on the device of ``backend`` (``device``
    None: the one whose memory it is). ``is_src_access_order_any`` is accepted for compatibility: copies always read in
    stream order, since the other order has corrupted saves. Raises :class:`DescriptorError` naming the caller's
    descriptor; a device's own :class:`SwapFailed` counts those that are left once neighbours were joined.
    """
    if direction not in (None, D2H, H2D):
        raise ConfigError(f"direction {direction!r} is neither 'd2h' nor 'h2d'", option="direction", value=direction)
    chosen = find_backend(backend, device=device)
    src, dst, size = as_addresses(src_ptrs), as_addresses(dst_ptrs), as_addresses(sizes)
    if not src.ndim == dst.ndim == size.ndim == 1 or not len(src) == len(dst) == len(size):
        raise DescriptorError(
            f"src_ptrs, dst_ptrs and sizes must be 1-D and of one length, got {src.shape}, {dst.shape}, {size.shape}",
            index=None,
        )
    negative = np.flatnonzero(size >> np.uint64(63))
    if len(negative):
        at = int(negative[0])
        raise DescriptorError(
            f"size {at} is {int(size[at].astype(np.int64))} bytes; a size is never negative",
            index=at,
            size=int(size[at]),
        )
    kept = np.flatnonzero(size)  # zero sizes are left out; errors name the caller's own indices
    batch = _pool.lease(len(src))
    try:
        batch.extend(src, dst, size)
        sources = destinations = None
        if batch.count:
            batch.check(None, None, kept)
            if chosen.has_pointer_query:
                src, dst = src[kept], dst[kept]
                from_, to = _ranges_around(chosen, src), _ranges_around(chosen, dst)
                if direction is None:
                    direction = D2H if any(r.kind == "device" and _holds(r, int(src[0])) for r in from_) else H2D
                sides = (("source", src, from_), ("destination", dst, to))
                if backend is None and device is None:
                    chosen = _owner(chosen, sides[direction == H2D][2])
                for (name, addresses, ranges), kind in zip(sides, _KINDS[direction], strict=True):
                    _check_kind(chosen, name, addresses, ranges, kind, kept)
                sources, destinations = (AddressRanges((r.start, r.nbytes) for r in side) for side in (from_, to))
                batch.check(sources, destinations, kept)
            elif direction is None:
                if not chosen.ops.host_ordered:
                    raise ConfigError(
                        f"backend {chosen.spec.name!r} cannot tell whose an address is; give direction='d2h' or 'h2d'",
                        option="direction",
                        value=None,
                    )
                direction = H2D
            if sources is not None or _no_edges(chosen):
                batch.merge(sources, destinations)
    except BaseException:
        batch.release()
        raise
    return _submit(chosen, batch, direction or H2D, stream)


_KINDS: dict[Direction, tuple[Literal["host", "device"], Literal["host", "device"]]] = {
    D2H: ("device", "host"),
    H2D: ("host", "device"),
}


def _ranges_around(backend: SwapBackend, addresses: NDArray[np.uint64]) -> list[PointerRange]:
    """The driver's ranges around these addresses, asked once an allocation; one that it does not know is left out."""
    wanted = np.sort(addresses)
    ranges: list[PointerRange] = []
    at = 0
    while at < len(wanted):
        found = backend.pointer_range(int(wanted[at]))
        if found is None:
            at += 1
            continue
        ranges.append(found)
        last = found.start + found.nbytes - 1
        at = max(at + 1, int(np.searchsorted(wanted, np.uint64(last), side="right")))
    return ranges


def _holds(found: PointerRange, address: int) -> bool:
    return found.start <= address < found.start + found.nbytes


def _owner(backend: SwapBackend, ranges: list[PointerRange]) -> SwapBackend:
    """The backend of the device that the ranges of the device's side lie on; ``backend`` if they do not say."""
    index = next((r.device for r in ranges if r.kind == "device"), backend.device_index)
    return (
        backend if index == backend.device_index else find_backend(None, device=f"{backend.spec.device_type}:{index}")
    )


def _check_kind(
    backend: SwapBackend,
    side: str,
    addresses: NDArray[np.uint64],
    ranges: list[PointerRange],
    kind: Literal["host", "device"],
    kept: NDArray[np.int64],
) -> None:
    """Refuse an address that the driver knows as memory of another kind, or of another device."""
    for each in ranges:
        if each.kind == kind and (kind == "host" or each.device == backend.device_index):
            continue
        at = next(i for i, address in enumerate(addresses.tolist()) if _holds(each, address))
        where = "host memory" if each.kind == "host" else f"memory of device {each.device}"
        wanted = "host memory" if kind == "host" else f"memory of device {backend.device_index}"
        raise DescriptorError(
            f"descriptor {kept[at]} was not submitted: its {side} {int(addresses[at]):#x} is {where}, and {wanted} is "
            "needed; give the direction and the device that the addresses have",
            index=int(kept[at]),
            **{"src" if side == "source" else "dst": int(addresses[at])},
        )
