"""A fake machine with GPUs and processes: it implements `cuda.bindings.driver` and enforces CUDA's rules.

`FakeCuda` is the machine. Each `world.process()` is a `Driver` of the library over fake bindings, so the real
`cuda_driver.py` runs in every test. Where CUDA calls something undefined behaviour, the fake complains: it raises
`CudaRuleBroken`, and `world.verify()` fails even if that was swallowed. `verify` also finds resources that were left.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from tests.open_files import open_files
from tests.store.cuda.fake_bindings import Bindings, Block
from tests.store.cuda.fake_vmm import Physical
from tricomm.store.cuda.cuda_driver import Driver


class CudaRuleBroken(AssertionError):
    """A rule of CUDA was broken."""


class FakeCuda:
    """One machine. `reachable(a, b)`: may GPU a reach GPU b's memory. `capacity`: bytes of each GPU."""

    def __init__(
        self, gpus: int = 1, reachable: Callable[[int, int], bool] = lambda a, b: True, capacity: int = 1 << 32
    ) -> None:
        self.gpus, self.reachable, self.capacity = gpus, reachable, capacity
        self.lock = threading.RLock()
        self.complaints: list[str] = []
        self.processes: list[Bindings] = []
        self.handles: dict[bytes, Block] = {}
        self.physical: list[Physical] = []
        self.exported: dict[int, Physical] = {}  # by the inode of a descriptor
        self.by_fabric: dict[bytes, Physical] = {}
        self.log: list[tuple[int, str]] = []

    def process(self, visible: Sequence[int] | None = None) -> FakeDriver:
        """A new process, with CUDA_VISIBLE_DEVICES=`visible`."""
        process = Bindings(self, len(self.processes), tuple(range(self.gpus) if visible is None else visible))
        self.processes.append(process)
        return FakeDriver(process)

    def used(self, gpu: int) -> int:
        """Bytes of a GPU that are in use."""
        blocks = sum(len(b.data) for p in self.processes for b in p._blocks if b.live and b.gpu == gpu)
        return blocks + sum(len(memory.data) for memory in self.physical if memory.users and memory.gpu == gpu)

    def complain(self, text: str) -> CudaRuleBroken:
        self.complaints.append(text)
        return CudaRuleBroken(text)

    def verify(self) -> None:
        """Fail if a rule was broken or a running process still holds a resource."""
        left = [text for process in self.processes if process.alive for text in process.holds()]
        left += [f"a descriptor of memory is open: {fd}" for fd in _open_descriptors()]
        left += [f"memory of GPU {memory.gpu} has {memory.users} users" for memory in self.physical if memory.users]
        assert not self.complaints + left, "; ".join(self.complaints + left)


def _open_descriptors() -> list[int]:
    return [fd for fd, name in open_files().items() if "fake-cuda" in name]


class FakeDriver(Driver):
    """The library's driver in one fake process, with the test's own handles on that process."""

    def __init__(self, process: Bindings) -> None:
        super().__init__(process)
        self.process = process

    @property
    def calls(self) -> list[str]:
        return self.process.calls

    def fail_at(self, name: str, nth: int = 1, error: str = "CUDA_ERROR_UNKNOWN") -> None:
        """Make the `nth` call of `name` from now on return `error` and do nothing."""
        self.process.failures[name, self.process.counts[name] + nth] = error

    def kill(self) -> None:
        """End the process; the kernel frees its resources."""
        with self.process.world.lock:
            self.process.die()
