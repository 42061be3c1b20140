"""Float arithmetic against fractions that are rounded once."""

import math
import struct
from fractions import Fraction

import pytest

from tests.explorer.ptx.arithmetic import float_model as model
from tests.explorer.ptx.arithmetic.arithmetic_cases import check, instruction, run
from tests.explorer.ptx.arithmetic.float_model import F32, F64, KINDS, NAN, float_rows, flushed, negative, value

KIND_OF = {"f32": F32, "f64": F64}


def words(kind, names="dabc"):
    return dict.fromkeys(names, f"b{KINDS[kind].bits}")


def check_floats(text, given, expected, kind, names="dabc"):
    """A NaN of a double is the host's: only that it is one counts."""
    if kind != "f64":
        check(text, given, expected, **words(kind, names))
        return
    made = instruction(text, **words(kind, names))
    for row, (got,) in zip(given, run(made, given), strict=True):
        wanted = expected(*row)
        same = got == wanted or value(got, F64) == NAN == value(wanted, F64)
        assert same, f"{text} of {[hex(x) for x in row]}: {got:#x} instead of {wanted:#x}"


@pytest.mark.parametrize("kind", ("f32", "f64"))
def test_rounding(kind):
    form = KIND_OF[kind]
    two, three, one = float_rows(form, 2), float_rows(form, 3), float_rows(form, 1, 150)

    def subtract(a, b):
        if value(b, form) == NAN:
            return form.nan
        return model.add(a, b ^ 1 << form.bits - 1, form)

    check_floats(f"add.rn.{kind} d, a, b", two, lambda a, b: model.add(a, b, form), kind)
    check_floats(f"sub.rn.{kind} d, a, b", two, subtract, kind)
    check_floats(f"mul.rn.{kind} d, a, b", two, lambda a, b: model.multiply(a, b, form), kind)
    check_floats(f"div.rn.{kind} d, a, b", two, lambda a, b: model.divide(a, b, form), kind)
    check_floats(f"fma.rn.{kind} d, a, b, c", three, lambda a, b, c: model.fused(a, b, c, form), kind)
    check_floats(f"mad.rn.{kind} d, a, b, c", three, lambda a, b, c: model.fused(a, b, c, form), kind)
    check_floats(f"sqrt.rn.{kind} d, a", one, lambda a: model.root(a, form), kind)
    inverse = form.bias << form.digits
    check_floats(f"rcp.rn.{kind} d, a", one, lambda a: model.divide(inverse, a, form), kind)


def test_fma_that_two_roundings_get_wrong():
    """1 + 2^-24 is a tie of floats: what lies below it decides, and a sum in double precision loses it."""
    one, tie = 0x3F800000, 0x33800000
    for tiny in (1, 0x80000001, 0x00800000, 0x80800000):
        given = [(tie, one, one), (tie, one, one | 1)]
        check("fma.rn.f32 d, a, b, c", given, lambda a, b, c: model.fused(a, b, c, F32), **words("f32"))
        # (1 + 2^-12) (1 + 2^-12) = 1 + 2^-11 + 2^-24: beside a tiny addend.
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


@pytest.mark.parametrize("kind", ("f32", "f64"))
@pytest.mark.parametrize("name", ("min", "max"))
def test_order(kind, name):
    form, least = KIND_OF[kind], name == "min"
    sign = 1 << form.bits - 1
    two = [*float_rows(form, 2), (0, sign), (sign, 0), (sign, sign), (0, 0)]
    check_floats(f"{name}.{kind} d, a, b", two, lambda a, b: model.extreme(a, b, form, least), kind)
    if kind == "f64":
        return

    def nan_wins(a, b):
        return model.extreme(a, b, form, least, True)

    check(f"{name}.NaN.f32 d, a, b", two, nan_wins, **words(kind))

    def of_sizes(a, b, wins):
        size = model.extreme(a & sign - 1, b & sign - 1, form, least, wins)
        return size | (a ^ b) & sign

    check(f"{name}.xorsign.abs.f32 d, a, b", two, lambda a, b: of_sizes(a, b, False), **words(kind))
    check(f"{name}.NaN.xorsign.abs.f32 d, a, b", two, lambda a, b: of_sizes(a, b, True), **words(kind))
    three = float_rows(form, 3)
    check(f"{name}.NaN.f32 d, a, b, c", three, lambda a, b, c: nan_wins(nan_wins(a, b), c), **words(kind))

    def nan_loses(a, b):
        return model.extreme(a, b, form, least)

    check(f"{name}.f32 d, a, b, c", three, lambda a, b, c: nan_loses(nan_loses(a, b), c), **words(kind))


