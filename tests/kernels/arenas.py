"""Bare arenas for kernel tests: one shared block and its group tables, without a store and a communicator."""

import mmap
import os
from dataclasses import dataclass

import torch

from tricomm.kernels import layout
from tricomm.kernels.collectives import registry
from tricomm.kernels.dtypes import DTYPES, reduction
from tricomm.kernels.launch.compiler import extras, takes_counts
from tricomm.kernels.launch.kernel_launch import as_integers, prepare

PAGE = 4096


@dataclass
class Block:
    """A shared block in the parent: hand `where` to the ranks."""

    world_size: int
    arena_bytes: int

    def __post_init__(self) -> None:
        self.plan = layout.plan(self.world_size, self.arena_bytes)
        self.fd = os.memfd_create("tricomm-test")
        os.posix_fallocate(self.fd, 0, (self.plan.nbytes + PAGE) * self.world_size)

    @property
    def where(self) -> tuple[str, int, int]:
        return f"/proc/{os.getpid()}/fd/{self.fd}", self.world_size, self.arena_bytes

    def close(self) -> None:
        os.close(self.fd)


class Rank:
    """One rank's view: launch shipped kernels over the block."""

    def __init__(self, rank: int, where: tuple[str, int, int], epoch: int = 1) -> None:
        path, world_size, arena_bytes = where
        self.rank, self.world_size = rank, world_size
        self.plan = layout.plan(world_size, arena_bytes)
        fd = os.open(path, os.O_RDWR)
        self.memory = mmap.mmap(fd, (self.plan.nbytes + PAGE) * world_size)
        os.close(fd)
        self.words = torch.frombuffer(self.memory, dtype=torch.int64)
        self.stride = self.plan.nbytes + PAGE
        base = self.words.data_ptr()
        self.arena = self.words[rank * self.stride // 8 :][: self.plan.nbytes // 8]
        self.control = self.words[(rank * self.stride + self.plan.nbytes) // 8 :][: PAGE // 8]
        self.calls = 0
        table = self.arena
        table[layout.RANK] = rank
        table[layout.CONTROL] = base + rank * self.stride + self.plan.nbytes
        for word, value in self.plan.constants.items():
            table[word] = value
        table[layout.EPOCHS : layout.EPOCHS + layout.MAX_BLOCKS] = epoch
        for peer in range(world_size):
            table[layout.PEERS + peer] = base + peer * self.stride

    @property
    def epoch(self) -> int:
        return int(self.arena[layout.EPOCHS]) & 0xFFFFFFFF  # without the number of a call that runs

    @property
    def status(self) -> int:
        return int(self.control[layout.STATUS])

    def run(self, kernel, x, y, op="sum", blocks=1, tile=64, fingerprint=None, number=None, root=0) -> None:
        self.calls += 1
        dtype = DTYPES[str(x.dtype).removeprefix("torch.")]
        count = x.numel() * dtype.lanes // kernel.kind.rows_in(self.world_size)
        aligned = x.data_ptr() % 16 == 0 and y.data_ptr() % 16 == 0
        aligned = aligned and (kernel.collective == "all_reduce" or count * dtype.bits % 128 == 0)
        block = min(tile, self.plan.largest_tile(kernel.algorithm, kernel.protocol))
        constexprs = {"WORLD_SIZE": self.world_size, "BLOCK": block, "LANES": 16, "ALIGNED": aligned, "PTX": False}
        constexprs |= kernel.fixed
        if kernel.reduces:
            constexprs["ELEMENT"], constexprs["OP"] = reduction(dtype, op)
        call = (self.calls if number is None else number) << 32 | (self.calls if fingerprint is None else fingerprint)
        data = (as_integers(x, dtype.bits), as_integers(y, dtype.bits))
        rows = ((1,) * self.world_size,) * 2 if takes_counts(kernel.function) else ()
        group = layout.group_argument(self.arena, self.arena, self.world_size)
        args = (*data, group, count, call, *rows, *(root for _ in extras(kernel.function)))
        prepare(kernel.function, (blocks,), args, constexprs, torch.device("cpu"))()


# Kernels of a cube mesh need eight ranks, so their tests simulate them.
DATA_KERNELS = [k for k in registry.KERNELS if k.collective != "barrier" and not k.needs_cube]


def poisoned(count: int, dtype: torch.dtype) -> torch.Tensor:
    """An output that no test can take for a result."""
    return torch.full((count,), float("nan") if dtype.is_floating_point else -99, dtype=dtype)
