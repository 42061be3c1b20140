"""Declarations of PTX: parameters, registers, and variables with their initial values."""

from __future__ import annotations

import re

from tricomm.errors import InvalidArgument
from tricomm.explorer.ptx.instructions import Parameter, Register, Variable
from tricomm.explorer.ptx.text.operands import divided, floating, integer
from tricomm.explorer.ptx.text.scopes import Scope

SPACES = ("shared", "const", "global", "local", "param")
_TOKEN = re.compile(r"\.[\w:]+(?:\([^)]*\))?|[%$\w]+(?:<\d+>)?(?:\s*\[[^\]]*\])*|=.*|\S")
_DECLARED = re.compile(r"([%$\w]+)(?:<(\d+)>)?((?:\s*\[[^\]]*\])*)")
_KIND = re.compile(r"[busf](?:8|16|32|64|128)(?:x2)?|pred|b128|tf32")


def size_of(kind: str) -> int:
    """Bytes of one element of a declared type."""
    bits = re.search(r"(\d+)(x2)?$", kind)
    return 1 if bits is None else int(bits[1]) * (2 if bits[2] else 1) // 8


def parameters(text: str) -> tuple[Parameter, ...]:
    """The parameters in a parameter list (given without its parentheses), with natural offsets."""
    declared: list[Parameter] = []
    position = 0
    for part in divided(text):
        words, name, extent, _ = _declaration(part)
        kind = _kind(words, part)
        natural = size_of(kind)
        # `.align` after `.ptr` is the alignment of the memory that the pointer refers to.
        align = max(natural, 1 if "ptr" in words else _number_behind(words, "align", 1))
        size = natural * (1 if extent is None else extent)
        position = -(-position // align) * align
        declared.append(Parameter(name, kind, position, size, "ptr" in words))
        position += size
    return tuple(declared)


def registers(text: str, scope: Scope) -> None:
    """Add what `.reg ...` declares to `scope`."""
    words = re.findall(r"\.(\w+)", text.split("%")[0])
    kind, vector = _kind(words[1:], text), re.search(r"\.v([24])\b", text)
    names = text[text.index("." + kind) + len(kind) + 1 :]
    for part in divided(names.strip()):
        match = _DECLARED.fullmatch(part)
        if match is None or match[3] or (vector and match[2]):
            raise InvalidArgument(f"{text!r}: {part!r} is no register")
        if vector:
            elements = [f"{part}.{letter}" for letter in "xyzw"[: int(vector[1])]]
            made = {element: Register(scope.unique(element), kind) for element in elements}
            scope.registers |= made
            scope.vectors[part] = tuple(made.values())
        elif match[2]:
            scope.counted[match[1]] = (kind, int(match[2]))
        else:
            scope.registers[part] = Register(scope.unique(part), kind)


def variables(text: str, scope: Scope) -> list[Variable]:
    """The variables that a statement such as `.shared .align 16 .b8 x[4096]` declares, with unique names."""
    start = text.split("=")[0]
    space = next((s for s in SPACES if re.search(rf"\.{s}\b", start)), None)
    if space is None:
        raise InvalidArgument(f"{text!r} is not a known declaration")
    declared = []
    first = divided(text)
    words: list[str] = []
    for part in first:
        own, name, extent, value = _declaration(part)
        words = own or words  # in `.b32 a, b` the directives of a also apply to b
        kind = _kind(words, text)
        width = size_of(kind) * next((int(w[1]) for w in words if w in ("v2", "v4", "v8")), 1)
        size = width * (1 if extent is None else extent)
        data = _initial(value, size_of(kind), size, text) if value else b""
        declared.append(Variable(scope.unique(name), space, size, _number_behind(words, "align", width), data))
        scope.variables[name] = scope.unique(name)
    return declared


def _declaration(text: str) -> tuple[list[str], str, int | None, str]:
    """A declaration's words without their dots, its name, its number of elements (0 for an open array, None for a
    scalar), and its initial value."""
    head, _, value = text.partition("=")
    words, name, extent = [], "", None
    for token in _TOKEN.findall(head):
        if token.startswith("."):
            words.append(token[1:])
        elif words and words[-1] == "align":
            words.append(token)
        elif (match := _DECLARED.fullmatch(token)) is not None and not name:
            name = match[1]
            if match[3]:
                extent = 1
                for bounds in re.findall(r"\[([^\]]*)\]", match[3]):
                    extent *= integer(bounds.strip()) or 0
        else:
            raise InvalidArgument(f"{text!r} is not a known declaration")
    if not name:
        raise InvalidArgument(f"{text!r} declares nothing")
    return words, name, extent, value.strip()


def _kind(words: list[str], text: str) -> str:
    for word in words:
        if _KIND.fullmatch(word):
            return word
    raise InvalidArgument(f"{text!r} declares no known type")


def _number_behind(words: list[str], word: str, default: int) -> int:
    return int(words[words.index(word) + 1], 0) if word in words else default


def _initial(value: str, width: int, size: int, text: str) -> bytes:
    data = bytearray()
    for element in value.replace("{", " ").replace("}", " ").split(","):
        element = element.strip()
        if not element:
            continue
        if (number := floating(element)) is not None:
            bits = number.bits
        elif (whole := integer(element)) is not None:
            bits = whole
        else:
            raise InvalidArgument(f"{text[:60]!r}: the initial value {element!r} is no number")
        data += (bits & ((1 << (8 * width)) - 1)).to_bytes(width, "little")
    return bytes(data[:size] + bytes(size - len(data)))
