"""All compile-time constants of the shipped kernels, in one parameter."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import MISSING, dataclass, fields
from functools import cached_property
from typing import Any

import triton.language as tl

from tricomm.kernels import multimem
from tricomm.kernels.dtypes import DTYPES

PER_GROUP = "fp8_per_"  # followed by the number of elements that share a scale


@dataclass(frozen=True)
class Specialization:
    """The constexpr `SPEC` of a kernel. The names are capitals, as constexprs are elsewhere in Triton.

    WORLD_SIZE   ranks of the group
    BLOCK        64-bit words of a tile; with wide words the wide words of one
    LANES        threads of a block (under the interpreter at least the largest world size)
    PTX          inline PTX for the accesses that cross GPUs; False: pure `tl`, which the interpreter runs
    LL           the protocol: True for `ll` and `ll128`, False for `simple`
    WIDE         True for `ll128`
    SWITCH       the NVLink switch moves the data, by multicast addresses
    ALIGNED      the tensors of this rank begin at multiples of 16 bytes
    COMPACT      for at most 128 registers a thread: loops handle the tiles of the ranks one after another
    DEPENDENT    a dependent launch (`device/dependent_launch.py`)
    ELEMENT, OP  the type that a reduction reads each element as, and its operation (`dtypes.reduction`)
    WIRE, GATHER the codes of an all-reduce that quantises on the links (`device/wire.py`): fp8 or int8, else empty; and
                 whether it quantises only the second leg

    Of an all-reduce of rows with an epilogue (`device/rows.py`):
    HIDDEN       elements of a row, a multiple of 8
    SHARDS       equal parts of a row: one a rank if two shots reduce it
    OPERANDS     Triton's types of the epilogue's operands besides the row
    EPILOGUE     the device function that takes a reduced row; PREPARE runs before the row has arrived
    PROLOGUE     the device function that computes the rows to send; None: the rows of the input are sent
    TOP_K        rows that `device/expert_rows.py` sums for a token; 0: known only at run time
    WEIGHT, BIASED, RESIDUAL, NORM, QUANTIZE, SWIZZLED    of RMSNorm (`device/epilogue.py`): type of the weight, whether
                 something is added to it, whether there is a residual, whether the norm is written, the quantisation,
                 and whether its scales are in tiles
    """

    WORLD_SIZE: int
    BLOCK: int
    LANES: int
    PTX: bool
    LL: bool = False
    WIDE: bool = False
    SWITCH: bool = False
    ALIGNED: bool = False
    COMPACT: bool = False
    DEPENDENT: bool = False
    ELEMENT: str = ""
    OP: str = ""
    WIRE: str = ""
    GATHER: bool = False
    HIDDEN: int = 0
    SHARDS: int = 1
    OPERANDS: tuple[str, ...] = ()
    EPILOGUE: Any = None
    PREPARE: Any = None
    PROLOGUE: Any = None
    TOP_K: int = 0
    WEIGHT: str = ""
    BIASED: bool = False
    RESIDUAL: bool = False
    NORM: bool = False
    QUANTIZE: str = ""
    SWIZZLED: bool = False

    @cached_property
    def PLANES(self) -> int:
        """The number of planes of a tile in a mailbox (`device/planes.py`)."""
        return 3 if self.WIDE else 1

    @cached_property
    def PLANE(self) -> int:
        """64-bit words of a plane."""
        return self.BLOCK // 2 if self.WIDE else self.BLOCK

    @cached_property
    def TILE(self) -> int:
        """64-bit words of a tensor that a tile carries."""
        return self.PLANES * self.CODED * self.PLANE

    @cached_property
    def ROWS_AT_ONCE(self) -> bool:
        """Whether a tile of each rank's row fits into registers, so that they are loaded together."""
        return self.WIDE and self.WORLD_SIZE <= 4

    @cached_property
    def BITS(self) -> int:
        """Bits of an element that is reduced. Bitwise operations reduce whole words, for any type of the tensor."""
        return DTYPES[self.ELEMENT].bits

    @cached_property
    def PARTS(self) -> int:
        """Tiles of accumulator words for a tile of words: types narrower than 32 bits accumulate in 32."""
        return max(1, 32 // self.BITS)

    @cached_property
    def BITWISE(self) -> bool:
        return self.OP in ("band", "bor", "bxor")

    @cached_property
    def LOAD_REDUCED(self) -> str:
        """PTX that has the switch reduce two words."""
        return multimem.instruction(self.ELEMENT, self.OP)

    @cached_property
    def ACCUMULATOR(self) -> str:
        """The 32-bit type that narrower elements accumulate in."""
        return "float32" if "float" in self.ELEMENT else "int32"

    @cached_property
    def PACK(self) -> int:
        """Elements of a word."""
        return 64 // self.BITS

    # Quantised on the links

    @cached_property
    def CODED(self) -> int:
        """Words of a tensor that a word of a tile carries: of codes several."""
        return self.BITS // 8 if self.WIRE else 1

    @cached_property
    def SCALES(self) -> int:
        """Scales of the codes in a word (`device/wire.py`)."""
        return self.CODED // 2 if self.LL else self.CODED

    @cached_property
    def SHARED(self) -> int:
        """Words of codes, neighbours, that share their scales: of 128 elements for each scale."""
        return 16 * self.SCALES

    @cached_property
    def UNIT(self) -> int:
        """Words of a tensor that have 128 elements."""
        return 128 // self.PACK

    @cached_property
    def BLOCKS(self) -> int:
        """Runs of SHARED words in a plane."""
        return self.PLANE // self.SHARED

    @cached_property
    def ROOM(self) -> int:
        """64-bit words of a tile of codes in a mailbox, with its scales: a multiple of 16 bytes."""
        if self.LL:
            return 2 * (self.BLOCK + self.BLOCKS)
        return self.BLOCK + max(2, self.SCALES * self.BLOCKS // 4)

    @cached_property
    def LOADED(self) -> int:
        """Ranks whose tiles of a tensor are loaded at once: more would spill."""
        if self.LL:
            return 4 if self.CODED == 2 or self.WORLD_SIZE <= 4 else 2
        return 8 if self.CODED == 2 else 2

    @cached_property
    def FIRST_ROOM(self) -> int:
        """Words of a tile of the first leg."""
        return self.TILE if self.GATHER else self.ROOM

    # Rows with an epilogue

    @cached_property
    def ROW(self) -> int:
        """Words of a row."""
        return self.HIDDEN * self.BITS // 64

    @cached_property
    def SHARD(self) -> int:
        """Words of a row's shard. Each begins at a multiple of 16 bytes, and with a block of elements that share a
        scale."""
        unit = max(2, self.SCALED)
        return -(-self.ROW // (unit * self.SHARDS)) * unit

    @cached_property
    def STEPS(self) -> int:
        """Tiles of a shard."""
        return -(-self.SHARD // self.TILE)

    @cached_property
    def PITCH(self) -> int:
        """Words that a shard takes in a mailbox: whole tiles."""
        return self.STEPS * self.TILE

    @cached_property
    def ROW_TILES(self) -> int:
        return self.SHARDS * self.STEPS

    @cached_property
    def STARTS(self) -> tuple[int, ...]:
        """The first word of each of a row's tiles."""
        return tuple(i % self.SHARDS * self.SHARD + i // self.SHARDS * self.TILE for i in range(self.ROW_TILES))

    @cached_property
    def LEFTS(self) -> tuple[int, ...]:
        """For each tile, the words from its first to the end of its shard; 0 if the row ends before it."""
        ends = (min((i % self.SHARDS + 1) * self.SHARD, self.ROW) for i in range(self.ROW_TILES))
        return tuple(max(0, end - start) for start, end in zip(self.STARTS, ends, strict=True))

    @cached_property
    def TOGETHER(self) -> int:
        """Steps of a shard whose tiles are polled at once: eight tiles over all ranks, or one step."""
        return max(n for n in range(1, max(1, 8 // self.WORLD_SIZE) + 1) if self.STEPS % n == 0)

    @cached_property
    def WHOLE(self) -> bool:
        """Whether every tile of a row is full."""
        return self.SHARDS * self.PITCH == self.ROW

    @cached_property
    def ROW_PLANES(self) -> int:
        return self.ROW_TILES * self.PLANES

    @cached_property
    def FIRSTS(self) -> tuple[int, ...]:
        """The first word of each of a row's planes."""
        return tuple(start + k * length for start, length in self._planes for k in range(self.PLANES))

    @cached_property
    def LENGTHS(self) -> tuple[int, ...]:
        """Words of each of a row's planes."""
        lefts = zip(self.LEFTS, self._planes, strict=True)
        return tuple(max(0, min(n, left - k * n)) for left, (_, n) in lefts for k in range(self.PLANES))

    @cached_property
    def _planes(self) -> list[tuple[int, int]]:
        """For each tile of a row: its first word, and the words of its planes (`wide_words.plane_words`)."""
        most = [min(-(-left // 6) * 2 if self.WIDE else left, self.PLANE) for left in self.LEFTS]
        return list(zip(self.STARTS, most, strict=True))

    @cached_property
    def GROUP(self) -> int:
        """Elements that share a scale, if a row has several scales: 16 for nvfp4, N for fp8_per_N."""
        return 16 if self.QUANTIZE == "nvfp4" else group_of(self.QUANTIZE)

    @cached_property
    def SCALED(self) -> int:
        """Words of the elements that share a scale."""
        return self.GROUP * self.BITS // 64

    @cached_property
    def EARLY(self) -> bool:
        """Whether an epilogue's operands are loaded before the row has arrived; only if the registers can hold all of
        them."""
        return self.ROW_PLANES * self.PLANE <= (16 if self.LANES <= 256 else 8) * self.LANES

    @cached_property
    def AT_ONCE(self) -> int:
        """Tiles whose operands an epilogue loads together. More need more registers; fewer wait more often."""
        return self.ROW_TILES if self.EARLY else 4 // self.PLANES

    @cached_property
    def OWNED(self) -> int:
        """The number of adjacent tiles of a mailbox that a block owns."""
        return self.STEPS if self.HIDDEN else 1


def group_of(quantize: str | None) -> int:
    """N for fp8_per_N, the elements that share a scale; 0 for another quantisation."""
    number = (quantize or "").removeprefix(PER_GROUP)
    return int(number) if number.isdecimal() else 0


@dataclass(frozen=True)
class CompiledSpecialization:
    """A specialization for Triton's compiler: each attribute is a `tl.constexpr`, like a parameter."""

    plain: Specialization

    @property
    def cache_key(self) -> str:
        """Its key in Triton's cache. It includes the source of its functions, because Triton only finds functions that
        are names of the kernel's module."""
        functions = (self.plain.EPILOGUE, self.plain.PREPARE, self.plain.PROLOGUE)
        return repr(self) + "".join(function.cache_key for function in functions if function is not None)

    def __getattr__(self, name: str) -> tl.constexpr:
        if not name.isupper():
            raise AttributeError(name)
        return tl.constexpr(getattr(self.plain, name))


_FIELDS = frozenset(field.name for field in fields(Specialization))
_REQUIRED = frozenset(field.name for field in fields(Specialization) if field.default is MISSING)


def specialized(parameters: Collection[str], constexprs: Mapping[str, Any], compiled: bool = False) -> dict[str, Any]:
    """`constexprs` in the form that a kernel with these parameters takes; for a shipped kernel one `SPEC`."""
    if "SPEC" not in parameters or "SPEC" in constexprs or not constexprs.keys() >= _REQUIRED:
        return dict(constexprs)  # a user's kernel may have another SPEC
    spec = Specialization(**{name: value for name, value in constexprs.items() if name in _FIELDS})
    others = {name: value for name, value in constexprs.items() if name not in _FIELDS}
    return others | {"SPEC": CompiledSpecialization(spec) if compiled else spec}
