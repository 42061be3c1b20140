"""How one computing instruction becomes numpy code."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Rule:
    """`template` is a Python expression over arrays (or numpy scalars) of one element a thread.

    inputs      numpy types of the source operands, in the order of `form.sources`: "u4", "i8", "f4", "?" (a
                predicate), "f2" for .f16, "u2" for .bf16, "u4" for packed halves, "u8" for .f32x2, "V16" for .b128;
                the caller views registers as these, and turns literals into scalars (`form.literal`). A literal may
                have another width than a register would have at its place
    outputs     of the destinations, in the order of `form.destinations`; with more than one the expression gives a
                tuple, in which None may stand for a destination `_`
    template    names the inputs `{0}`, `{1}`, ..., then the constants; may call any function of
                `arithmetic.FUNCTIONS`. An input need not occur in it
    constants   numpy scalars, numbered after the inputs
    either      a type, as "u4": all inputs and outputs of this type may be read as their signed counterpart
                instead (all or none), because the operation is the same; None: only as declared

    The expression must be right for 0-dimensional values too, must not change its inputs, and gives exactly the
    declared type for arrays of the declared inputs. Arrays are contiguous, in and out. The expression may give one of
    its inputs itself.
    """

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    template: str
    constants: tuple[np.generic, ...] = ()
    either: str | None = None
