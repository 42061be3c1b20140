"""A tuning request has points; a point is one decision, and a candidate one of its possible outcomes."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from tricomm.core.fused.fused_call import FUSED
from tricomm.errors import InvalidArgument
from tricomm.kernels import collective_specs
from tricomm.kernels.collectives import registry
from tricomm.kernels.layout import Layout
from tricomm.perf import parsing
from tricomm.perf.row_calls import RowForm
from tricomm.perf.units import DATA_COLLECTIVES
from tricomm.policy import row_shapes
from tricomm.policy.launch_shapes import COMPACT_REGISTERS, LARGEST_LL_WARPS, MOST_REGISTERS
from tricomm.policy.tuning_tables import TableRow

# Not all_to_all_v: no rank knows what the others send, so its choice does not depend on a size.
TUNABLE = tuple(name for name in DATA_COLLECTIVES if name != "all_to_all_v")
DTYPES = {8: "int8", 16: "bfloat16", 32: "float32", 64: "float64"}  # the type that is measured for a width
MODES = ("eager", "graph")
_WIDTHS = tuple(str(bits) for bits in DTYPES)
_BLOCKS = (1, 2, 4, 8, 16, 32, 64)
_WARPS = (1, 2, 4, 8, 16)
# Words of a tile for a warp: one, two or more a thread. Plain data is moved 16 bytes a thread, and a tile of wide words
# is loaded in planes of half of it.
_WORDS_PER_WARP = {"ll": (32, 64, 128), "ll128": (64, 128), "simple": (64, 128, 256)}
_CPU_TILES = (1024, 2048, 4096, 8192)


PointGroup = tuple[str, int, str, bool, str, str]


@dataclass(frozen=True)
class Point:
    """One decision. `nbytes` is the input per rank, `bits` an element's width if it is reduced, else 0. `beside`: for
    groups whose calls run next to other kernels. `epilogue`: of an all_reduce_rms_norm, as `norm@8192`. `wire`: for
    groups with `Options(wire=)`."""

    collective: str
    bits: int
    mode: str
    nbytes: int
    beside: bool = False
    epilogue: str = ""
    wire: str = ""

    @property
    def group(self) -> PointGroup:
        """The same for points that differ in size only."""
        return self.collective, self.bits, self.mode, self.beside, self.epilogue, self.wire

    @property
    def name(self) -> str:
        """`all_reduce 16 bit eager 1024 B`."""
        width = "".join(f" {word}" for word in (f"{self.bits} bit" * bool(self.bits), self.epilogue, self.wire) if word)
        return f"{self.collective}{width} {self.mode} {self.nbytes} B"

    @property
    def dtype(self) -> str:
        """The type that is measured."""
        return DTYPES[self.bits or 32]


@dataclass(frozen=True, order=True)
class Candidate:
    """One way to run a call: `blocks` of `warps` each, with tiles of `tile` 64-bit words."""

    algorithm: str
    protocol: str
    blocks: int
    warps: int
    tile: int
    registers: int = MOST_REGISTERS

    @property
    def family(self) -> tuple[str, str]:
        """The same for candidates that differ in shape only."""
        return self.algorithm, self.protocol

    def row(self, point: Point, world_size: int, max_bytes: int | None, min_bytes: int = 0) -> TableRow:
        """The row of a table that chooses this candidate."""
        shape = (self.blocks, self.warps, self.tile)
        return TableRow(
            point.collective,
            world_size,
            max_bytes,
            self.algorithm,
            self.protocol,
            point.mode,
            point.bits or None,
            *shape,
            registers=self.registers if point.beside else None,
            beside=point.beside or None,
            epilogue=point.epilogue or None,
            min_bytes=min_bytes,
            wire=point.wire or None,
        )

    def __str__(self) -> str:
        few = f", {self.registers} registers" if self.registers < MOST_REGISTERS else ""
        return f"{self.algorithm}/{self.protocol} {self.blocks}x{self.warps} tile {self.tile}{few}"


def points(
    names: tuple[str, ...],
    bits: tuple[int, ...],
    modes: tuple[str, ...],
    sizes: tuple[int, ...],
    beside: bool = False,
    wire: str = "",
) -> list[Point]:
    """Every decision to make. A collective that only moves data has the same one for every type."""
    return [
        Point(name, width, mode, size, beside, wire=wire)
        for name in names
        for width in (bits if collective_specs.COLLECTIVES[name].reduces else (0,))
        for mode in modes
        for size in sorted(set(sizes))
    ]


def fused_points(
    forms: tuple[RowForm, ...], bits: tuple[int, ...], modes: tuple[str, ...], sizes: tuple[int, ...]
) -> list[Point]:
    """The same for all_reduce_rms_norm: sizes of whole rows, without those that are too large to be fused."""
    made = [
        Point(FUSED, width, mode, form.rows(size, width // 8) * form.hidden * width // 8, epilogue=form.name)
        for form in forms
        for width in bits
        if width in (16, 32)
        for mode in modes
        for size in sorted(set(sizes))
    ]
    return [point for point in dict.fromkeys(made) if point.nbytes <= row_shapes.MOST_FUSED]


def pool(
    kernels: list[registry.Kernel], layout: Layout, max_blocks: int, cpu: bool, few: bool = False
) -> list[Candidate]:
    """Every shape of every kernel. On a GPU a tile spans all threads of a block; a CPU has no warps. `few`: shapes with
    128 registers a thread, and with no more LL words than a kernel's compact form takes."""
    registers = COMPACT_REGISTERS if few else MOST_REGISTERS
    made = []
    for kernel in kernels:
        shapes = [(w, w * words) for w in _WARPS for words in _WORDS_PER_WARP[kernel.protocol]]
        if few and kernel.protocol == "ll":
            shapes = [(w, w * 32) for w in _WARPS if w <= LARGEST_LL_WARPS]
        made += [
            Candidate(kernel.algorithm, kernel.protocol, blocks, warps, tile, registers)
            for blocks in _BLOCKS
            if blocks <= max_blocks and not (cpu and blocks > 2)
            for warps, tile in ([(8, tile) for tile in _CPU_TILES] if cpu else shapes)
            if tile <= layout.largest_tile(kernel.algorithm, kernel.protocol)
        ]
    return made


