"""The time of a call from the compiled kernel: its machine code executed with a clock a warp, on the links of a GPU.

    time = boundary between kernels + critical path

A short message is executed as it is. A long one is executed for a few rounds of each block's tiles (or a few chunks),
and the steady state is continued in a line: all rounds are alike.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from tricomm.kernels import layout
from tricomm.kernels.collectives.registry import Kernel
from tricomm.perf import units
from tricomm.perf.cost_model import timed_call
from tricomm.perf.cost_model.latencies import LATENCIES
from tricomm.perf.cost_model.machines import MachineSpec
from tricomm.perf.cost_model.timed_call import LaunchShape, TimedCall
from tricomm.policy import selection
from tricomm.policy.selection import SelectionFacts

ARENA_BYTES = 64 << 20  # what `Options` has
_MOST_ROUNDS = 4  # that are executed
_WIDE, _LONG = LaunchShape(64, 8, 2048), 256 << 10


@dataclass(frozen=True)
class CodeTime:
    """A call modelled from its code. `parts` are microseconds by `warp_clock.PARTS`, the boundary not included.

    `in_flight` bytes of payload are on their way to the SMs of a GPU at once, at most; `allows_gbs` is the bandwidth
    that they allow. `executed`: the part of the message that was executed.
    """

    shape: LaunchShape
    boundary: float
    parts: tuple[float, ...]
    in_flight: float
    allows_gbs: float
    executed: float

    @property
    def time_us(self) -> float:
        return self.boundary + sum(self.parts)


def policy_shape(machine: MachineSpec, kernel: Kernel, world_size: int, nbytes: int) -> LaunchShape:
    """The grid that a communicator would launch without a tuned table."""
    facts = SelectionFacts(_device(machine), world_size, layout.plan(world_size, ARENA_BYTES), layout.MAX_BLOCKS)
    if kernel.needs_cube:
        facts = SelectionFacts(facts.device, world_size, facts.layout, layout.MAX_BLOCKS, topology="hybrid_cube_mesh")
    if kernel.zero_copy:
        choice = selection.choose(facts, kernel.collective, nbytes, zero_copy=kernel.algorithm)
    else:
        choice = selection.choose(facts, kernel.collective, nbytes, kernel.algorithm, kernel.protocol, "graph")
    return LaunchShape(choice.blocks, choice.warps, choice.block)


def _device(machine: MachineSpec) -> str:
    return timed_call.architecture(machine)


def predict(
    machine: MachineSpec, kernel: Kernel, world_size: int, nbytes: int, shape: LaunchShape | None = None
) -> CodeTime:
    """One call of `nbytes` of float32 input a rank, in a graph. `shape` None: the policy's."""
    shape = shape or policy_shape(machine, kernel, world_size, nbytes)
    kind = kernel.kind
    elements = max(1, nbytes // 4 // kind.rows_in(world_size))
    working_set = nbytes * (1 + kind.rows_out(world_size) / kind.rows_in(world_size))
    shape, few, many = _executed(kernel, world_size, elements, shape)
    cold = working_set > LATENCIES[machine.name].l2_bytes
    last = _call(machine, kernel.name, world_size, many, shape, cold)
    parts = last.parts
    if many < elements:
        first = _call(machine, kernel.name, world_size, few, shape, cold)
        more = (elements - many) / (many - few)
        parts = tuple(b + max(0.0, b - a) * more for a, b in zip(first.parts, parts, strict=True))
        # Parts may trade places between two lengths; the sum is what goes on in a line.
        whole = last.time_us + max(0.0, last.time_us - first.time_us) * more
        parts = tuple(part * whole / sum(parts) for part in parts)
    in_flight = shape.blocks * last.in_flight
    allows = in_flight / last.latency / 1e3 if last.latency else 0.0
    return CodeTime(shape, LATENCIES[machine.name].boundary, parts, in_flight, allows, many / elements)


def _executed(kernel: Kernel, world_size: int, elements: int, shape: LaunchShape) -> tuple[LaunchShape, int, int]:
    """(shape with no more blocks than there are tiles, elements of the shorter and of the longer call)."""
    plan = layout.plan(world_size, ARENA_BYTES)
    divided = 1 if kernel.shards is None else kernel.shards or world_size
    tile = shape.tile if kernel.zero_copy else min(shape.tile, plan.largest_tile(kernel.algorithm, kernel.protocol))
    words = -(-elements // 2)
    blocks = max(1, min(shape.blocks, -(-words // (tile * divided))))
    shape = LaunchShape(blocks, min(shape.warps, tile // selection.WORDS_PER_WARP), tile)
    round_words = blocks * tile * divided
    if words <= _MOST_ROUNDS * round_words:
        return shape, elements, elements
    chunk = plan.buffer_words(kernel.algorithm, kernel.protocol) * (world_size if kernel.staged else divided)
    if kernel.zero_copy or chunk >= _MOST_ROUNDS * round_words:
        return shape, _MOST_ROUNDS // 2 * round_words * 2, _MOST_ROUNDS * round_words * 2
    return shape, 2 * chunk, 4 * chunk


@lru_cache(4096)
def _call(
    machine: MachineSpec, kernel: str, world_size: int, elements: int, shape: LaunchShape, cold: bool
) -> TimedCall:
    from tricomm.kernels.collectives import registry

    found = next(k for k in registry.ALL if k.name == kernel)
    return timed_call.run(machine, found, world_size, elements, shape, ARENA_BYTES, cold)


def tuned(machine: MachineSpec, kernel: Kernel, world_size: int, nbytes: int) -> CodeTime:
    """With the faster of two grids: the policy's, and for long messages a wide one, as a tuner would find it."""
    shapes = [policy_shape(machine, kernel, world_size, nbytes)]
    if nbytes > _LONG:
        shapes.append(_WIDE)
    return min((predict(machine, kernel, world_size, nbytes, shape) for shape in shapes), key=lambda each: each.time_us)


def busbw(kernel: Kernel, world_size: int, nbytes: int, time_us: float) -> float:
    total = units.total_bytes(kernel.collective, nbytes // 4, 4, world_size)
    return units.algorithm_bandwidth(total, time_us) * units.bus_factor(kernel.collective, world_size)
