"""The names in a kernel's text: registers, variables and labels of nested scopes, and special registers."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from tricomm.explorer.ptx.instructions import Register, Symbol

_NUMBERED = re.compile(r"(.*?)(\d+)$")
_SPECIAL = re.compile(
    r"%(?:(?:tid|ntid|ctaid|nctaid|clusterid|nclusterid|cluster_ctaid|cluster_nctaid)(?:\.[xyzw])?"
    r"|laneid|warpid|nwarpid|smid|nsmid|gridid|cluster_ctarank|cluster_nctarank|is_explicit_cluster"
    r"|lanemask_(?:eq|le|lt|ge|gt)|clock|clock_hi|clock64|pm\d(?:_64)?|envreg\d+|globaltimer(?:_lo|_hi)?"
    r"|reserved_smem_offset_\w+|total_smem_size|aggr_smem_size|dynamic_smem_size|current_graph_exec)"
)


def is_special(name: str) -> bool:
    """True if `name` is a special register, including its component, such as `%tid.x`."""
    return _SPECIAL.fullmatch(name) is not None


@dataclass
class Scope:
    """The names declared within one pair of braces. `number` is 0 for the kernel's own scope. Names of an inner scope
    end with `@` and its number.

    counted     `%r` -> (kind, count) of `.reg .b32 %r<160>`
    vectors     `%v` -> `%v.x`, `%v.y`, ... of `.reg .v4 .b32 %v`
    variables   name -> unique name
    labels      name -> unique name
    """

    number: int
    outer: Scope | None = None
    registers: dict[str, Register] = field(default_factory=dict)
    counted: dict[str, tuple[str, int]] = field(default_factory=dict)
    vectors: dict[str, tuple[Register, ...]] = field(default_factory=dict)
    variables: dict[str, str] = field(default_factory=dict)
    labels: dict[str, str] = field(default_factory=dict)

    def unique(self, name: str) -> str:
        return f"{name}@{self.number}" if self.number else name

    def register(self, name: str) -> Register | None:
        """The register `name` of this scope or of a scope around it, or None."""
        for scope in self._outwards():
            if name in scope.vectors:
                return None
            if (declared := scope.registers.get(name) or scope._of_a_range(name)) is not None:
                return declared
        return None

    def vector(self, name: str) -> tuple[Register, ...] | None:
        """The elements of the vector `name` of this scope or of a scope around it, or None."""
        return next((scope.vectors[name] for scope in self._outwards() if name in scope.vectors), None)

    def symbol(self, name: str) -> Symbol | None:
        """The variable or parameter `name`, or None."""
        return next((Symbol(scope.variables[name]) for scope in self._outwards() if name in scope.variables), None)

    def label(self, name: str) -> str | None:
        """The unique name of the label `name`, or None."""
        return next((scope.labels[name] for scope in self._outwards() if name in scope.labels), None)

    def _outwards(self) -> Iterator[Scope]:
        """This scope and those around it."""
        scope: Scope | None = self
        while scope is not None:
            yield scope
            scope = scope.outer

    def _of_a_range(self, name: str) -> Register | None:
        match = _NUMBERED.match(name) if self.counted else None
        # `%r10` may be a register of `%r<20>` or of `%r1<2>`, so every split of the digits is tried.
        for end in range(len(match[1]), len(name)) if match else ():
            kind, count = self.counted.get(name[:end], ("", 0))
            if int(name[end:]) < count and str(int(name[end:])) == name[end:]:
                declared = Register(self.unique(name), kind)
                self.registers[name] = declared
                return declared
        return None
