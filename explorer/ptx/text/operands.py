"""Reads an operand of an instruction from its text."""

from __future__ import annotations

import re
import struct

from tricomm.errors import InvalidArgument
from tricomm.explorer.ptx.instructions import (
    Address,
    Float,
    Integer,
    Label,
    Negated,
    Operand,
    Pair,
    Register,
    Special,
    Symbol,
    Vector,
)
from tricomm.explorer.ptx.text.scopes import Scope, is_special

_INTEGER = re.compile(r"([+-]?)\s*(0[xX][0-9a-fA-F]+|0[bB][01]+|0[0-7]*|[1-9][0-9]*)U?")
_FLOAT = re.compile(r"0[fF]([0-9a-fA-F]{8})|0[dD]([0-9a-fA-F]{16})")
_DECIMAL = re.compile(r"[+-]?(?:\d+\.\d*(?:[eE][+-]?\d+)?|\d+[eE][+-]?\d+)")
_NAME = re.compile(r"%?[A-Za-z_$][\w$]*(?:\.[xyzw])?|%[\w$]+")
_OFFSET = re.compile(r"(.*?)\s*(?:\+\s*(-?)|(-))\s*(0[xX][0-9a-fA-F]+U?|\d+U?)")
_OPEN, _CLOSE = "{[(", "}])"


def divided(text: str, mark: str = ",") -> list[str]:
    """`text`, split at each `mark` outside of brackets."""
    if not text:
        return []
    if not any(bracket in text for bracket in _OPEN):
        return [part.strip() for part in text.split(mark)]
    parts, depth, start = [], 0, 0
    for position, sign in enumerate(text):
        depth += (sign in _OPEN) - (sign in _CLOSE)
        if sign == mark and not depth:
            parts.append(text[start:position].strip())
            start = position + 1
    return [*parts, text[start:].strip()]


def integer(text: str) -> int | None:
    """The value of an integer literal; None if `text` is not one."""
    match = _INTEGER.fullmatch(text)
    if match is None:
        return None
    digits = match[2]
    base = 8 if len(digits) > 1 and digits[0] == "0" and digits[1] in "01234567" else 0
    return (-1 if match[1] == "-" else 1) * int(digits, base)


def floating(text: str) -> Float | None:
    """A floating-point literal; None if `text` is not one. A decimal literal has 64 bits."""
    if match := _FLOAT.fullmatch(text):
        return Float(int(match[1], 16), 32) if match[1] else Float(int(match[2], 16), 64)
    if _DECIMAL.fullmatch(text):
        return Float(_bits(float(text)), 64)
    return None


def _bits(value: float) -> int:

    return int.from_bytes(struct.pack("<d", value), "little")


def operand(text: str, scope: Scope) -> Operand:
    """The operand in `text`. Raises `InvalidArgument` for an undeclared name or an unknown form.

    A destination `_` is `Pair(None, None)`. An address without brackets (`mov.u64 %rd1, x+4`) is also an `Address`.
    """
    if (register := scope.register(text)) is not None:
        return register
    if (elements := scope.vector(text)) is not None:
        return Vector(elements)
    head = text[:1]
    if head == "[":
        return _address(text, scope)
    if head in ("{", "("):
        if text[-1] not in _CLOSE:
            raise InvalidArgument(f"{text!r} is no operand")
        return Vector(tuple(None if e == "_" else operand(e, scope) for e in divided(text[1:-1].strip())))
    if head == "!":
        return Negated(_register(text[1:].strip(), scope))
    if "|" in text:
        first, second = (part.strip() for part in text.split("|", 1))
        return Pair(_unless_ignored(first, scope), _unless_ignored(second, scope))
    if text == "_":
        return Pair(None, None)
    if (number := floating(text)) is not None:
        return number
    if (value := integer(text)) is not None:
        return Integer(value)
    return _named(text, scope)


def _named(text: str, scope: Scope) -> Operand:
    if text == "WARP_SZ":
        return Integer(32)
    if is_special(text):
        return Special(text)
    if (symbol := scope.symbol(text)) is not None:
        return symbol
    if (label := scope.label(text)) is not None:
        return Label(label)
    if (match := _OFFSET.fullmatch(text)) and (base := scope.symbol(match[1].strip())) is not None:
        return Address(base, _offset(match))
    if _NAME.fullmatch(text):
        raise InvalidArgument(f"{text} is not declared")
    raise InvalidArgument(f"{text!r} is not a known operand")


def _register(name: str, scope: Scope) -> Register:
    register = scope.register(name)
    if register is None:
        raise InvalidArgument(f"{name} is not declared")
    return register


def _unless_ignored(name: str, scope: Scope) -> Register | None:
    return None if name == "_" else _register(name, scope)


def _address(text: str, scope: Scope) -> Operand:
    if not text.endswith("]"):
        raise InvalidArgument(f"{text!r} is no address")
    inner = text[1:-1].strip()
    parts = divided(inner)
    if len(parts) > 1:  # the address in a tensor: [map, {coordinates}]
        return Vector(tuple(operand(part, scope) for part in parts))
    if (symbol := _base(inner, scope)) is not None:
        return Address(symbol)
    if (value := integer(inner)) is not None:
        return Address(None, value)
    match = _OFFSET.fullmatch(inner)
    base = _base(match[1].strip(), scope) if match else None
    if match is None or base is None:
        raise InvalidArgument(f"{match[1].strip() if match else inner} is not declared")
    return Address(base, _offset(match))


def _base(name: str, scope: Scope) -> Register | Symbol | None:
    return scope.register(name) or scope.symbol(name)


def _offset(match: re.Match[str]) -> int:
    value = integer(match[4])
    assert value is not None  # the pattern of an offset matches only integers
    return -value if match[2] or match[3] else value
