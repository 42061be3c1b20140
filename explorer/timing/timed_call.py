"""Executes one call of a shipped, compiled kernel on all ranks: arenas like a communicator's, and one block per rank.

The blocks of a grid do the same work: each has its own tiles and headers, and its share of the links. So only block 0
of each rank is executed. It has the most work, because it also writes the epochs of blocks that the grid lacks.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import torch

from tricomm.explorer.compiled.module_table import DeviceFunction, KernelLaunch
from tricomm.explorer.ptx.global_memory import GlobalMemory
from tricomm.explorer.ptx.units import grid
from tricomm.explorer.timing import recorded_launch
from tricomm.explorer.timing.instruction_costs import KernelCosts
from tricomm.explorer.timing.recorded_launch import RecordingGpu
from tricomm.explorer.timing.timed_links import RankQueues
from tricomm.explorer.timing.timed_ranks import HOST, OwnedMemory, TimedRanks
from tricomm.kernels import layout
from tricomm.kernels.collectives.registry import Kernel
from tricomm.kernels.dtypes import DTYPES, reduction
from tricomm.kernels.launch.compiler import COMPILE_OPTIONS, extras, takes_counts
from tricomm.kernels.specialization import specialized
from tricomm.perf.cost_model.machines import LATENCIES, MachineSpec
from tricomm.policy.launch_shapes import MOST_REGISTERS

DTYPE = DTYPES["float32"]
_EPOCH = 6  # not the first, because there usually were calls before
_PAGE = 4096
_MULTICAST, _INPUTS = 1 << 60, 1 << 61  # addresses that are in no memory
CALL = 1 << 32 | 1  # the number of the call


@dataclass(frozen=True)
class LaunchShape:
    """The shape of a launch: blocks, warps of a block, words of a tile, registers of a thread. Few registers stand for
    the compact form of a kernel. `dependent`: it is a dependent launch."""

    blocks: int
    warps: int
    tile: int
    registers: int = MOST_REGISTERS
    dependent: bool = False


@dataclass(frozen=True)
class TimedCall:
    """A timed call, by one block of each rank.

    parts       microseconds of the critical path by `warp_clock.PARTS`, without the launch.
    in_flight   most payload bytes that the block's loads had in flight, in the loop with the least possible bandwidth.
    latency     mean microseconds of such a load.
    chain       round trips to memory before the first push, by data and in order (`LoadChain`).
    moved       bytes of payload to and from peers, for the rank with the most; `headers`: bytes of control words.
    barriers    barriers of all ranks, counted as system fences; `epochs`: the epochs that the call took.
    issued      the model's number of machine instructions of the block's warps outside of polls.
    """

    parts: tuple[float, ...]
    in_flight: float
    latency: float
    chain: tuple[int, int] | None
    moved: int
    headers: int
    barriers: int
    epochs: int
    issued: float

    @property
    def time_us(self) -> float:
        return sum(self.parts)


def constexprs(kernel: Kernel, world_size: int, shape: LaunchShape) -> dict[str, object]:
    """The constexprs to which a communicator binds a kernel for aligned float32."""
    element, op = reduction(DTYPE, "sum")
    return {
        **kernel.fixed,
        "ELEMENT": element,
        "OP": op,
        "WORLD_SIZE": world_size,
        "BLOCK": shape.tile,
        "LANES": 32 * shape.warps,
        "ALIGNED": True,
        "PTX": True,
        **COMPILE_OPTIONS,
        "num_warps": shape.warps,
        "maxnreg": shape.registers,
        "COMPACT": shape.registers < MOST_REGISTERS,
        "DEPENDENT": shape.dependent,
    }


@cache
def _costs(gpu: RecordingGpu, loaded: DeviceFunction, machine: str) -> KernelCosts:
    return KernelCosts(loaded.kernel, LATENCIES[machine], gpu.machine_instructions(loaded))


class TimedArenas:
    """Memory of all ranks: tensors, arenas, control pages, and tables of symmetric memory."""

    def __init__(self, world_size: int, plan: layout.Layout, words_in: int, words_out: int, cold: bool) -> None:
        self.plan = plan
        self.memory = GlobalMemory()
        self.places: list[OwnedMemory] = []
        self._kept: list[np.ndarray] = []
        ranks = range(world_size)
        self.arenas = [self.new(self.plan.nbytes, rank, "the arena", head=self.plan.ll) for rank in ranks]
        self.controls = [self.new(_PAGE, HOST, "a control page") for _ in ranks]
        self.inputs = [self.new(8 * words_in, rank, "the input", cold) for rank in ranks]
        self.outputs = [self.new(8 * words_out, rank, "the output", cold) for rank in ranks]
        self.tables = [self.new(8 * (layout.MAX_WORLD_SIZE + 1), rank, "a table") for rank in ranks]
        self.memory.add_multicast(_MULTICAST, self.plan.nbytes, [arena.data_ptr() for arena in self.arenas])
        self.memory.add_multicast(_INPUTS, 8 * words_in, [each.data_ptr() for each in self.inputs])
        for rank, arena in enumerate(self.arenas):
            self._fill(rank, arena, world_size)
            self.tables[rank][:world_size], self.tables[rank][world_size] = _addresses(self.inputs), _INPUTS

    def new(self, nbytes: int, rank: int, name: str, cold: bool = False, head: int = 0) -> torch.Tensor:
        """Allocate words of a rank's memory, all 0. `head`: its first bytes, which hold no payload; `cold`: it is not
        in L2."""
        raw = np.zeros(nbytes // 8 + 512, "u8")  # pages that are not accessed cost nothing
        self._kept.append(raw)
        skipped = -raw.ctypes.data % _PAGE // 8
        base, nbytes = raw.ctypes.data + 8 * skipped, max(nbytes, 8)
        self.memory.add(base, nbytes, f"{name} of rank {rank}")
        if head:
            self.places.append(OwnedMemory(base, head, rank, control=True))
        self.places.append(OwnedMemory(base + head, nbytes - head, rank, cold))
        return torch.from_numpy(raw[skipped:].view("i8"))

    def _fill(self, rank: int, table: torch.Tensor, world_size: int) -> None:
        table[layout.RANK], table[layout.CONTROL] = rank, self.controls[rank].data_ptr()
        for word, value in self.plan.constants.items():
            table[word] = value
        table[layout.EPOCHS : layout.EPOCHS + layout.MAX_BLOCKS], table[layout.MULTICAST] = _EPOCH, _MULTICAST
        table[layout.PEERS : layout.PEERS + world_size] = _addresses(self.arenas)
        quad, peers = (0, 4) if rank < 4 else (4, 0)
        for n in range(4):
            table[layout.QUAD + n], table[layout.PEER_QUAD + n] = quad + n, peers + n
        table[layout.POSITION] = table[layout.QUAD_RANK] = rank % 4

    def group(self, rank: int) -> tuple[Any, ...]:
        """The group argument of the kernel of rank `rank`."""
        arena = self.arenas[rank]
        return layout.group_argument(arena, arena[: layout.HEADERS // 8].tolist(), len(self.arenas))

    @property
    def epochs(self) -> int:
        """The number of epochs that have passed."""
        return int(self.arenas[0][layout.EPOCHS]) - _EPOCH


def _addresses(tensors: list[torch.Tensor]) -> torch.Tensor:
    return torch.tensor([each.data_ptr() for each in tensors])


def run(
    machine: MachineSpec,
    kernel: Kernel,
    world_size: int,
    elements: int,
    shape: LaunchShape,
    plan: layout.Layout,
    cold: bool,
) -> TimedCall:
    """Execute a call of `elements` 32-bit elements per row, also for a kernel of uneven rows. `cold`: tensors are in
    memory, not in L2."""
    if kernel.multicast:
        machine = replace(machine, kernels=machine.multicast)
    kind, words = kernel.kind, -(-elements // 2)
    sizes = [8 * -(-words * rows // 8) for rows in (kind.rows_in(world_size), kind.rows_out(world_size))]
    arenas = TimedArenas(world_size, plan, sizes[0], sizes[1], cold)
    bits = None if kernel.collective == "barrier" else DTYPE.bits
    rows = ((1,) * world_size,) * 2 if takes_counts(kernel.function) else ()

    def launch(gpu: RecordingGpu, rank: int) -> KernelLaunch:
        more = [arenas.tables[rank] if name in ("table", "into") else 0 for name in extras(kernel.function)]
        return gpu.launched(
            kernel.function,
            shape.blocks,
            constexprs(kernel, world_size, shape),
            bits,
            more,
            arenas.group(rank),
            (arenas.inputs[rank], arenas.outputs[rank], elements, CALL, rows),
        )

    return executed(machine, arenas, busy(words / words_of_tile(kernel, world_size, shape.tile), shape.blocks), launch)


def words_of_tile(kernel: Kernel, world_size: int, tile: int) -> int:
    """The number of 64-bit words of a row that a block moves at a time, with a tile of each shard."""
    divided = 1 if kernel.shards is None else kernel.shards or world_size
    coded = DTYPE.bits // 8 if kernel.wire else 1
    return layout.tile_words(kernel.protocol, tile) * divided * coded


def words_of_chunk(kernel: Kernel, world_size: int, shape: LaunchShape, plan: layout.Layout) -> int:
    """The most 64-bit words of a row that one epoch carries."""
    if not kernel.wire:
        return kernel.chunk_words(world_size, plan)
    given = constexprs(kernel, world_size, shape)
    spec: Any = specialized(("SPEC",), given)["SPEC"]
    buffer = plan.wide_buffer if spec.WIDE else plan.ll_buffer if spec.LL else plan.simple_buffer
    words: int = buffer // 16 // spec.FIRST_ROOM * spec.TILE * world_size
    return words


def busy(tiles: float, blocks: int) -> float:
    """The mean number of blocks at work until block 0 ends. In its last round, block 0 may also have the share of the
    links of blocks that have none of the `tiles` left."""
    return max(1.0, tiles / max(1, math.ceil(tiles / blocks)))


def executed(
    machine: MachineSpec, arenas: TimedArenas, blocks: float, launch: Callable[[RecordingGpu, int], KernelLaunch]
) -> TimedCall:
    """Execute block 0 of each rank's kernel, which `launch(gpu, rank)` launches. `blocks` blocks share the links
    (`busy`)."""
    gpu, times = recorded_launch.gpu(machine.target), LATENCIES[machine.name]
    started = []
    for rank in range(len(arenas.arenas)):
        launched = launch(gpu, rank)
        if rank == 0:
            loaded = grid.LoadedKernel(launched.loaded.kernel, arenas.memory, timed=True)
        (block,) = grid.launch(loaded, (1, 1, 1), launched.threads, launched.shared, launched.parameters)
        block.grid = launched.grid
        started.append(block)
    costs = _costs(gpu, launched.loaded, machine.name)
    ranks = TimedRanks(costs, [RankQueues(machine, times, blocks) for _ in started], arenas.places)
    ranks.run(started)
    loads = ranks.scarcest()
    return TimedCall(
        tuple(ranks.path()),
        loads.most if loads else 0.0,
        loads.latency if loads else 0.0,
        ranks.chain(),
        max(state.written + state.read for state in ranks.states),
        max(state.headers for state in ranks.states),
        ranks.system_fences(),
        arenas.epochs,
        ranks.issued(),
    )
