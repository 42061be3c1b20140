"""Host memory that a fake process has registered with CUDA; notices if another page is mapped at its address.

CUDA itself only knows the address. Here /proc/self/maps identifies a page: by the file that is mapped (every shared
mapping has one) and the offset in it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

PAGE = 4096


@dataclass(eq=False)
class Pinned:
    """One cuMemHostRegister."""

    address: int
    nbytes: int
    gpu: int
    device_address: int
    identity: tuple[str, ...] | None

    @property
    def there(self) -> bool:
        return self.identity is not None and identity(self.address) == self.identity

    def overlaps(self, address: int, nbytes: int) -> bool:
        return self.address < address + nbytes and address < self.address + self.nbytes

    def holds(self, device_address: int, nbytes: int) -> bool:
        start = self.device_address
        return start <= device_address and device_address + nbytes <= start + self.nbytes

    def read(self, device_address: int, nbytes: int) -> bytes:
        return ctypes.string_at(self.address + device_address - self.device_address, nbytes)

    def write(self, device_address: int, data: bytes) -> None:
        ctypes.memmove(self.address + device_address - self.device_address, data, len(data))


class PinnedPages:
    """The pages that one process has registered. `complain(text)` makes the error for undefined behaviour of CUDA."""

    def __init__(self, complain: Callable[[str], Exception]) -> None:
        self._complain = complain
        self.all: list[Pinned] = []

    def add(self, address: int, nbytes: int, flags: int, gpu: int, device_address: int) -> str | None:
        """CUDA's error, or None."""
        if address % PAGE or nbytes % PAGE or not nbytes or flags != 3:
            raise self._complain(f"pinned {address:#x} with flags {flags}: not a page, not mapped, or not portable")
        for page in self.all:
            if page.overlaps(address, nbytes):
                self._refuse_lost(page, "pinned again")
                return "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED"
        result = identity(address)
        if result is None:
            return "CUDA_ERROR_INVALID_VALUE"
        self.all.append(Pinned(address, nbytes, gpu, device_address, result))
        return None

    def at(self, address: int) -> Pinned | None:
        """The registration that starts at the host's `address`."""
        page = next((page for page in self.all if page.address == address), None)
        if page is not None:
            self._refuse_lost(page, "asked for")
        return page

    def remove(self, address: int, kernel_running: bool) -> None:
        page = self.at(address)
        if page is None:
            raise self._complain(f"unpinned {address:#x}, which is not pinned")
        if kernel_running:
            raise self._complain(f"unpinned {address:#x} while a kernel runs")
        self.all.remove(page)

    def behind(self, device_address: int, nbytes: int) -> Pinned | None:
        """The registration through which a kernel reaches `device_address`."""
        page = next((page for page in self.all if page.holds(device_address, nbytes)), None)
        if page is not None:
            self._refuse_lost(page, "touched")
        return page

    def _refuse_lost(self, page: Pinned, what: str) -> None:
        if not page.there:
            raise self._complain(f"{what} page {page.address:#x}, whose memory went while it was pinned")


def identity(address: int) -> tuple[str, ...] | None:
    """Device, inode and offset of the file mapped at `address` in this process; None if nothing is mapped."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, _, offset, device, inode, *_ = line.split(maxsplit=5)
        start, end = (int(number, 16) for number in span.split("-"))
        if start <= address < end:
            shared = inode != "0"
            return device, inode, str(int(offset, 16) + address - start if shared else 0)
    return None
