"""Stand-in for torch's symmetric memory (`torch.distributed._symmetric_memory`) between the ranks of an execution.

Ranks must allocate in the same order. `rendezvous` compares the sizes and waits for all ranks. Barriers and signals are
kernels on the rank's current stream (`signal_kernels.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch._C._distributed_c10d import _SymmetricMemory
from torch.distributed import _symmetric_memory as symm_mem

from tricomm.errors import InvalidArgument
from tricomm.explorer.memory_model.regions import Region
from tricomm.explorer.standins.host import ProgramHost
from tricomm.explorer.standins.signal_kernels import signals, write
from tricomm.store.arenas.arena import Arena

CPU = torch.device("cpu")
_PUT, _WAIT = 1, 2


class Allocation:
    """One rank's part of an allocation that every rank makes. `pointers` is the address of a table with the addresses
    of all ranks' parts."""

    def __init__(self, host: ProgramHost, arena: Arena, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self.arena, self.shape, self.dtype = arena, shape, dtype
        self.nbytes = max(1, prod(shape)) * dtype.itemsize
        self.local = arena.tensor(host.rank, 0, shape, dtype)
        self.table = torch.tensor(arena.bases, dtype=torch.int64)
        self.pointers = self.table.data_ptr()
        host.memory.add(Region("control", host.rank, self.pointers, self.table.nbytes, "a table of addresses"))

    def holds(self, address: int) -> bool:
        return 0 <= address - self.local.data_ptr() < self.nbytes


class MemoryHandle:
    """As `_SymmetricMemory`: the memory of one tensor on all ranks, and its signal pads. `offset` is the tensor's first
    byte. `get_remote_tensor` and `multicast_ptr` count from it; other addresses begin at the first byte of the
    memory."""

    def __init__(self, host: ProgramHost, memory: Allocation, pads: Allocation, offset: int, group_name: str) -> None:
        self._host, self._memory, self._pads = host, memory, pads
        self.rank, self.world_size, self.offset, self.group_name = host.rank, host.world_size, offset, group_name
        self.device = torch.device("cuda", host.rank)
        self.buffer_ptrs, self.buffer_ptrs_dev = list(memory.arena.bases), memory.pointers
        self.signal_pad_ptrs, self.signal_pad_ptrs_dev = list(pads.arena.bases), pads.pointers
        self.buffer_size, self.signal_pad_size = memory.nbytes, pads.nbytes
        # Static methods of torch's class
        self.stream_write_value32, self.memset32 = host.symmetric.stream_write_value32, host.symmetric.memset32
        self.multicast_ptr = memory.arena.multicast and memory.arena.multicast + offset

    def boxed(self) -> MemoryHandle:
        return self

    def get_buffer(self, rank: int, sizes: Sequence[int], dtype: torch.dtype, storage_offset: int = 0) -> torch.Tensor:
        return self._view(self._memory, "get_buffer", rank, sizes, dtype, storage_offset * dtype.itemsize)

    def get_remote_tensor(self, peer: int, sizes: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return self._view(self._memory, "get_remote_tensor", peer, sizes, dtype, self.offset)

    def get_signal_pad(
        self, rank: int, sizes: Sequence[int] = (), dtype: torch.dtype | None = None, storage_offset: int = 0
    ) -> torch.Tensor:
        dtype = dtype or torch.uint32
        shape = tuple(sizes) or (self.signal_pad_size // dtype.itemsize - storage_offset,)
        return self._view(self._pads, "get_signal_pad", rank, shape, dtype, storage_offset * dtype.itemsize)

    def barrier(self, channel: int = 0, timeout_ms: int = 0) -> None:
        self._signal(channel, 0, self.world_size, _PUT | _WAIT)

    def put_signal(self, dst_rank: int, channel: int = 0, timeout_ms: int = 0) -> None:
        self._signal(channel, dst_rank, dst_rank + 1, _PUT)

    def wait_signal(self, src_rank: int, channel: int = 0, timeout_ms: int = 0) -> None:
        self._signal(channel, src_rank, src_rank + 1, _WAIT)

    def _view(
        self, of: Allocation, what: str, rank: int, sizes: Sequence[int], dtype: torch.dtype, offset: int
    ) -> torch.Tensor:
        with self._host.library():
            end = offset + prod(sizes) * dtype.itemsize
            if not 0 <= rank < self.world_size or offset < 0 or end > of.nbytes:
                raise InvalidArgument(
                    f"{what}: bytes {offset} to {end} of rank {rank}: there are {of.nbytes} bytes on each of "
                    f"{self.world_size} ranks"
                )
            return of.arena.tensor(rank, offset, tuple(sizes), dtype)

    def _signal(self, channel: int, first: int, end: int, steps: int) -> None:
        word = channel * self.world_size
        if channel < 0 or (word + self.world_size) * 4 > self.signal_pad_size:
            raise InvalidArgument(
                f"channel {channel}: a signal pad of {self.signal_pad_size} bytes has no such channel"
            )
        with self._host.library():
            values = {"CHANNEL": word, "RANK": self.rank, "FIRST": first, "END": end, "STEPS": steps}
            self._host.comm.launch(signals, 1, self._pads.table, **values, num_warps=1)


class SymmetricMemories:
    """The allocations and handles of one rank."""

    def __init__(self, host: ProgramHost) -> None:
        self._host = host
        self._allocated: list[Allocation] = []
        self._pads: dict[tuple[int, str], Allocation] = {}  # by address and group
        self._names: dict[int, str] = {}  # by address: the group name that the allocation was made with

    def empty_strided_p2p(
        self, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype, device: torch.device,
        group_name: str | None = None, alloc_id: int | None = None,
    ) -> torch.Tensor:  # fmt: skip
        if 0 in size or any(step < 0 for step in stride):
            raise InvalidArgument(f"symmetric memory of size {list(size)}, stride {list(stride)}: no memory is needed")
        span = 1 + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
        made = self._allocate((span,), dtype)
        made.shape = tuple(size)
        if group_name is not None:
            self._names[id(made)] = group_name
        return made.local.as_strided(tuple(size), tuple(stride))

    def rendezvous(self, tensor: torch.Tensor, group_name: str | None = None) -> MemoryHandle:
        address = tensor.data_ptr()
        memory = next((a for a in self._allocated if a.holds(address)), None)
        if memory is None:
            raise RuntimeError(
                "rendezvous: this tensor was not made by symmetric memory's `empty`; torch refuses it, too"
            )
        name = group_name or self._names.get(id(memory), "")
        group = self._host.groups.get(name, self._host.group)
        if len(group.ranks) < self._host.world_size:
            raise InvalidArgument(
                f"rendezvous: symmetric memory of the ranks {list(group.ranks)} alone is not simulated; check the "
                f"program with {len(group.ranks)} ranks, and a group of all of them"
            )
        base = memory.local.data_ptr()
        if (base, group.key) not in self._pads:
            said = f"symmetric memory {self._allocated.index(memory)}"
            shape = f"{memory.dtype} {list(memory.shape)}".replace("torch.", "")
            self._host.exchange(f"rendezvous({said}: {shape})", None, group.ranks, group.key)
            pads = self._allocate((_SymmetricMemory.signal_pad_size // 4,), torch.int32)
            handle: Any = pads.arena  # a `SimulatedHandle`
            for region in handle.regions:
                region.name = f"rank {region.rank}'s signal pad of {said}"
            self._pads[base, group.key] = pads
        return MemoryHandle(self._host, memory, self._pads[base, group.key], address - base, name)

    def holds(self, tensor: torch.Tensor) -> bool:
        return any(a.holds(tensor.data_ptr()) for a in self._allocated)

    def stream_write_value32(self, tensor: torch.Tensor, offset: int, val: int) -> torch.Tensor:
        """As `cuStreamWriteValue32`: after all earlier work of the stream, with a system fence."""
        with self._host.library():
            word = tensor.view(torch.int32).view(-1)[offset:]
            self._host.comm.launch(write, 1, word, VALUE=val, num_warps=1)
        return tensor

    def memset32(self, tensor: torch.Tensor, offset: int, val: int, count: int = 1) -> torch.Tensor:
        tensor.view(torch.int32).view(-1)[offset : offset + count].fill_(val)  # work of the current stream
        return tensor

    def _allocate(self, shape: tuple[int, ...], dtype: torch.dtype) -> Allocation:
        group, multicast = self._host.comm._group, self._host.comm.gpu is not None
        arena = group.runtime.symmetric(group.control, shape, dtype, CPU, group.timeout, multicast)
        self._allocated.append(Allocation(self._host, arena, shape, dtype))
        return self._allocated[-1]


def patches() -> Mapping[tuple[Any, str], Callable[[ProgramHost], Callable[..., Any]]]:
    """Patches of torch's class, whose functions `torch.distributed._symmetric_memory` calls."""
    table: dict[tuple[Any, str], Callable[[ProgramHost], Callable[..., Any]]] = {
        (_SymmetricMemory, "empty_strided_p2p"): lambda host: host.calls(host.symmetric.empty_strided_p2p),
        (_SymmetricMemory, "rendezvous"): lambda host: host.calls(host.symmetric.rendezvous),
        (_SymmetricMemory, "stream_write_value32"): lambda host: host.symmetric.stream_write_value32,
        (_SymmetricMemory, "memset32"): lambda host: host.symmetric.memset32,
        (_SymmetricMemory, "is_symm_mem_tensor"): lambda host: host.calls(host.symmetric.holds),
        (_SymmetricMemory, "has_multicast_support"): lambda host: lambda *args: host.comm.gpu is not None,
        (_SymmetricMemory, "get_backend"): lambda host: lambda device: "CUDA",
        (_SymmetricMemory, "set_backend"): lambda host: lambda name: None,
        (_SymmetricMemory, "set_group_info"): lambda host: lambda *args: None,
        (symm_mem, "enable_symm_mem_for_group"): lambda host: lambda group_name: None,
    }
    # from torch 2.12 on: memory from a pool, which would need a GPU
    if hasattr(symm_mem, "_should_use_implicit_mempool"):
        table[symm_mem, "_should_use_implicit_mempool"] = lambda host: lambda: False
    return table
