"""Python code for integer instructions whose operands are numbers: equal in all lanes, or with a constant step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tricomm.explorer.ptx.generated.lane_shapes import LaneShape, anything, literal, ranged, uniform
from tricomm.explorer.ptx.instructions import WIDTHS, Instruction, Register
from tricomm.explorer.ptx.operations.memory_calls import window_of

_COMPARE = {
    "eq": "==",
    "ne": "!=",
    "lt": "<",
    "le": "<=",
    "gt": ">",
    "ge": ">=",
    "lo": "<",
    "ls": "<=",
    "hi": ">",
    "hs": ">=",
}
_INTEGER = ("b8", "u8", "s8", "b16", "u16", "s16", "b32", "u32", "s32", "b64", "u64", "s64")


@dataclass(frozen=True, slots=True)
class NumberCode:
    """The `code` for lane 0's unsigned value of a result, which names the operands `{0}`, `{1}`, ... For a predicate it
    is a bool, or an array if `shape.stride` is None."""

    shape: LaneShape
    code: str


Sources = tuple[LaneShape, ...]


def number_code(instruction: Instruction, sources: Sources, lanes: int) -> NumberCode | None:
    """The code for an instruction. None if it has to be computed lane by lane, or by its general rule."""
    plan = _PLANS.get(instruction.opcode)
    known = all(s.stride is not None or s.flag or s.width == 1 for s in sources)
    if plan is None or not known:
        return None
    return plan(instruction, sources, lanes)


def _type(instruction: Instruction) -> str | None:
    """The integer type in the last modifier; None if the last modifier is something else."""
    last = instruction.modifiers[-1] if instruction.modifiers else ""
    return last if last in _INTEGER else None


def _signed(code: str, width: int) -> str:
    return f"(({code}^{1 << (width - 1)})-{1 << (width - 1)})"


def _plain(*shapes: LaneShape) -> bool:
    return all(s.stride is not None for s in shapes)


def _mov(instruction: Instruction, sources: Sources, lanes: int) -> NumberCode | None:
    return NumberCode(sources[0], "{0}") if len(sources) == 1 else None


def _add(instruction: Instruction, sources: Sources, lanes: int) -> NumberCode | None:
    kind = _type(instruction)
    if kind is None or len(instruction.modifiers) > 1 or not _plain(*sources):
        return None
    return _sum(sources[0], sources[1], WIDTHS[kind], "+" if instruction.opcode == "add" else "-")


def _sum(a: LaneShape, b: LaneShape, width: int, sign: str) -> NumberCode:
    assert a.stride is not None and b.stride is not None
    mask = (1 << width) - 1
    zeros = min(a.zeros, b.zeros)
    if sign == "+":
        shape = ranged(width, a.stride + b.stride, a.low + b.low, a.high + b.high, zeros)
        if b.constant and b.low >> (width - 1):
            less = (1 << width) - b.low
            shape = ranged(width, a.stride, a.low - less, a.high - less, zeros)
    else:
        shape = ranged(width, a.stride - b.stride, a.low - b.high, a.high - b.low, zeros)
    return NumberCode(shape, f"({{0}}{sign}{{1}}&{mask})")


def _neg(instruction: Instruction, sources: Sources, lanes: int) -> NumberCode | None:
    kind = _type(instruction)
    (a,) = sources
    if kind is None or a.stride is None:
        return None
    width = WIDTHS[kind]
    return NumberCode(ranged(width, -a.stride, -1, 0, a.zeros), f"(-{{0}}&{(1 << width) - 1})")


def _product(a: LaneShape, b: LaneShape, width: int) -> LaneShape | None:
    if a.stride is None or b.stride is None:
        return None
    if a.uniform:
        a, b = b, a
    if not a.uniform and not b.constant:
        return None
    assert a.stride is not None
    return ranged(width, a.stride * b.low, a.low * b.low, a.high * b.high, a.zeros + b.zeros)


def _mul(instruction: Instruction, sources: Sources, lanes: int) -> NumberCode | None:
    kind = _type(instruction)
    if kind is None or len(instruction.modifiers) != 2 or not _plain(*sources):
        return None
    a, b = sources[:2]
    width, part = WIDTHS[kind], instruction.modifiers[0]
    if part == "lo":
        shape = _product(a, b, width)
        return NumberCode(shape, f"({{0}}*{{1}}&{(1 << width) - 1})") if shape is not None else None
    if part != "wide":
        return None
    double = 2 * width
    if kind[0] == "s":
        if a.uniform and b.uniform:
            code = f"({_signed('{0}', width)}*{_signed('{1}', width)}&{(1 << double) - 1})"
            small = a.high < 1 << (width - 1) and b.high < 1 << (width - 1)
            return NumberCode(
                ranged(double, 0, a.low * b.low if small else -1, a.high * b.high, a.zeros + b.zeros), code
            )
        if not (a.fits(lanes, width - 1) and b.fits(lanes, width - 1)):
            return None
    elif not (a.fits(lanes, width) and b.fits(lanes, width)) and not (a.uniform and b.uniform):
        return None
    shape = _product(a, b, double)
    return NumberCode(shape, f"({{0}}*{{1}}&{(1 << double) - 1})") if shape is not None else None


def _mad(instruction: Instruction, sources: Sources, lanes: int) -> NumberCode | None:
    kind = _type(instruction)
    product = _mul(instruction, sources[:2], lanes)
    if product is None or kind is None or not _plain(sources[2]):
        return None
    result = _sum(product.shape, sources[2], product.shape.width, "+")
    return NumberCode(result.shape, f"({product.code}+{{2}}&{(1 << product.shape.width) - 1})")


def _logic(instruction: Instruction, sources: Sources, lanes: int) -> NumberCode | None:
    name = instruction.opcode
    if instruction.modifiers == ("pred",):
        return _predicates(name, sources)
    kind = _type(instruction)
    if kind is None or not _plain(*sources):
        return None
    a, b = sources
    width, sign = WIDTHS[kind], {"and": "&", "or": "|", "xor": "^"}[name]
    if a.uniform and b.uniform:
        if name == "and":
            shape = uniform(width, 0, min(a.high, b.high), max(a.zeros, b.zeros))
        else:
            bits = max(a.high, b.high).bit_length()
            shape = uniform(width, 0, (1 << bits) - 1, min(a.zeros, b.zeros))
        return NumberCode(shape, f"({{0}}{sign}{{1}})")
    if a.uniform:
        a, b, swapped = b, a, True
    else:
        swapped = False
    if name == "and":
        return _masked(a, b, lanes, width, "{1}" if swapped else "{0}")
    if not (_disjoint(a, b, lanes) or _disjoint(b, a, lanes)):
        return None
    assert a.stride is not None and b.stride is not None
    shape = ranged(width, a.stride + b.stride, a.low + b.low, a.high + b.high, min(a.zeros, b.zeros))
    return NumberCode(shape, "({0}+{1})")


def _disjoint(low: LaneShape, high: LaneShape, lanes: int) -> bool:
    """True if all bits of `low` are below those of `high`, in every lane."""
    bits = low.high.bit_length()
    assert high.stride is not None
    return low.fits(lanes, low.width) and high.zeros >= bits and high.stride % (1 << bits) == 0


def _masked(a: LaneShape, mask: LaneShape, lanes: int, width: int, code: str) -> NumberCode | None:
    """`and` of a value with a constant step and a constant mask."""
    if not mask.constant or not a.fits(lanes, width):
        return None
    value, span = mask.low, a.span(lanes)
    low_bits = value & (value + 1) == 0
    if low_bits and a.high <= value:
        return NumberCode(a, code)
    if low_bits and span <= value and 1 << a.zeros > span:
        high = min(value, a.high)
        return NumberCode(ranged(width, a.stride or 0, 0, high, a.zeros), f"({code}&{value})")
    inverse = ~value & ((1 << width) - 1)
    if inverse & (inverse + 1) == 0:
        if span <= inverse and 1 << a.zeros > span:
            return NumberCode(uniform(width, 0, a.high, a.zeros), f"({code}&{value})")
        if a.zeros >= inverse.bit_length() and (a.stride or 0) % (inverse + 1) == 0:
            return NumberCode(a, code)
    return None


def _predicates(name: str, sources: Sources) -> NumberCode:
    if all(s.uniform for s in sources):
        code = {"and": "({0} and {1})", "or": "({0} or {1})", "xor": "({0}!={1})", "not": "(not {0})"}[name]
        return NumberCode(uniform(1), code)
    operands = ",".join(f"{{{n}}}" for n in range(len(sources)))
    return NumberCode(anything(1), f"_p_{name}({operands})")


def _not(instruction: Instruction, sources: Sources, lanes: int) -> NumberCode | None:
    if instruction.modifiers == ("pred",):
        return _predicates("not", sources)
    kind = _type(instruction)
    (a,) = sources
    if kind is None or a.stride is None:
        return None
    width = WIDTHS[kind]
    return NumberCode(ranged(width, -a.stride, -1, 0, 0), f"({{0}}^{(1 << width) - 1})")


def _shift(instruction: Instruction, sources: Sources, lanes: int) -> NumberCode | None:
    kind = _type(instruction)
    if kind is None or not _plain(*sources):
        return None
    a, b = sources
    return _left(kind, a, b) if instruction.opcode == "shl" else _right(kind, a, b, lanes)


def _left(kind: str, a: LaneShape, b: LaneShape) -> NumberCode | None:
    width = WIDTHS[kind]
    mask = (1 << width) - 1
    if b.constant:
        amount = b.low
        if amount >= width:
            return NumberCode(literal(0, width), "0")
        assert a.stride is not None
        shape = ranged(width, a.stride << amount, a.low << amount, a.high << amount, a.zeros + amount)
        return NumberCode(shape, f"({{0}}<<{amount}&{mask})")
    if a.uniform and b.uniform:
        return NumberCode(uniform(width), f"({{0}}<<{{1}}&{mask} if {{1}}<{width} else 0)")
    return None


def _right(kind: str, a: LaneShape, b: LaneShape, lanes: int) -> NumberCode | None:
    width = WIDTHS[kind]
    mask, positive = (1 << width) - 1, a.high < 1 << (width - 1)
    logical = kind[0] != "s" or positive
    if a.uniform and b.constant:
        amount = min(b.low, width)
        zeros = max(a.zeros - amount, 0)
        if logical:
            return NumberCode(uniform(width, a.low >> amount, a.high >> amount, zeros), f"({{0}}>>{amount})")
        return NumberCode(uniform(width, zeros=zeros), f"({_signed('{0}', width)}>>{amount}&{mask})")
    if a.uniform and b.uniform:
        code = "{0}" if logical else _signed("{0}", width)
        return NumberCode(uniform(width), f"({code}>>{{1}}&{mask})")
    if not b.constant or not a.fits(lanes, width if kind[0] != "s" else width - 1) or b.low >= width:
        return None
    amount = b.low
    assert a.stride is not None
    if a.span(lanes) < 1 << amount and 1 << a.zeros > a.span(lanes):
        return NumberCode(uniform(width, a.low >> amount, a.high >> amount), f"({{0}}>>{amount})")
    if a.stride % (1 << amount) == 0:
        zeros = max(a.zeros - amount, 0)
        shape = ranged(width, a.stride >> amount, a.low >> amount, a.high >> amount, zeros)
        return NumberCode(shape, f"({{0}}>>{amount})")
    return None


def _cvt(instruction: Instruction, sources: Sources, lanes: int) -> NumberCode | None:
    kinds = instruction.modifiers
    if len(kinds) != 2 or kinds[0] not in _INTEGER or kinds[1] not in _INTEGER:
        return None  # of floats, or of a pair of them
    (a,) = sources
    if a.stride is None:
        return None
    to, of = WIDTHS[kinds[0]], WIDTHS[kinds[1]]
    target = instruction.operands[0]
    if a.width != of or not isinstance(target, Register) or WIDTHS[target.kind] != to:
        return None  # a narrower result is extended to its register
    if to <= of:
        high = a.high if a.high < 1 << to else (1 << to) - 1
        low = a.low if a.high < 1 << to else 0
        return NumberCode(ranged(to, a.stride, low, high, a.zeros), "{0}" if to == of else f"({{0}}&{(1 << to) - 1})")
    if kinds[1][0] == "s" and not a.fits(lanes, of - 1):
        if not a.uniform:
            return None
        return NumberCode(uniform(to, zeros=a.zeros), f"({_signed('{0}', of)}&{(1 << to) - 1})")
    if not a.uniform and not a.fits(lanes, of):
        return None
    return NumberCode(ranged(to, a.stride, a.low, a.high, a.zeros), "{0}")


def _selp(instruction: Instruction, sources: Sources, lanes: int) -> NumberCode | None:
    a, b, p = sources
    if p.uniform and a.stride == b.stride and _plain(a, b):
        low, high = min(a.low, b.low), max(a.high, b.high)
        return NumberCode(LaneShape(a.width, a.stride, low, high, min(a.zeros, b.zeros)), "({0} if {2} else {1})")
    if not p.uniform and a.constant and b.constant and (a.low, b.low) == (1, 0):
        return NumberCode(LaneShape(a.width, None, 0, 1, flag=True), "{2}")
    return None


def _setp(instruction: Instruction, sources: Sources, lanes: int) -> NumberCode | None:
    kind = _type(instruction)
    comparison = instruction.modifiers[0]
    if kind is None or len(instruction.modifiers) != 2 or len(sources) != 2 or comparison not in _COMPARE:
        return None
    a, b = sources
    width, sign = WIDTHS[kind], _COMPARE[comparison]
    if a.flag and b.constant and b.low == 0 and sign in ("==", "!="):
        return NumberCode(anything(1), "{0}" if sign == "!=" else "_p_not({0})")
    if not _plain(a, b):
        return None
    signed = kind[0] == "s" and sign not in ("==", "!=")
    if a.uniform and b.uniform:
        if signed:
            flip = 1 << (width - 1)
            return NumberCode(uniform(1), f"(({{0}}^{flip}){sign}({{1}}^{flip}))")
        return NumberCode(uniform(1), f"({{0}}{sign}{{1}})")
    code = f"_compare('{sign}',{{0}},{a.stride},{{1}},{b.stride},{width},{kind[0] == 's'})"
    return NumberCode(anything(1), code)


def _extreme(instruction: Instruction, sources: Sources, lanes: int) -> NumberCode | None:
    kind = _type(instruction)
    if kind is None or len(instruction.modifiers) != 1 or not all(s.uniform for s in sources):
        return None
    sign = "<" if instruction.opcode == "min" else ">"
    flip = f"^{1 << (WIDTHS[kind] - 1)}" if kind[0] == "s" else ""
    a, b = sources
    shape = LaneShape(a.width, 0, min(a.low, b.low), max(a.high, b.high), min(a.zeros, b.zeros))
    return NumberCode(shape, f"({{0}} if ({{0}}{flip}){sign}({{1}}{flip}) else {{1}})")


def _cvta(instruction: Instruction, sources: Sources, lanes: int) -> NumberCode | None:
    (a,) = sources
    if a.stride is None:
        return None
    window = window_of(instruction)
    if window == 0:
        return NumberCode(a, "{0}")
    return NumberCode(ranged(64, a.stride, -1, 0, min(a.zeros, 60)), f"({{0}}+{window}&{(1 << 64) - 1})")


_PLANS: dict[str, Callable[[Instruction, Sources, int], NumberCode | None]] = {
    "mov": _mov, "add": _add, "sub": _add, "neg": _neg, "mul": _mul, "mad": _mad, "and": _logic, "or": _logic,
    "xor": _logic, "not": _not, "shl": _shift, "shr": _shift, "cvt": _cvt, "selp": _selp, "setp": _setp,
    "min": _extreme, "max": _extreme, "cvta": _cvta,
}  # fmt: skip
