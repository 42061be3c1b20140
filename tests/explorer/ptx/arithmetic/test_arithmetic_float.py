"""Float arithmetic against fractions that are rounded once."""

import math
import struct
from fractions import Fraction

import pytest

from tests.explorer.ptx.arithmetic import float_model as model
from tests.explorer.ptx.arithmetic.arithmetic_cases import check, instruction, run
from tests.explorer.ptx.arithmetic.float_model import F32, F64, KINDS, NAN, float_rows, flushed, negative, value

HALVES = ("f16", "bf16")


def words(kind, names="dabc"):
    return dict.fromkeys(names, f"b{KINDS[kind].bits}")


def check_floats(text, given, expected, kind, names="dabc"):
    """A NaN of a double has the host's bits, so any NaN is right."""
    if kind != "f64":
        check(text, given, expected, **words(kind, names))
        return
    made = instruction(text, **words(kind, names))
    for row, (got,) in zip(given, run(made, given), strict=True):
        wanted = expected(*row)
        same = got == wanted or value(got, F64) == NAN == value(wanted, F64)
        assert same, f"{text} of {[hex(x) for x in row]}: {got:#x} instead of {wanted:#x}"


def operations(kind):
    """(operands, model) by name; a rounding is given if it is required."""
    form = KINDS[kind]
    sign, inverse = 1 << form.bits - 1, form.bias << form.digits

    def subtract(a, b):
        return form.nan if value(b, form) == NAN else model.add(a, b ^ sign, form)

    def extreme(least, nan_wins=False):
        return lambda a, b: model.extreme(a, b, form, least, nan_wins)

    def of_three(two):
        return lambda a, b, c: two(two(a, b), c)

    def of_sizes(two):
        return lambda a, b: two(a & sign - 1, b & sign - 1) | (a ^ b) & sign

    table = {
        "add": (2, lambda a, b: model.add(a, b, form)),
        "sub": (2, subtract),
        "mul": (2, lambda a, b: model.multiply(a, b, form)),
        "fma.rn": (3, lambda a, b, c: model.fused(a, b, c, form)),
        "neg": (1, lambda a: a ^ sign),
        "abs": (1, lambda a: a & sign - 1),
    }
    table |= {f"{name}.rn": table[name] for name in ("add", "sub", "mul")}
    for name, least in (("min", True), ("max", False)):
        table |= {name: (2, extreme(least))} | ({f"{name}.NaN": (2, extreme(least, True))} if kind != "f64" else {})
        if kind == "f32":
            table[f"{name}.xorsign.abs"] = 2, of_sizes(extreme(least))
            table[f"{name}.NaN.xorsign.abs"] = 2, of_sizes(extreme(least, True))
            table[f"{name}: three"] = 3, of_three(extreme(least))
            table[f"{name}.NaN: three"] = 3, of_three(extreme(least, True))
    if form.bits >= 32:
        table |= {
            "div.rn": (2, lambda a, b: model.divide(a, b, form)),
            "mad.rn": table["fma.rn"],
            "sqrt.rn": (1, lambda a: model.root(a, form)),
            "rcp.rn": (1, lambda a: model.divide(inverse, a, form)),
            "copysign": (2, lambda a, b: a & sign | b & sign - 1),
        }
    return table


def joined(rows):
    """Rows of pairs of two rows each."""
    return [tuple(a | b << 16 for a, b in zip(x, y, strict=True)) for x, y in zip(rows, reversed(rows), strict=True)]


def of_both(operation):
    return lambda *row: operation(*(x & 0xFFFF for x in row)) | operation(*(x >> 16 for x in row)) << 16


@pytest.mark.parametrize(
    ("kind", "name"), [(kind, name) for kind in ("f16", "bf16", "f32", "f64") for name in operations(kind)]
)
def test_operations(kind, name):
    count, operation = operations(kind)[name]
    given, name, sources = float_rows(KINDS[kind], count), name.partition(":")[0], ", ".join("abc"[:count])
    if name in ("neg", "abs", "copysign"):  # of a NaN, too
        check(f"{name}.{kind} d, {sources}", given, operation, **words(kind))
    else:
        check_floats(f"{name}.{kind} d, {sources}", given, operation, kind)
    if kind in HALVES and not name.endswith("l.rn") and name not in ("add.rn", "sub.rn"):
        check(f"{name}.{kind}x2 d, {sources}", joined(given), of_both(operation), **dict.fromkeys("dabc", "b32"))


