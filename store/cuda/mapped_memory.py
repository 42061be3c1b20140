"""An address range and the physical GPU memory mapped to it. It records its steps, to undo them in order.

Release is in reverse order: unmap the addresses, release the handle, free the addresses. Between the last two steps the
addresses stay reserved without memory, and other memory can be mapped to them, so the addresses in captured graphs stay
valid.
"""

from __future__ import annotations

from tricomm.errors import ResourceError
from tricomm.store.cuda.cuda_driver import DESCRIPTOR, Cleanup, Driver


class MappedMemory:
    """`nbytes` bytes of addresses, reserved by the first `put`. Every method works in the current context."""

    def __init__(self, driver: Driver, nbytes: int) -> None:
        self.nbytes = nbytes
        self.address = 0
        self.handles: list[int] = []  # at most one
        self._driver = driver
        self._there = False

    def make(self, ordinal: int, alignment: int, sharing: str = DESCRIPTOR) -> None:
        """Map new memory of GPU `ordinal`, which `sharing` handles can share. It is zeroed once the device has been
        synchronized."""
        self.handles.append(self._driver.mem_create(ordinal, self.nbytes, sharing))
        self.put(ordinal, alignment)
        self._driver.memset(self.address, 0, self.nbytes)

    def put(self, ordinal: int, alignment: int) -> None:
        """Map the memory of the handle for GPU `ordinal`."""
        if not self.address:
            self.address = self._driver.address_reserve(self.nbytes, alignment)
        self._driver.mem_map(self.address, self.nbytes, self.handles[0])
        self._there = True
        self._driver.mem_allow(self.address, self.nbytes, ordinal)

    def empty(self, undo: Cleanup) -> None:
        """Release the memory and keep the addresses. The next call retries steps that the driver has refused."""
        if self._there and undo.attempt(self._driver.mem_unmap, self.address, self.nbytes):
            self._there = False
        refused = []
        while self.handles:
            handle = self.handles.pop()
            if not undo.attempt(self._driver.mem_release, handle):
                refused.append(handle)
        self.handles = refused

    def require_empty(self, undo: Cleanup) -> None:
        """`empty`, before other memory is mapped to the addresses; raises `ResourceError` if a step failed."""
        self.empty(undo)
        if self._there or self.handles:
            raise ResourceError(f"GPU memory at {self.address:#x} cannot be released: {undo.failures[-1]}")

    def release(self, undo: Cleanup) -> None:
        """Release memory and addresses, trying each step; addresses that are still mapped stay reserved."""
        self.empty(undo)
        if self.address and not self._there:
            undo.attempt(self._driver.address_free, self.address, self.nbytes)