@pytest.mark.parametrize("kind", ("f32", "f64", "f16", "bf16"))
def test_signs(kind):
    form = KINDS[kind]
    sign, one = 1 << form.bits - 1, float_rows(KINDS[kind], 1)
    check(f"neg.{kind} d, a", one, lambda a: a ^ sign, **words(kind))
    check(f"abs.{kind} d, a", one, lambda a: a & sign - 1, **words(kind))
    if kind in KIND_OF:
        two = float_rows(form, 2)
        check(f"copysign.{kind} d, a, b", two, lambda a, b: a & sign | b & sign - 1, **words(kind))


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


@pytest.mark.parametrize("name", ("ex2", "lg2", "sin", "cos", "tanh", "rcp", "rsqrt", "sqrt"))
def test_approximations(name):
    function = {
        "ex2": lambda x: 2.0**x,
        "lg2": math.log2,
        "sin": math.sin,
        "cos": math.cos,
        "tanh": math.tanh,
        "rcp": lambda x: 1 / x,
        "rsqrt": lambda x: 1 / math.sqrt(x),
        "sqrt": math.sqrt,
    }[name]
    given = float_rows(F32, 1, 400)
    made = instruction(f"{name}.approx.f32 d, a", d="b32", a="b32")
    for (a,), (got,) in zip(given, run(made, given), strict=True):
        assert near(function)(a, got), f"{name} of {a:#x}: {got:#x}"
    exact = {
        "ex2": ((0x40400000, 0x41000000), (0xFF800000, 0), (0x7F800000, 0x7F800000), (0, 0x3F800000)),
        "lg2": ((0, 0xFF800000), (0x41000000, 0x40400000), (0xBF800000, 0x7FFFFFFF)),
        "sin": ((0x80000000, 0x80000000), (0x7F800000, 0x7FFFFFFF)),
        "cos": ((0, 0x3F800000), (0x7F800000, 0x7FFFFFFF)),
        "tanh": ((0x7F800000, 0x3F800000), (0x80000000, 0x80000000)),
        "rcp": ((0x80000000, 0xFF800000), (0x7F800000, 0)),
        "rsqrt": ((0x40800000, 0x3F000000), (0x80000000, 0xFF800000), (0xBF800000, 0x7FFFFFFF)),
        "sqrt": ((0x40800000, 0x40000000), (0x80000000, 0x80000000)),
    }[name]
    for a, result in exact:
        check(f"{name}.approx.f32 d, a", [(a,)], lambda _, r=result: r, d="b32", a="b32")
    check(f"{name}.approx.ftz.f32 d, a", [(1,)], lambda a: run(made, [(0,)])[0], d="b32", a="b32")


def test_gross_approximations_of_doubles():
    """Of the upper half of a double, 20 digits; its lower half is zero, and so are subnormal numbers."""
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
    """Products and addends whose error terms would underflow or overflow are summed exactly, too."""
    import random

    chance = random.Random(11)
    given = []
    for _ in range(400):
        a, b = (chance.randrange(1, 2046) << 52 | chance.getrandbits(52) for _ in range(2))
        exponent = (a >> 52) + (b >> 52) - 1023 + chance.choice((-54, -53, -52, -1, 0, 1, 52, 53, 105, 106))
        c = min(max(exponent, 0), 2046) << 52 | chance.getrandbits(52) | chance.getrandbits(1) << 63
        given.append((a, b, c))
    check("fma.rn.f64 d, a, b, c", given, lambda a, b, c: model.fused(a, b, c, F64), **words("f64"))