def test_fma_that_two_roundings_get_wrong():
    """1 + 2^-24 is a tie of floats: the digits below it decide, and a sum in double precision loses them."""
    one, tie = 0x3F800000, 0x33800000
    for tiny in (1, 0x80000001, 0x00800000, 0x80800000):
        given = [(tie, one, one), (tie, one, one | 1)]
        check("fma.rn.f32 d, a, b, c", given, lambda a, b, c: model.fused(a, b, c, F32), **words("f32"))
        # (1 + 2^-12) (1 + 2^-12) = 1 + 2^-11 + 2^-24, and a tiny addend.
        given = [(0x3F800800, 0x3F800800, tiny), (0x3F800800, 0x3F800800, tiny ^ 1 << 31)]
        check("fma.rn.f32 d, a, b, c", given, lambda a, b, c: model.fused(a, b, c, F32), **words("f32"))


def test_default_rounding_and_literals():
    two = float_rows(F32, 2, 60)
    check("add.f32 d, a, b", two, lambda a, b: model.add(a, b, F32), **words("f32"))
    one = float_rows(F32, 1, 60)
    check("add.f32 d, a, 0f3F800000", one, lambda a: model.add(a, 0x3F800000, F32), **words("f32"))
    check("mul.f64 d, a, 0d4008000000000000", [(0x3FF0 << 48,)], lambda a: 0x4008 << 48, **words("f64"))


def saturated(bits, form):
    x = value(bits, form)
    one = form.bias << form.digits
    if x == NAN or negative(bits, form):
        return 0
    return min(bits, one)


def test_flush_and_saturation():
    two = [*float_rows(F32, 2), (0x00400000, 0x00400000), (0x00800000, 0x80000001), (0x00800000, 0x3F000000)]

    def flush(f):
        return lambda *row: flushed(f(*(flushed(x, F32) for x in row)), F32)

    check("add.ftz.f32 d, a, b", two, flush(lambda a, b: model.add(a, b, F32)), **words("f32"))
    check("mul.ftz.f32 d, a, b", two, flush(lambda a, b: model.multiply(a, b, F32)), **words("f32"))
    check("add.sat.f32 d, a, b", two, lambda a, b: saturated(model.add(a, b, F32), F32), **words("f32"))
    check(
        "fma.rn.ftz.sat.f32 d, a, b, c",
        float_rows(F32, 3),
        lambda a, b, c: saturated(flush(lambda x, y, z: model.fused(x, y, z, F32))(a, b, c), F32),
        **words("f32"),
    )
    check("min.ftz.f32 d, a, b", two, flush(lambda a, b: model.extreme(a, b, F32, True)), **words("f32"))


def test_pairs_of_floats():
    given = [(a | b << 32, c | d << 32) for a, b, c, d in float_rows(F32, 4)]
    low = (1 << 32) - 1

    def pair(f):
        return lambda *row: f(*(x & low for x in row)) | f(*(x >> 32 for x in row)) << 32

    names = dict.fromkeys("dabc", "b64")
    check("add.rn.f32x2 d, a, b", given, pair(lambda a, b: model.add(a, b, F32)), **names)
    check("mul.rn.f32x2 d, a, b", given, pair(lambda a, b: model.multiply(a, b, F32)), **names)
    three = [(*row, row[0] ^ 1 << 31) for row in given]
    check("fma.rn.f32x2 d, a, b, c", three, pair(lambda a, b, c: model.fused(a, b, c, F32)), **names)


def number(bits):
    return struct.unpack("<f", bits.to_bytes(4, "little"))[0]


def near(function):
    """Correctly rounded, but for the last digit of a double."""

    def close(bits, got):
        x = number(bits)
        if math.isnan(x):
            return got == F32.nan
        try:
            exact = function(x)
        except (ValueError, OverflowError, ZeroDivisionError):
            return True
        if math.isinf(exact) or exact == 0:
            return number(got) == exact
        return got in {model.encode(Fraction(exact) * (1 + Fraction(i, 2**50)), F32) for i in (-1, 1)}

    return close


