"""What one compile of a kernel is for: every compile-time constant that the shipped kernels take, in one parameter."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import MISSING, dataclass, fields
from functools import cached_property
from typing import Any

import triton.language as tl

from tricomm.kernels.dtypes import DTYPES


@dataclass(frozen=True)
class Specialization:
    """The constexpr `SPEC` of a kernel. The names are capitals, as constexprs are elsewhere in Triton.

    WORLD_SIZE   ranks of the group
    BLOCK        64-bit words of a tile; with wide words the wide words of one
    LANES        threads of a block (under the interpreter at least the largest world size)
    PTX          inline PTX for the accesses that cross GPUs; False: pure `tl`, which the interpreter runs
    LL           the protocol: True for `ll` and `ll128`, False for `simple`
    WIDE         True for `ll128`
    ALIGNED      the tensors of this rank begin at multiples of 16 bytes
    COMPACT      for at most 128 registers a thread: ranks one after another where a loop has the tiles of all of them
    ELEMENT, OP  the type that a reduction reads each element as, and its operation (`dtypes.reduction`)
    """

    WORLD_SIZE: int
    BLOCK: int
    LANES: int
    PTX: bool
    LL: bool = False
    WIDE: bool = False
    ALIGNED: bool = False
    COMPACT: bool = False
    ELEMENT: str = ""
    OP: str = ""

    @cached_property
    def PLANES(self) -> int:
        """Runs of words that a tile consists of (`device/planes.py`)."""
        return 3 if self.WIDE else 1

    @cached_property
    def PLANE(self) -> int:
        """64-bit words of a plane."""
        return self.BLOCK // 2 if self.WIDE else self.BLOCK

    @cached_property
    def TILE(self) -> int:
        """64-bit payload words of a tile."""
        return self.PLANES * self.PLANE

    @cached_property
    def BITS(self) -> int:
        """Of an element that is reduced. A bitwise operation reduces whole words, whatever the tensor's type."""
        return DTYPES[self.ELEMENT].bits

    @cached_property
    def PARTS(self) -> int:
        """Tiles of accumulator words that a tile of words makes: types narrower than 32 bits accumulate in 32."""
        return max(1, 32 // self.BITS)

    @cached_property
    def BITWISE(self) -> bool:
        return self.OP in ("band", "bor", "bxor")

    @cached_property
    def ACCUMULATOR(self) -> str:
        """The 32-bit type that narrower elements accumulate in."""
        return "float32" if "float" in self.ELEMENT else "int32"


@dataclass(frozen=True)
class CompiledSpecialization:
    """A specialization for Triton's compiler: each attribute is a `tl.constexpr`, as if it were a parameter itself."""

    plain: Specialization

    def __getattr__(self, name: str) -> tl.constexpr:
        if not name.isupper():
            raise AttributeError(name)
        return tl.constexpr(getattr(self.plain, name))


_FIELDS = frozenset(field.name for field in fields(Specialization))
_REQUIRED = frozenset(field.name for field in fields(Specialization) if field.default is MISSING)


def specialized(parameters: Collection[str], constexprs: Mapping[str, Any], compiled: bool = False) -> dict[str, Any]:
    """`constexprs` as a kernel with these parameters takes them: for a shipped one, all that make its `SPEC` in one."""
    if "SPEC" not in parameters or "SPEC" in constexprs or not constexprs.keys() >= _REQUIRED:
        return dict(constexprs)  # a user's kernel may have a SPEC of its own
    spec = Specialization(**{name: value for name, value in constexprs.items() if name in _FIELDS})
    others = {name: value for name, value in constexprs.items() if name not in _FIELDS}
    return others | {"SPEC": CompiledSpecialization(spec) if compiled else spec}
