"""Every shipped kernel, compiled, under 200 schedules: the cases, and a record of those that have passed.

An access takes about 0.7 ms, however many bytes it moves. So the calls are the smallest ones that take every path:

* Chunks. The first call has one word more than fills the kernel's buffers, so its loop over chunks goes round twice,
  and the buffers of both parities are used. The third call uses the first chunk's buffers again.
* Tiles. A full chunk has about four, of two blocks: their loops go round twice. The second chunk is part of one tile,
  so one block has a partial tile, and the other one none; so is the call of one word.
* Ranks and warps. Most schedules have two ranks and one warp a block; the others three ranks and two warps. Races are
  found by thread, so a missing barrier between warps shows as a race between lanes of one warp. Under three ranks
  loops over peers go round twice, and two peers store to one rank.
* Accesses. Where a thread has several words of a tile they are moved 16 bytes at a time, as in a GPU's own tiles.

A kernel of a cube mesh has eight ranks, and rows of a model one tile or two: their calls are shorter than a chunk. A
kernel over symmetric memory has no chunks: two calls use one handle. Messages are sent until slots are reused.
"""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from unittest.mock import patch

import triton

import tricomm
from tests.explorer.compiled import ptx_mutants
from tests.passed_record import PassedRecord
from tricomm.explorer import Report, shipped
from tricomm.kernels import layout
from tricomm.kernels.collectives import registry
from tricomm.kernels.collectives.registry import Kernel
from tricomm.options import Options, Tuning
from tricomm.policy import launch_shapes

KERNELS = shipped.kernels(None, None, None)
_TILES = 4  # a chunk
_ON_A_HANDLE = 132  # words, which no buffer holds


@dataclass(frozen=True)
class Case:
    """Calls of one kernel: the numbers of ranks, blocks and warps, and of schedules of each strategy."""

    kernel: Kernel
    world_size: int
    warps: int
    schedules: int

    @property
    def name(self) -> str:
        return f"{self.kernel.name} of {self.world_size} ranks, {self.warps} warps, {2 * self.schedules} schedules"

    @property
    def options(self) -> Options:
        blocks = 1 if self.kernel.needs_cube else 2
        return Options(
            arena_bytes=self._arena_bytes, stall_timeout=600.0, _tuning=Tuning(blocks=blocks, tile=self.tile)
        )

    @property
    def tile(self) -> int:
        if self.kernel.needs_cube or self.kernel.zero_copy or self.kernel in registry.FUSED:
            return self._least
        wanted = min(self._chunk // _TILES, self._largest(self._memory))
        return max(self._least, 1 << (wanted.bit_length() - 1))

    @property
    def sizes(self) -> tuple[int, ...]:
        """Words of each call."""
        if self.kernel.needs_cube:
            return (36, 1)
        if self.kernel.zero_copy:
            return (_ON_A_HANDLE, _ON_A_HANDLE, 1)
        if self.kernel.pairwise:
            return (self._chunk + 1, 1, 36, 1, self._chunk + 1)
        return (self._chunk + 1, 1, 36)

    @property
    def _memory(self) -> layout.Layout:
        return layout.plan(self.world_size, self._arena_bytes)

    @property
    def _arena_bytes(self) -> int:
        """The smallest arena that has room for a word a thread."""
        nbytes = shipped.options(self.world_size, compiled="sm_90", kernel=self.kernel).arena_bytes
        while self._largest(layout.plan(self.world_size, nbytes)) < self._least:
            nbytes *= 2
        return nbytes

    @property
    def _least(self) -> int:
        return launch_shapes.WORDS_PER_WARP * self.kernel.words_per_thread * self.warps

    def _largest(self, memory: layout.Layout) -> int:
        if self.kernel.pairwise:
            return memory.slot_words(self.kernel.protocol)
        return memory.largest_tile(self.kernel.algorithm, self.kernel.protocol)

    @property
    def _chunk(self) -> int:
        """Words that fill the buffers of the kernel; of a shard if it has shards."""
        memory, kernel = self._memory, self.kernel
        if kernel.pairwise:
            return memory.slot_words(kernel.protocol)
        words = memory.buffer_words(kernel.algorithm, kernel.protocol, kernel.collective)
        return words * (self.world_size if kernel.staged else 1)

    def check(self, architecture: str, schedules: int, strategy: str) -> Report:
        body = shipped.body(self.kernel, self.sizes)
        with patch.object(launch_shapes, "GPU_WARPS", self.warps):
            return tricomm.check(
                body, self.world_size, schedules, strategy, options=self.options, compiled=architecture
            )


def cases(kernel: Kernel) -> tuple[Case, ...]:
    """200 schedules."""
    if kernel.needs_cube:
        return (Case(kernel, registry.CUBE_RANKS, 1, 100),)
    return Case(kernel, 2, 1, 90), Case(kernel, 3, 2, 10)


def passes(case: Case, architecture: str, record: PassedRecord) -> None:
    """Run the schedules of `case`; only the first one if the same instructions have passed already, compiled by another
    version of Triton or for another architecture."""
    reports: list[Report] = []

    def run(schedules: int, strategy: str) -> None:
        reports.append(case.check(architecture, schedules, strategy))
        assert reports[-1].ok, f"{case.kernel.name} on {architecture}, Triton {triton.__version__}: {reports[-1]}"

    texts = ptx_mutants.launched(lambda: run(1, "random"))
    plain = [ptx_mutants.instructions(text) for result in texts.values() for text in result]
    same = {"case": case.name, "instructions": _digest(plain)}
    for strategy in () if record.has(**same) else ("random", "pct"):
        run(case.schedules, strategy)
    facts = {"seconds": round(sum(report.seconds for report in reports), 1), "ran": sum(r.ran for r in reports)}
    record.add(same, architecture=architecture, **facts)


def _digest(texts: Iterable[str]) -> str:
    return hashlib.sha256("\n\n".join(sorted(texts)).encode()).hexdigest()[:16]