# The function, and patterns whose result is exact.
APPROXIMATED = {
    "ex2": (lambda x: 2.0**x, (0x40400000, 0x41000000), (0xFF800000, 0), (0x7F800000, 0x7F800000), (0, 0x3F800000)),
    "lg2": (math.log2, (0, 0xFF800000), (0x41000000, 0x40400000), (0xBF800000, 0x7FFFFFFF)),
    "sin": (math.sin, (0x80000000, 0x80000000), (0x7F800000, 0x7FFFFFFF)),
    "cos": (math.cos, (0, 0x3F800000), (0x7F800000, 0x7FFFFFFF)),
    "tanh": (math.tanh, (0x7F800000, 0x3F800000), (0x80000000, 0x80000000)),
    "rcp": (lambda x: 1 / x, (0x80000000, 0xFF800000), (0x7F800000, 0)),
    "rsqrt": (lambda x: 1 / math.sqrt(x), (0x40800000, 0x3F000000), (0x80000000, 0xFF800000), (0xBF800000, 0x7FFFFFFF)),
    "sqrt": (math.sqrt, (0x40800000, 0x40000000), (0x80000000, 0x80000000)),
}


@pytest.mark.parametrize("name", APPROXIMATED)
def test_approximations(name):
    function, *exact = APPROXIMATED[name]
    given = float_rows(F32, 1, 400)
    made = instruction(f"{name}.approx.f32 d, a", d="b32", a="b32")
    for (a,), (got,) in zip(given, run(made, given), strict=True):
        assert near(function)(a, got), f"{name} of {a:#x}: {got:#x}"
    for a, result in exact:
        check(f"{name}.approx.f32 d, a", [(a,)], lambda _, r=result: r, d="b32", a="b32")
    check(f"{name}.approx.ftz.f32 d, a", [(1,)], lambda a: run(made, [(0,)])[0], d="b32", a="b32")


def test_gross_approximations_of_doubles():
    """20 digits in the upper half of a double; the lower half is zero, and subnormal numbers become zero."""
    top = model.Kind(11, 20, 0)
    for name, function in (("rcp", lambda x: model.divide(0x3FF00000, x, top)), ("rsqrt", None)):
        for (a,) in float_rows(F64, 1):
            x = flushed(a >> 32, top)
            if value(x, top) == NAN or name == "rsqrt" and (negative(x, top) or not model.finite(x, top)):
                continue
            made = instruction(f"{name}.approx.ftz.f64 d, a", d="b64", a="b64")
            ((got,),) = run(made, [(a,)])
            assert got & 0xFFFFFFFF == 0
            if function is not None:
                assert got >> 32 == flushed(function(x), top), hex(a)
            elif value(x, top):
                assert abs(value(got, F64) ** 2 * value(x, top) - 1) < Fraction(1, 2**19), hex(a)
    check("rsqrt.approx.ftz.f64 d, a", [(0x4010 << 48 | 5,)], lambda a: 0x3FE0 << 48, d="b64", a="b64")


def test_approximate_quotients():
    def by_inverse(a, b):
        x = value(b, F32)
        if isinstance(x, Fraction) and abs(x) > 2**126:
            return model.multiply(a, b & 1 << 31, F32)
        return model.divide(a, b, F32)

    two = [*float_rows(F32, 2), (0x3F800000, 0xFE800001), (0x7F800000, 0x7F000000), (0x3F800000, 0x7E800000)]
    check("div.full.f32 d, a, b", two, lambda a, b: model.divide(a, b, F32), **words("f32"))
    check("div.approx.f32 d, a, b", two, by_inverse, **words("f32"))


def test_every_kind_of_double_in_a_fused_sum():
    """Sums are exact also if the error terms of product and addend would underflow or overflow."""
    import random

    chance = random.Random(11)
    given = []
    for _ in range(400):
        a, b = (chance.randrange(1, 2046) << 52 | chance.getrandbits(52) for _ in range(2))
        exponent = (a >> 52) + (b >> 52) - 1023 + chance.choice((-54, -53, -52, -1, 0, 1, 52, 53, 105, 106))
        c = min(max(exponent, 0), 2046) << 52 | chance.getrandbits(52) | chance.getrandbits(1) << 63
        given.append((a, b, c))
    check("fma.rn.f64 d, a, b, c", given, lambda a, b, c: model.fused(a, b, c, F64), **words("f64"))
