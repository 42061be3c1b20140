"""How one computing instruction becomes numpy code."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Rule:
    """`template` is a Python expression over arrays (or numpy scalars) of one element a thread.

    inputs      numpy types of the source operands, in order: "u4", "i8", "f4", "?" (a predicate), "f2" for .f16,
                "u2" for .bf16 and packed halves are "u4"; the caller views registers as these, and makes scalars of
                literals
    outputs     of the destinations; with more than one the expression gives a tuple
    template    names the inputs `{0}`, `{1}`, ...; may call any function of `arithmetic.FUNCTIONS`

    The expression must be right for 0-dimensional values too, must not change its inputs, and gives exactly the
    declared type for arrays of the declared inputs.
    """

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    template: str
