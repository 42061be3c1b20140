"""The memory that a kernel may access: memory of this process, by its real addresses."""

from __future__ import annotations

import ctypes
from bisect import bisect_right, insort
from collections.abc import Sequence

import numpy as np

from tricomm.errors import InvalidArgument
from tricomm.explorer.ptx.access import Array


class BadAddress(InvalidArgument):
    """A kernel accessed memory that it was not given, or a misaligned address."""


class AddressRange:
    """Addresses from `low` to below `high`. For each element size, `views` has the aligned elements, and `starts` the
    address of the first one."""

    __slots__ = ("high", "low", "name", "starts", "views")

    def __init__(self, octets: Array, low: int, name: str) -> None:
        self.low, self.high, self.name = low, low + len(octets), name
        self.starts: dict[int, int] = {}
        self.views: dict[int, Array] = {}
        for size in (1, 2, 4, 8):
            self.starts[size] = start = -(-low // size) * size
            first, count = start - low, max((self.high - start) // size, 0)
            self.views[size] = octets[first : first + size * count].view(f"u{size}")


class GlobalMemory:
    """The regions, which do not overlap. `last` is the most recently used one."""

    def __init__(self) -> None:
        self._bases: list[int] = []
        self._regions: dict[int, AddressRange] = {}
        self._multicast: list[tuple[int, int, tuple[int, ...]]] = []
        self.last = _NOTHING

    def add(self, base: int, nbytes: int, name: str) -> None:
        """Let kernels access `nbytes` bytes from `base`. The memory must stay allocated until `remove`."""
        if nbytes <= 0:
            return
        if base not in self._regions:
            insort(self._bases, base)
        octets: Array = np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(base))
        self._regions[base] = AddressRange(octets, base, name)
        self.last = _NOTHING

    def remove(self, base: int) -> None:
        """Remove the region that `add` made at `base`, if there is one."""
        if self._regions.pop(base, None) is not None:
            self._bases.remove(base)
            self.last = _NOTHING

    def find(self, address: int, nbytes: int = 1) -> AddressRange:
        """The region that contains all `nbytes` bytes from `address`. Raises `BadAddress`."""
        region = self.last
        if region.low <= address and address + nbytes <= region.high:
            return region
        at = bisect_right(self._bases, address) - 1
        if at >= 0:
            region = self._regions[self._bases[at]]
            if address + nbytes <= region.high:
                self.last = region
                return region
            raise BadAddress(
                f"{nbytes} bytes at {address:#x} are in no memory that the kernel was given; before them "
                f"{region.name} ends at {region.high:#x}"
            )
        raise BadAddress(f"{nbytes} bytes at {address:#x} are before all memory that the kernel was given")

    def add_multicast(self, base: int, nbytes: int, members: Sequence[int]) -> None:
        """Map `nbytes` multicast addresses from `base`: `multimem` accesses the same offset from each of `members`,
        which are addresses in regions."""
        self._multicast.append((base, nbytes, tuple(members)))

    def members(self, addresses: Array, mask: Array | None) -> list[Array]:
        """The addresses that multicast addresses stand for, one array per member. Raises `BadAddress`."""
        active = addresses if mask is None else addresses[mask]
        first, last = int(active.min()), int(active.max())
        for base, nbytes, members in self._multicast:
            if base <= first and last < base + nbytes:
                return [addresses - np.uint64(base) + np.uint64(member) for member in members]
        raise BadAddress(f"no multicast mapping was given for {first:#x} to {last:#x}")


_NOTHING = AddressRange(np.empty(0, "u1"), 0, "nothing")
