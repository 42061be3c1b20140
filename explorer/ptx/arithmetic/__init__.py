"""Computing instructions as numpy code, exact to the bit.

Some behaviour that PTX leaves open is fixed here. Integer division by zero returns all ones, and its remainder is the
dividend. `.approx` and `.full` return the correctly rounded value, or a rounded double. A NaN of type double has the
bits that the host computes.
"""

from __future__ import annotations

from tricomm.errors import InvalidArgument
from tricomm.explorer.ptx.arithmetic import compare, conversion, floating, integer, logic, move, packed, pairs, permute
from tricomm.explorer.ptx.arithmetic.form import CARRY, Form, Rule, destinations, literal, sources
from tricomm.explorer.ptx.arithmetic.functions import FUNCTIONS
from tricomm.explorer.ptx.instructions import Instruction, PtxKernel

__all__ = ["CARRY", "FUNCTIONS", "OPCODES", "Rule", "destinations", "literal", "refuse", "rule", "sources", "unknown"]

_PARTS = (integer, logic, compare, move, permute, floating, packed, conversion, pairs)
# The opcodes that only compute. `rule` has a rule for each.
OPCODES = frozenset(
    "add sub mul mad addc subc madc div rem abs neg min max popc clz brev and or xor not shl shr shf bfe bfi lop3 "
    "prmt setp set selp mov cvt copysign fma sqrt rcp rsqrt ex2 lg2 sin cos tanh".split()
)


def rule(instruction: Instruction) -> Rule | None:
    """The rule of an instruction; None if it does not compute. The caller handles the guard.

    Raises `InvalidArgument` for a form of a computing instruction that is not known.
    """
    if instruction.opcode not in OPCODES:
        return None
    its_rule = _rule(instruction)
    if its_rule is None:
        raise refuse(instruction)
    return its_rule


def _rule(instruction: Instruction) -> Rule | None:
    if not instruction.operands:
        return None
    for part in _PARTS:
        form = Form(instruction)
        candidate: Rule | None = part.rule(form)
        if candidate is not None and form.fits(candidate):
            return candidate
    return None


def unknown(kernel: PtxKernel) -> list[Instruction]:
    """The computing instructions of a kernel that no rule covers."""
    return [i for i in kernel.instructions if i.opcode in OPCODES and _rule(i) is None]


def refuse(instruction: Instruction, kernel: str = "") -> InvalidArgument:
    """The error for an instruction that is not known."""
    place = f"{instruction.source[0].file}:{instruction.source[0].line}, " if instruction.source else ""
    named = f" of kernel {kernel}" if kernel else ""
    return InvalidArgument(
        f"{place}PTX line {instruction.line}{named}: `{instruction.text.strip()}` is not an instruction that can be "
        "executed here"
    )
