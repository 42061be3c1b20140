"""The modelled time of a call, from its compiled kernel: the code is executed with a clock per warp, over modelled
links.

    time = boundary between kernels + critical path (of a dependent launch: from its wait on)

A short message is executed as it is. A long one is executed for a few rounds of each block's tiles or a few chunks. Its
steady state is extrapolated linearly, because all rounds cost the same, and so do all chunks. If a chunk has many
rounds, chunks of a few rounds are executed, in an arena with smaller buffers, and the rounds that each lacks are added.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache

from tricomm.errors import TricommError
from tricomm.explorer.timing import timed_call
from tricomm.explorer.timing.timed_call import LaunchShape, TimedCall
from tricomm.explorer.timing.warp_clock import FENCE, HOP, POLL, WIRE
from tricomm.kernels import layout
from tricomm.kernels.collectives.registry import Kernel
from tricomm.kernels.layout import Layout
from tricomm.perf.cost_model import kernel_time, machines
from tricomm.perf.cost_model.kernel_time import TimeShares
from tricomm.perf.cost_model.machines import LATENCIES, MachineSpec
from tricomm.policy import launch_shapes

# Most rounds to execute. The first four rounds of small tiles overlap; the fifth waits for the links.
_MOST_ROUNDS, _MOST_CHUNKS = 8, 3
_WIDE, _LONG = LaunchShape(64, 8, 512), 256 << 10


class UnknownChunks(TricommError):
    """A kernel does not divide a call into chunks as this model does."""


@dataclass(frozen=True)
class CodeTime:
    """The modelled time of a call. `parts` are microseconds by `warp_clock.PARTS`, without the boundary.

    in_flight, allows_gbs  most payload bytes in flight to the SMs of a GPU at once, and the bandwidth that these allow.
    executed               the fraction of the message that was executed.
    chunks, barriers       of the call; `more_barriers`: barriers of one more chunk, None if there is one chunk.
    chain                  round trips to memory before the first push (`TimedCall`).
    shares                 microseconds of the time by limit, including the boundary.
    """

    shape: LaunchShape
    boundary: float
    parts: tuple[float, ...]
    in_flight: float
    allows_gbs: float
    executed: float
    chunks: int
    barriers: int
    more_barriers: float | None
    chain: tuple[int, int] | None
    shares: TimeShares

    @property
    def time_us(self) -> float:
        return self.boundary + sum(self.parts)


def policy_shape(machine: MachineSpec, kernel: Kernel, world_size: int, nbytes: int) -> LaunchShape:
    """The launch shape that a communicator without a tuned table would use."""
    choice = kernel_time.choice(machine, kernel, world_size, nbytes)
    dependent = machines.is_dependent(machine, world_size, choice.blocks)
    return LaunchShape(choice.blocks, choice.warps, choice.block, choice.registers, dependent)


def predict(
    machine: MachineSpec,
    kernel: Kernel,
    world_size: int,
    nbytes: int,
    shape: LaunchShape | None = None,
    arena_bytes: int | None = None,
) -> CodeTime:
    """The time of a call with `nbytes` of float32 input per rank, in a graph. A `shape` of None is the policy's, and
    `arena_bytes` of None the default."""
    shape = shape or policy_shape(machine, kernel, world_size, nbytes)
    kind = kernel.kind
    elements = _aligned(max(1, nbytes // 4 // kind.rows_in(world_size)))
    working_set = nbytes * (1 + kind.rows_out(world_size) / kind.rows_in(world_size))
    cold = working_set > LATENCIES[machine.name].l2_bytes
    cut = _division(kernel, world_size, elements, shape, arena_bytes)

    def call(chunks: int, rounds: float, plan: Layout) -> TimedCall:
        part = min(elements, _aligned(int(chunks * rounds * cut.round)))
        return _call(machine, kernel, world_size, part, cut.shape, cold, plan, chunks)

    return extended(machine, cut, elements, call)


def _aligned(elements: int) -> int:
    """`elements`, or up to three fewer, because the timed variants are those for rows of a multiple of 16 bytes."""
    return elements - elements % 4 if elements > 4 else elements


Call = Callable[[int, float, Layout], TimedCall]  # executes (chunks, rounds of each) in an arena


def extended(machine: MachineSpec, cut: Division, elements: int, call: Call) -> CodeTime:
    """The time of a call of `elements` (in the unit of `cut.round`), extrapolated from shorter calls that `call`
    executes."""
    chunks, rounds = cut.chunks, elements / cut.round
    if rounds <= _MOST_ROUNDS or (1 < chunks <= _MOST_CHUNKS and rounds <= _MOST_CHUNKS * _MOST_ROUNDS):
        last = call(chunks, rounds / chunks, cut.plan)
        parts, executed, barriers = last.parts, rounds, float(last.barriers)
        more = (last.barriers - call(1, cut.rounds, cut.plan).barriers) / (chunks - 1) if chunks > 1 else None
    elif chunks == 1:
        first, last = call(1, _MOST_ROUNDS // 2, cut.plan), call(1, _MOST_ROUNDS, cut.plan)
        parts = _continued(last, (first, last, (rounds - _MOST_ROUNDS) / (_MOST_ROUNDS // 2)))
        executed, barriers, more = float(_MOST_ROUNDS), float(last.barriers), None
    elif cut.rounds <= _MOST_ROUNDS:
        first, last = call(2, cut.rounds, cut.plan), call(3, cut.rounds, cut.plan)
        rest = rounds - (chunks - 1) * cut.rounds  # rounds of the last chunk, which may be shorter
        parts = _continued(call(3, (2 * cut.rounds + rest) / 3, cut.plan), (first, last, chunks - 3))
        executed, more = 3 * cut.rounds, float(last.barriers - first.barriers)
        barriers = last.barriers + (chunks - 3) * more
    else:
        one, first = call(1, _MOST_ROUNDS // 2, cut.plan), call(1, _MOST_ROUNDS, cut.plan)
        short = cut.shorter(_MOST_ROUNDS)
        two, last = call(2, _MOST_ROUNDS, short), call(3, _MOST_ROUNDS, short)
        # Short chunks give the cost of each further chunk; the rounds that they lack are added separately.
        further = (rounds - _MOST_ROUNDS * chunks) / (_MOST_ROUNDS // 2)
        parts = _continued(last, (two, last, chunks - 3), (one, first, further))
        executed, more = 3.0 * _MOST_ROUNDS, float(last.barriers - two.barriers)
        barriers = last.barriers + (chunks - 3) * more
    in_flight = cut.shape.blocks * last.in_flight
    allows = in_flight / last.latency / 1e3 if last.latency else 0.0
    boundary = LATENCIES[machine.name].boundary - cut.shape.dependent * machine.overlap
    single = call(1, min(1.0, cut.rounds), cut.plan) if rounds > 1 else last
    least, _, _ = _split(single.parts, single.barriers * machine.barrier)
    rest, wire, at_barriers = _split(parts, barriers * machine.barrier)
    once = min(rest, least)
    shares = TimeShares(boundary + once, rest - once, wire, at_barriers)
    return CodeTime(
        cut.shape,
        boundary,
        parts,
        in_flight,
        allows,
        executed / rounds,
        chunks,
        round(barriers),
        more,
        last.chain,
        shares,
    )


def _split(parts: tuple[float, ...], barriers: float) -> tuple[float, float, float]:
    """Microseconds as (everything else, waiting for links, barriers). Barriers should take about `barriers`
    microseconds."""
    waits = parts[FENCE] + parts[HOP] + parts[POLL]
    fences = min(waits, max(parts[FENCE], barriers)) if barriers else 0.0
    return sum(parts) - parts[WIRE] - fences, parts[WIRE], fences


def instructions(machine: MachineSpec, kernel: Kernel, world_size: int, nbytes: int) -> float:
    """The model's number of machine instructions that a thread executes, outside of polls, per 16 bytes of a rank's
    input.

    In the steady state if a block has several tiles, otherwise in the whole call.
    """
    kind, shape = kernel.kind, policy_shape(machine, kernel, world_size, nbytes)
    elements = max(1, nbytes // 4 // kind.rows_in(world_size))
    cut = _division(kernel, world_size, elements, shape)
    most = min(_MOST_ROUNDS, elements / cut.round, cut.rounds)
    sizes = [int(most * cut.round), int(most / 2 * cut.round) if most >= 2 else 0]
    issued = [_call(machine, kernel, world_size, n, cut.shape, False, cut.plan, 1).issued for n in sizes if n]
    more = issued[0] - sum(issued[1:])
    # An instruction of a warp is one for 32 threads, so for 512 bytes.
    return cut.shape.blocks * more * 512 / (4 * kind.rows_in(world_size) * (sizes[0] - sizes[1]))


def _continued(base: TimedCall, *lines: tuple[TimedCall, TimedCall, float]) -> tuple[float, ...]:
    """The parts of `base` plus, for each of `lines`, `times` the difference between the longer and the shorter call."""
    parts, whole = list(base.parts), base.time_us
    for shorter, longer, times in lines:
        parts = [p + max(0.0, b - a) * times for p, a, b in zip(parts, shorter.parts, longer.parts, strict=True)]
        whole += max(0.0, longer.time_us - shorter.time_us) * times
    # Time may move between parts when a call gets longer. Only the sum grows linearly.
    return tuple(part * whole / sum(parts) for part in parts)


@dataclass(frozen=True)
class Division:
    """How a call is divided: `chunks`, each of `rounds` rounds. A round is a tile of each block, with `round` elements
    in all. A chunk has at most `most` rounds. `shape` has no more blocks than there are tiles."""

    shape: LaunchShape
    plan: Layout
    round: int
    chunks: int
    rounds: float
    most: float

    def shorter(self, rounds: int) -> Layout:
        """An arena in which chunks have only `rounds` rounds."""
        names = ("ll_buffer", "wide_buffer", "simple_buffer")
        return replace(self.plan, **{name: int(getattr(self.plan, name) * rounds / self.most) for name in names})


def _division(
    kernel: Kernel, world_size: int, elements: int, shape: LaunchShape, arena_bytes: int | None = None
) -> Division:
    plan = layout.plan(world_size, arena_bytes or machines.ARENA_BYTES)
    tile = shape.tile if kernel.zero_copy else min(shape.tile, plan.largest_tile(kernel.algorithm, kernel.protocol))
    words, taken = -(-elements // 2), timed_call.words_of_tile(kernel, world_size, tile)
    blocks = max(1, min(shape.blocks, -(-words // taken)))
    warps = min(shape.warps, tile // launch_shapes.WORDS_PER_WARP // kernel.words_per_thread)
    shape = replace(shape, blocks=blocks, warps=warps, tile=tile)
    round_words = blocks * taken
    most = chunk = timed_call.words_of_chunk(kernel, world_size, shape, plan)
    chunks = 1 if kernel.zero_copy else -(-words // chunk)
    if kernel.protocol == "simple" and not kernel.zero_copy:
        chunks, chunk = layout.alike(words, most, taken if kernel.shards == 0 else tile)
    return Division(shape, plan, 2 * round_words, chunks, chunk / round_words, most / round_words)


@lru_cache(4096)
def _call(
    machine: MachineSpec,
    kernel: Kernel,
    world_size: int,
    elements: int,
    shape: LaunchShape,
    cold: bool,
    plan: Layout,
    chunks: int,
) -> TimedCall:
    timed = timed_call.run(machine, kernel, world_size, elements, shape, plan, cold)
    if timed.epochs != chunks:
        raise UnknownChunks(
            f"{kernel.name}: {elements} elements took {timed.epochs} epochs and not {chunks}; how the kernel divides a "
            "call has changed, so `from_code` has to follow"
        )
    return timed


def tuned(
    machine: MachineSpec, kernel: Kernel, world_size: int, nbytes: int, shape: LaunchShape | None = None
) -> CodeTime:
    """`predict` for a published call, with its `shape`. If it is None: the faster of the policy's grid and, for long
    messages, a larger grid that a tuner would find. The buffers are twice our default, because other libraries divide
    calls into fewer chunks."""
    shapes = [shape or replace(policy_shape(machine, kernel, world_size, nbytes), dependent=False)]
    if shape is None and nbytes > _LONG:
        shapes.append(_WIDE)
    times = (predict(machine, kernel, world_size, nbytes, each, 2 * machines.ARENA_BYTES) for each in shapes)
    return min(times, key=lambda each: each.time_us)
