"""The bytes of a warp's access, by the pieces of memory that it touches."""

from __future__ import annotations

from typing import Any

import numpy as np

from tricomm.explorer.ptx.access import Array, ThreadAccess

_SECTOR = 5  # log2 of the bytes of a sector, the smallest transfer


def moved(access: ThreadAccess, chosen: Array | None = None) -> float:
    """Bytes that a warp's access moves: whole sectors of 32 bytes, each once."""
    return float(len(granules(access, _SECTOR, chosen)) << _SECTOR)


def granules(access: ThreadAccess, bits: int, chosen: Array | None = None) -> Any:
    """Indices of the aligned pieces of 1 << `bits` bytes that an access touches."""
    addresses = access.addresses if chosen is None else access.addresses[chosen]
    low = int(addresses[0])
    steps = np.diff(addresses)
    if not steps.any():
        return range(low >> bits, ((low + access.width - 1) >> bits) + 1)
    if (steps == access.width).all():
        return range(low >> bits, ((int(addresses[-1]) + access.width - 1) >> bits) + 1)
    return np.unique(addresses >> np.uint64(bits)).tolist()