def neighbours(candidate: Candidate) -> Iterator[Candidate]:
    """Shapes one step away, which need not all exist."""
    # Changing warps and tile together keeps the words per thread.
    for names in (("blocks",), ("warps",), ("tile",), ("warps", "tile")):
        values = [getattr(candidate, name) for name in names]
        yield replace(candidate, **{name: value // 2 for name, value in zip(names, values, strict=True)})
        yield replace(candidate, **{name: value * 2 for name, value in zip(names, values, strict=True)})


@dataclass(frozen=True)
class TuningRequest:
    """A request for a tuning run, checked before anything is started.

    `budget` and `timeout` (of a call) are in seconds; the budget ends at `end` of `time.monotonic`. An empty `modes`
    means all modes of the device. `beside`: for groups with `Options(beside_compute=True)`, among the shapes that these
    may have. `wire`: for groups with that option. `forms` are the rows of an all_reduce_rms_norm.
    """

    collectives: tuple[str, ...]
    bits: tuple[int, ...]
    sizes: tuple[int, ...]
    modes: tuple[str, ...] = ()
    budget: float = 300.0
    end: float = math.inf
    simulated: bool = False
    device: str = "auto"
    timeout: float = 60.0
    beside: bool = False
    forms: tuple[RowForm, ...] = ()
    wire: str = ""

    def points(self, cpu: bool) -> list[Point]:
        """Every decision to make; with `cpu` for ranks on a CPU, which has no graphs."""
        modes = self.modes or (MODES[:1] if cpu else MODES)
        plain = tuple(name for name in self.collectives if name != FUSED)
        fused = self.forms if FUSED in self.collectives and not self.beside else ()
        return [
            *points(plain, self.bits, modes, self.sizes, self.beside, self.wire),
            *fused_points(fused, self.bits, modes, self.sizes),
        ]

    def key(self, *facts: object) -> str:
        """Names a run by the request and `facts`; not by the budget, because a run may continue with another one."""
        asked = (self.collectives, self.bits, self.sizes, self.modes, self.beside, self.forms, self.wire, facts)
        return hashlib.sha256(repr(asked).encode()).hexdigest()[:16]


def parse(collective: str, bits: str, sizes: str, mode: str | None, budget: str, **rest: Any) -> TuningRequest:
    """A request of comma lists (or `all`, which is without the fused calls). Raises `InvalidArgument` with the nearest
    names, and if there is nothing to tune."""
    known = TUNABLE if collective == "all" else (*TUNABLE, FUSED)
    request = TuningRequest(
        parsing.parse_names(collective, known, "collective"),
        tuple(int(width) for width in parsing.parse_names(bits, _WIDTHS, "bits")),
        parsing.parse_sizes(sizes),
        parsing.parse_names(mode, MODES, "mode") if mode else (),
        parsing.parse_budget(budget),
        **rest,
    )
    if request.wire and (request.collectives != ("all_reduce",) or not {16, 32}.issuperset(request.bits)):
        raise InvalidArgument(
            f"--wire {request.wire}: only all_reduce of 16 or 32 bits is quantised; ask for that alone"
        )
    if request.wire and request.beside:
        raise InvalidArgument(f"--wire {request.wire}: no kernel that quantises leaves room for others")
    if FUSED in request.collectives and request.beside:
        raise InvalidArgument(f"{FUSED}: no fused kernel leaves room for others; leave --beside-compute out")
    if not request.points(cpu=False):
        raise InvalidArgument(
            f"{FUSED}: nothing to tune at these widths and sizes; fused calls have 16 or 32 bits and "
            f"{row_shapes.MOST_FUSED} bytes at most"
        )
    return request
