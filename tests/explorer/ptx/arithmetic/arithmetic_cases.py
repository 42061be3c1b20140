"""One computing instruction, run over lanes of given bits by its rule, and compared with a model in integers."""

import random
import warnings

import numpy as np

from tricomm.explorer.ptx.arithmetic import FUNCTIONS, Rule, destinations, literal, rule, sources
from tricomm.explorer.ptx.instructions import Float, Instruction, Integer, Negated, Pair, Register, Vector

RANDOM = random.Random(17)


def instruction(text, **kinds):
    """`add.s32 d, a, 5`; registers are declared by keyword, as `d="b32"`. `{a, b}`, `d|p`, `!p` and `_` work."""
    name, _, rest = text.partition(" ")
    opcode, *modifiers = name.split(".")
    parts, depth = [""], 0
    for character in rest:
        depth += (character == "{") - (character == "}")
        if character == "," and not depth:
            parts.append("")
        else:
            parts[-1] += character
    operands = tuple(_operand(part.strip(), kinds) for part in parts)
    return Instruction(opcode, tuple(modifiers), operands, None, 1, text)


def _operand(text, kinds):
    if text.startswith("{"):
        return Vector(tuple(_operand(part.strip(), kinds) for part in text[1:-1].split(",")))
    if "|" in text:
        return Pair(*(_operand(part, kinds) for part in text.split("|")))
    if text == "_":
        return None
    if text.startswith("!"):
        return Negated(_operand(text[1:], kinds))
    if text[:2] in ("0f", "0d"):
        return Float(int(text[2:], 16), 32 if text[1] == "f" else 64)
    if text[0].isdigit() or text[0] == "-":
        return Integer(int(text, 0))
    return Register(text, kinds[text])


def _lanes(values, dtype):
    """An array of these bit patterns."""
    if dtype == "?":
        return np.array([bool(value) for value in values])
    size = np.dtype(dtype).itemsize
    return np.frombuffer(b"".join((v & (1 << 8 * size) - 1).to_bytes(size, "little") for v in values), dtype)


def _patterns(result, dtype, lanes):
    """The bits of a result, whose type has to be the declared one."""
    result = np.asarray(result)
    assert result.dtype == np.dtype(dtype), f"{result.dtype} instead of {dtype}"
    assert result.flags.c_contiguous
    data, size = np.ascontiguousarray(np.broadcast_to(result, (lanes,))).tobytes(), result.dtype.itemsize
    return [int.from_bytes(data[i : i + size], "little") for i in range(0, len(data), size)]


def _signed_alike(kinds, either):
    return tuple("i" + kind[1:] if kind == either else kind for kind in kinds)


def run(made, rows):
    """The bits of all destinations for each row of source bits (literals left out): a list of tuples.

    Computed for arrays, for numpy scalars, for a scalar with arrays, and in signed types if the rule has them.
    """
    result = rule(made)
    assert len(result.inputs) == len(sources(made)) and len(result.outputs) == len(destinations(made))
    whole = _run(made, result, rows)
    for i in range(min(6, len(rows))):
        assert _run(made, result, rows[i : i + 1], "scalars") == whole[i : i + 1], f"{made.text}: as scalars {rows[i]}"
    if len(rows[0]) > 1:
        same = [(rows[0][0], *row[1:]) for row in rows[:16]]
        assert _run(made, result, same, "mixed") == _run(made, result, same), f"{made.text}: a scalar with arrays"
    if result.either:
        kinds = (_signed_alike(result.inputs, result.either), _signed_alike(result.outputs, result.either))
        signed_rule = Rule(*kinds, result.template, result.constants)
        assert _run(made, signed_rule, rows[:50]) == whole[:50], f"{made.text}: signed"
    return whole


def _run(made, observed, rows, shape="arrays"):
    columns = iter(zip(*rows, strict=True))
    values = []
    for operand, kind in zip(sources(made), observed.inputs, strict=True):
        if isinstance(operand, Integer | Float):
            values.append(literal(operand, kind))
        else:
            column = [not x for x in next(columns)] if isinstance(operand, Negated) else next(columns)
            lanes = _lanes(column, kind)
            values.append(lanes[0] if shape == "scalars" or shape == "mixed" and not values else lanes)
    values += observed.constants
    if shape == "arrays":
        values = [np.asarray(value) for value in values]
    names = [f"x{i}" for i in range(len(values))]
    before = [np.asarray(value).tobytes() for value in values]
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("error")
        result = eval(observed.template.format(*names), {**FUNCTIONS, **dict(zip(names, values, strict=True))})
    assert before == [np.asarray(value).tobytes() for value in values], f"{made.text}: an input was changed"
    results = result if len(observed.outputs) > 1 else (result,)
    dropped = [i for i, target in enumerate(destinations(made)) if target is None]
    results = tuple(np.zeros(len(rows), observed.outputs[i]) if i in dropped else r for i, r in enumerate(results))
    return list(zip(*(_patterns(r, d, len(rows)) for r, d in zip(results, observed.outputs, strict=True)), strict=True))


def check(text, rows, model, **kinds):
    """`model` maps a row of source bits to the bits of the destination, or a tuple of them."""
    made = instruction(text, **kinds)
    for row, got in zip(rows, run(made, rows), strict=True):
        expected = model(*row)
        expected = expected if isinstance(expected, tuple) else (expected,)
        expected = [0 if target is None else x for target, x in zip(destinations(made), expected, strict=True)]
        assert got == tuple(map(int, expected)), (
            f"{text} of {[hex(int(x)) for x in row]}: {[hex(x) for x in got]} instead of {[hex(x) for x in expected]}"
        )


def signed(value, bits):
    value &= (1 << bits) - 1
    return value - (1 << bits) if value >> bits - 1 else value


def words(bits, count):
    """Special and random bit patterns."""
    top = 1 << bits - 1
    special = [0, 1, 2, 3, top - 1, top, top + 1, 2 * top - 1, 2 * top - 2]
    special += [0x55 * (2 * top - 1) // 0xFF, bits, bits - 1]
    results = [x & 2 * top - 1 for x in special]
    while len(results) < count:
        results.append(RANDOM.getrandbits(RANDOM.choice((bits, bits, bits // 2, 5))) & 2 * top - 1)
    return results[:count]


def rows(*widths, count=120):
    """Rows of source bits: every pair of the first special ones, then random ones."""
    special = [words(bits, 12)[: 12 if bits > 1 else 2] for bits in widths]
    results = []
    for _ in range(count):
        random_row = tuple(RANDOM.choice(words(bits, 24)) if bits > 1 else RANDOM.getrandbits(1) for bits in widths)
        special_row = tuple(RANDOM.choice(column) for column in special)
        results.append(random_row if RANDOM.random() < 0.6 else special_row)
    return results
