"""Memory that a kernel may touch: real memory of this process, by address."""

from __future__ import annotations

import ctypes
from bisect import bisect_right, insort

import numpy as np

from tricomm.errors import InvalidArgument
from tricomm.ptx.access import Array

_ALIGNMENT = 16


class OutOfBounds(InvalidArgument):
    """A kernel accessed memory that it was not given, or at an address that the access's width does not divide."""


class Region:
    """Addresses from `low` to below `high`. `views` has all of it by element size, from the address `start`."""

    __slots__ = ("high", "low", "name", "start", "views")

    def __init__(self, low: int, nbytes: int, name: str) -> None:
        self.low, self.high, self.name = low, low + nbytes, name
        # Whole aligned words: what is read beyond the ends lies on the same page.
        self.start = low // _ALIGNMENT * _ALIGNMENT
        size = -(-self.high // _ALIGNMENT) * _ALIGNMENT - self.start
        octets = np.frombuffer((ctypes.c_uint8 * size).from_address(self.start), np.uint8)
        self.views: dict[int, Array] = {
            1: octets, 2: octets.view("u2"), 4: octets.view("u4"), 8: octets.view("u8"),
        }  # fmt: skip


class GlobalMemory:
    """Regions that do not overlap. `last` is the one that was used last."""

    def __init__(self) -> None:
        self._bases: list[int] = []
        self._regions: dict[int, Region] = {}
        self.last = _NOTHING

    def add(self, base: int, nbytes: int, name: str) -> None:
        """Let kernels touch `nbytes` from `base`, which must stay allocated until `remove`."""
        if nbytes <= 0:
            return
        if base not in self._regions:
            insort(self._bases, base)
        self._regions[base] = Region(base, nbytes, name)
        self.last = _NOTHING

    def remove(self, base: int) -> None:
        """Take away what `add` gave; nothing if there is none."""
        if self._regions.pop(base, None) is not None:
            self._bases.remove(base)
            self.last = _NOTHING

    def find(self, address: int, nbytes: int = 1) -> Region:
        """The region of all `nbytes` from `address`; raises `OutOfBounds`."""
        region = self.last
        if region.low <= address and address + nbytes <= region.high:
            return region
        at = bisect_right(self._bases, address) - 1
        if at >= 0:
            region = self._regions[self._bases[at]]
            if address + nbytes <= region.high:
                self.last = region
                return region
            if address < region.high:
                raise OutOfBounds(
                    f"{nbytes} bytes at {address:#x} reach beyond the end of {region.name} at {region.high:#x}"
                )
        raise OutOfBounds(f"{nbytes} bytes at {address:#x} are in no memory that the kernel was given")


_NOTHING = Region.__new__(Region)
_NOTHING.low = _NOTHING.high = 0
_NOTHING.name = "nothing"
