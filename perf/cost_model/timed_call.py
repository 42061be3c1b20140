"""One call of a shipped kernel, compiled, on all ranks: arenas as a communicator lays them out, and one block a rank.

The blocks of a grid are alike: each has its own tiles and headers, and its part of the links. So block 0 of each rank
is executed, as the last one to arrive at the kernel's end, which has the longest way.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import cache

import numpy as np

from tricomm.errors import InvalidArgument
from tricomm.kernels import layout
from tricomm.kernels.collectives.registry import Kernel
from tricomm.kernels.dtypes import DTYPES, reduction
from tricomm.kernels.launch import cubin
from tricomm.kernels.launch.compiler import COMPILE_OPTIONS, compile_kernel, extras, ptx_text, takes_counts
from tricomm.perf.cost_model.instruction_costs import KernelCosts
from tricomm.perf.cost_model.latencies import LATENCIES
from tricomm.perf.cost_model.machines import MachineSpec
from tricomm.perf.cost_model.timed_links import RankQueues
from tricomm.perf.cost_model.timed_ranks import HOST, OwnedMemory, TimedRanks
from tricomm.ptx import grid
from tricomm.ptx.global_memory import GlobalMemory
from tricomm.ptx.instructions import PtxKernel
from tricomm.ptx.text.parser import parse

DTYPE = DTYPES["float32"]
_EPOCH = 6  # any but the first: headers and mailboxes of earlier calls are behind it
_PAGE = 4096
_SCRATCH = 2


@dataclass(frozen=True)
class LaunchShape:
    """Blocks, warps of a block, and 64-bit words of a tile."""

    blocks: int
    warps: int
    tile: int


@dataclass(frozen=True)
class TimedCall:
    """A call by one block of each rank.

    parts       microseconds of the critical path by `warp_clock.PARTS`; launch not included
    in_flight   bytes of payload that the block's loads had on their way at most: those of the loop that allow the least
    latency     mean microseconds of such a load
    """

    parts: tuple[float, ...]
    in_flight: float
    latency: float

    @property
    def time_us(self) -> float:
        return sum(self.parts)


def architecture(machine: MachineSpec) -> str:
    """That its kernels are compiled for. Volta's are compiled for Turing, the oldest one that Triton still knows."""
    return "sm_75" if machine.architecture in ("any", "sm_70") else machine.architecture


@cache
def compiled(kernel: Kernel, arch: str, world_size: int, tile: int, warps: int) -> tuple[PtxKernel, int, int | None]:
    """(PTX, dynamic shared bytes, instructions of machine code). Triton's cache keeps what it has compiled."""
    element, op = reduction(DTYPE, "sum")
    values = {
        **kernel.fixed, "ELEMENT": element, "OP": op, "WORLD_SIZE": world_size, "BLOCK": tile, "LANES": 32 * warps,
        "ALIGNED": True, "PTX": True, **COMPILE_OPTIONS, "num_warps": warps,
    }  # fmt: skip
    made = compile_kernel(kernel.function, values, DTYPE.bits, True, int(arch.removeprefix("sm_")))
    code = parse(ptx_text(made))
    grid.refuse_unknown(code)
    return code, made.metadata.shared, cubin.instructions(made.asm["cubin"], code.name)


@cache
def _costs(kernel: Kernel, arch: str, world_size: int, shape: tuple[int, int], gpu: str) -> KernelCosts:
    code, _, instructions = compiled(kernel, arch, world_size, *shape)
    return KernelCosts(code, LATENCIES[gpu], instructions)


