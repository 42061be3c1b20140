"""Shipped kernels, compiled for a GPU, over the arenas of several ranks in this process."""

from __future__ import annotations

import struct
from functools import cache

from tests.explorer.ptx.corpus import without_assembler
from tests.kernels.arenas import Block, Rank
from tricomm.explorer.ptx import grid
from tricomm.explorer.ptx.global_memory import GlobalMemory
from tricomm.explorer.ptx.text.parser import parse
from tricomm.kernels import layout
from tricomm.kernels.dtypes import DTYPES
from tricomm.kernels.launch.compiler import extras
from tricomm.perf.machine_code.kernel_report import Variant, compile_variant


@cache
def parsed(kernel, variant: Variant):
    """(the parsed kernel, dynamic shared bytes, threads)"""
    with without_assembler():
        compiled = compile_variant(kernel.function, variant, kernel.fixed)
    return parse(compiled.asm["ptx"]), compiled.metadata.shared, 32 * compiled.metadata.num_warps


class CompiledRanks:
    """All ranks of a group. `call` runs one collective on all of them at once."""

    def __init__(self, world_size: int, arena_bytes: int = 1 << 20, arch: str = "sm_90", epoch: int = 1) -> None:
        self.block = Block(world_size, arena_bytes)
        self.ranks = [Rank(rank, self.block.where, epoch) for rank in range(world_size)]
        self.arch, self.calls = arch, 0
        self.memory = GlobalMemory()
        for rank in self.ranks:
            base = rank.words.data_ptr()
            for peer in range(world_size):
                self.memory.add(base + peer * rank.stride, rank.plan.nbytes, f"rank {rank.rank}'s view of arena {peer}")
            control = base + rank.rank * rank.stride + rank.plan.nbytes
            self.memory.add(control, 4096, f"rank {rank.rank}'s control page")

    def close(self) -> None:
        self.block.close()

    def launches(self, kernel, xs, ys, unit="warp", op="sum", blocks=1, variant=None, steps=grid.STEPS):
        self.calls += 1
        dtype = str(xs[0].dtype).removeprefix("torch.")
        world_size = len(self.ranks)
        variant = variant or Variant(kernel.name, self.arch, dtype, op, world_size, block=512, warps=8)
        code, shared, threads = parsed(kernel, variant)
        started = []
        for rank, x, y in zip(self.ranks, xs, ys, strict=True):
            self.memory.add(x.data_ptr(), x.numel() * x.element_size(), f"x of rank {rank.rank}")
            self.memory.add(y.data_ptr(), y.numel() * y.element_size(), f"y of rank {rank.rank}")
            count = x.numel() * DTYPES[dtype].lanes // kernel.kind.rows_in(world_size)
            group = layout.group_argument(rank.arena.data_ptr(), rank.arena, world_size)
            words = [x.data_ptr(), y.data_ptr(), *group, count, self.calls << 32 | self.calls]
            words += [0 for _ in extras(kernel.function)]
            parameters = struct.pack(f"={len(words) + 2}Q", *words, 0, 0)
            loaded = grid.LoadedKernel(code, self.memory, steps=steps)
            started.append(grid.launch(loaded, (blocks, 1, 1), (threads, 1, 1), shared, parameters, unit))
        return started

    def call(self, *args, **options) -> None:
        grid.run(self.launches(*args, **options))
