"""16-byte accesses (`wide_words.store_wide` and `load_wide`) under the interpreter, which has none.

Directors and observers see one access of 16 bytes, relaxed at `.sys`. In memory it is two accesses of 8 bytes, which
must look like one to other processes: the half with the flag is stored last, with release, and loaded first, with
acquire. So a reader that sees the flag also sees the other half that was stored with it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter as _triton

from tricomm.errors import InvalidArgument
from tricomm.kernels.launch import triton_adapter
from tricomm.kernels.launch.memory_access import Access, Array, perform_at_once

_HALF = np.uint64(8)


def store(pointer: Any, low: Any, high: Any, mask: Any) -> None:
    """The interpreter's `wide_words.store_wide`."""
    native = _triton._interpreter
    addresses, lanes = pointer.handle.data, np.broadcast_to(mask.handle.data, pointer.handle.data.shape)
    halves = [np.ascontiguousarray(np.broadcast_to(half.handle.data, addresses.shape)) for half in (low, high)]

    def perform(chosen: Array | None) -> None:
        some = _some(lanes, chosen)
        native.store(addresses, halves[0], some)
        native.atomic_rmw(native.RMW_OP.XCHG, addresses + _HALF, halves[1], some, native.MEM_SEMANTIC.RELEASE)

    _access("store", addresses, lanes, perform)


def load(pointer: Any) -> tuple[Any, Any]:
    """The interpreter's `wide_words.load_wide`."""
    native = _triton._interpreter
    addresses = pointer.handle.data
    lanes, nothing = np.ones(addresses.shape, bool), np.zeros(addresses.shape, np.int64)
    halves: list[Array] = []

    def perform(chosen: Array | None) -> Array:
        some = _some(lanes, chosen)
        high = native.atomic_rmw(native.RMW_OP.OR, addresses + _HALF, nothing, some, native.MEM_SEMANTIC.ACQUIRE)
        halves[:] = native.load(addresses, some, nothing, np.dtype(np.int64)), high
        return np.stack(halves, axis=-1)[some]

    _access("load", addresses, lanes, perform)
    kind = tl.core.block_type(tl.int64, list(addresses.shape))
    low, high = (tl.core.tensor(_triton.TensorHandle(half, tl.int64), kind) for half in halves)
    return low, high


def _some(lanes: Array, chosen: Array | None) -> Array:
    """bool by lane of the tile: the lanes in `lanes` that `chosen` selects; `chosen` has one bool per lane in
    `lanes`."""
    some = np.array(lanes)
    if chosen is not None:
        some[lanes] = chosen
    return some


def _access(kind: str, addresses: Array, lanes: Array, perform: Any) -> None:
    taken = addresses[lanes]
    if (taken % np.uint64(16)).any():
        odd = int(taken[taken % np.uint64(16) != 0][0])
        raise InvalidArgument(f"a 16-byte word at {odd:#x}: its address has to be a multiple of 16")
    access = Access(kind, lanes, taken, 16, "relaxed", "sys", perform)
    if triton_adapter.director is not None:
        triton_adapter.director.access(access)
    else:
        perform_at_once(access, triton_adapter.observers)