class TimedArenas:
    """Memory of all ranks: tensors, arenas, control pages, and tables of symmetric memory."""

    def __init__(self, world_size: int, arena_bytes: int, words_in: int, words_out: int, cold: bool) -> None:
        self.plan = layout.plan(world_size, arena_bytes)
        self.memory = GlobalMemory()
        self.places: list[OwnedMemory] = []
        self._kept: list[np.ndarray] = []
        arenas = [self._new(self.plan.nbytes, rank, "the arena") for rank in range(world_size)]
        self.controls = [self._new(_PAGE, HOST, "a control page") for _ in range(world_size)]
        self.inputs = [self._new(8 * words_in, rank, "the input", cold) for rank in range(world_size)]
        self.outputs = [self._new(8 * words_out, rank, "the output", cold) for rank in range(world_size)]
        self.tables = [self._new(8 * layout.MAX_WORLD_SIZE, rank, "a table") for rank in range(world_size)]
        self.arenas = [base for base, _ in arenas]
        self.groups: list[tuple[int, ...]] = []
        for rank, (_, table) in enumerate(arenas):
            self._fill(rank, table, world_size)
            words = table[: layout.HEADERS // 8].tolist()
            self.groups.append(layout.group_argument(self.arenas[rank], words, world_size))
            self.tables[rank][1][:world_size] = [base for base, _ in self.inputs]

    def _new(self, nbytes: int, rank: int, name: str, cold: bool = False) -> tuple[int, np.ndarray]:
        raw = np.zeros(nbytes // 8 + 512, "u8")  # pages that nothing touches cost nothing
        self._kept.append(raw)
        skipped = -raw.ctypes.data % _PAGE // 8
        base, nbytes = raw.ctypes.data + 8 * skipped, max(nbytes, 8)
        self.memory.add(base, nbytes, f"{name} of rank {rank}")
        self.places.append(OwnedMemory(base, nbytes, rank, cold))
        return base, raw[skipped:]

    def _fill(self, rank: int, table: np.ndarray, world_size: int) -> None:
        plan = self.plan
        table[layout.RANK], table[layout.CONTROL] = rank, self.controls[rank][0]
        table[layout.LL_BASE], table[layout.LL_BUFFER] = plan.ll, plan.ll_buffer
        table[layout.SIMPLE_BASE], table[layout.SIMPLE_BUFFER] = plan.simple, plan.simple_buffer
        table[layout.EPOCH] = _EPOCH
        table[layout.PEERS : layout.PEERS + world_size] = self.arenas
        quad, peers = (0, 4) if rank < 4 else (4, 0)
        for n in range(4):
            table[layout.QUAD + n], table[layout.PEER_QUAD + n] = quad + n, peers + n
        table[layout.POSITION] = table[layout.QUAD_RANK] = rank % 4

    def expect_last(self, blocks: int) -> None:
        """All blocks but the one that is executed have arrived at the end."""
        for base in self.arenas:
            table = self.memory.find(base).views[8]
            table[layout.ARRIVALS] = blocks - 1


def run(
    machine: MachineSpec, kernel: Kernel, world_size: int, elements: int, shape: LaunchShape, arena_bytes: int,
    cold: bool,
) -> TimedCall:  # fmt: skip
    """One call of `elements` 32-bit elements a row. `cold`: tensors come from memory, not L2."""
    if takes_counts(kernel.function):
        raise InvalidArgument(f"{kernel.name}: a kernel of uneven rows is not modelled from its code")
    arch = architecture(machine)
    code, shared, _ = compiled(kernel, arch, world_size, shape.tile, shape.warps)
    times, kind = LATENCIES[machine.name], kernel.kind
    words = -(-elements // 2)
    sizes = [8 * -(-words * rows // 8) for rows in (kind.rows_in(world_size), kind.rows_out(world_size))]
    arenas = TimedArenas(world_size, arena_bytes, sizes[0], sizes[1], cold)
    arenas.expect_last(shape.blocks)
    loaded = grid.LoadedKernel(code, arenas.memory, timed=True)
    blocks = []
    for rank in range(world_size):
        group = arenas.groups[rank]
        values = [arenas.inputs[rank][0], arenas.outputs[rank][0], *group, elements, 1 << 32 | 1]
        values += [arenas.tables[rank][0] if kernel.zero_copy else 0 for _ in extras(kernel.function)]
        if kernel.collective == "barrier":
            values = [*group, 1 << 32 | 1]
        parameters = struct.pack(f"={len(values) + _SCRATCH}Q", *values, *[0] * _SCRATCH)
        (block,) = grid.launch(loaded, (1, 1, 1), (32 * shape.warps, 1, 1), shared, parameters)
        block.grid = (shape.blocks, 1, 1)
        blocks.append(block)
    costs = _costs(kernel, arch, world_size, (shape.tile, shape.warps), machine.name)
    ranks = TimedRanks(costs, [RankQueues(machine, times, shape.blocks) for _ in blocks], arenas.places)
    ranks.run(blocks)
    loads = ranks.scarcest()
    return TimedCall(tuple(ranks.path()), loads.most if loads else 0.0, loads.latency if loads else 0.0)
