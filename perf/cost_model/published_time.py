"""A published time of another project's kernel, and how that kernel synchronizes and is launched."""

from __future__ import annotations

from dataclasses import dataclass

from tricomm.kernels.collectives import registry
from tricomm.perf.cost_model.machines import LATENCIES, MACHINES

# From event to event after a flush of L2, and under a profiler (`published`): FITTED to the rows so timed.
_EVENTS = 4.0


@dataclass(frozen=True)
class Sync:
    """The synchronization in a call: `barriers`, of which `fences` contain a system fence; `answers`, round trips to
    peers' memory, a hop each; `copies`, kernels that copy the message; `staged`, copies within the kernel."""

    barriers: int
    fences: int
    answers: int = 0
    copies: int = 0
    staged: int = 0


@dataclass(frozen=True)
class Grid:
    """Blocks of a launch, and threads of a block, each of which moves 16 bytes of a tile."""

    blocks: int
    threads: int

    @property
    def warps(self) -> int:
        return self.threads // 32

    @classmethod
    def of(cls, pieces: int, threads: int, most: int) -> Grid:
        """For `pieces` of 16 bytes; one block has no more threads than it needs, in powers of two."""
        needed = max(32, 1 << (pieces - 1).bit_length())
        return cls(min(-(-pieces // threads), most), min(threads, needed))


@dataclass(frozen=True)
class Way:
    """How an implementation does an all-reduce: `threads` per block, at most `most` blocks. `divided`: each block has a
    part of every rank's shard. Other fields are as in `PublishedTime`."""

    algorithm: str
    sync: Sync | None
    threads: int
    most: int = 24
    divided: bool = False
    protocol: str = "simple"
    share: float = 1.0

    def grid(self, nbytes: int, world_size: int) -> Grid:
        pieces = -(-nbytes // 16)
        return Grid.of(-(-pieces // world_size) if self.divided else pieces, self.threads, self.most)


@dataclass(frozen=True)
class PublishedTime:
    """`nbytes` of input per rank took `time_us`.

    `share` is the part of our kernel's bytes that theirs sends (a sentinel in the data needs no flag words: half of
    `ll`), `sync` how theirs synchronize if not as ours, `grid` their launch if it is known. `calibrates` marks rows
    that gave a constant of `machines`, `held_out` those to which nothing was fitted.
    """

    source: str
    gpu: str
    world_size: int
    collective: str
    algorithm: str
    protocol: str
    nbytes: int
    time_us: float
    mode: str = "graph"
    zero_copy: bool = False
    share: float = 1.0
    calibrates: bool = False
    sync: Sync | None = None
    grid: Grid | None = None
    held_out: bool = False

    @property
    def publication(self) -> str:
        """The source without the implementation: all its rows are by one author, of one box and by one method."""
        return self.source.partition(",")[0]

    @property
    def kernel(self) -> registry.Kernel:
        """Our kernel of that shape."""
        return registry.find(self.collective, self.algorithm, self.protocol, self.zero_copy)

    @property
    def more_us(self) -> float:
        """Microseconds that their synchronization and their way of timing take more than ours."""
        events = _EVENTS if self.mode == "events" else 0.0
        if self.sync is None:
            return events
        sync, machine, times = self.sync, MACHINES[self.gpu], LATENCIES[self.gpu]
        fence = machine.barrier - machine.hop - times.us(times.l2)
        barriers = (sync.barriers - self.kernel.barriers) * machine.barrier
        moving = 2 * self.nbytes / machine.memory / 1e3
        copies = sync.copies * (times.boundary + moving) + sync.staged * (times.us(times.memory) + moving)
        return events + barriers - (sync.barriers - sync.fences) * fence + sync.answers * machine.hop + copies
