"""cvt between all types and roundings, against fractions and torch."""

import itertools
from fractions import Fraction
from functools import partial

import pytest

from tests.explorer.ptx.arithmetic import float_model as model
from tests.explorer.ptx.arithmetic.arithmetic_cases import check, rows, signed
from tests.explorer.ptx.arithmetic.float_model import (
    F32,
    KINDS,
    NAN,
    finite,
    float_rows,
    flushed,
    negative,
    value,
    width,
)

INTEGERS = ("u8", "s8", "u16", "s16", "u32", "s32", "u64", "s64")
FLOATS = ("f16", "bf16", "f32", "f64")
MODES = ("rn", "rz", "rm", "rp")
WHOLE = {"rni": "rn", "rzi": "rz", "rmi": "rm", "rpi": "rp"}


def register(kind):
    return f"b{max(16, width(kind))}"


def read(bits, kind):
    bits &= (1 << width(kind)) - 1
    return signed(bits, width(kind)) if kind[0] == "s" else bits


def extended(number, kind, destination):
    """The register's bits: an integer type's value sign- or zero-extended."""
    bits = number & (1 << width(kind)) - 1
    return read(bits, kind) & (1 << int(destination[1:])) - 1


@pytest.mark.parametrize("to, of", list(itertools.product(INTEGERS, INTEGERS)))
def test_integers(to, of):
    for wider_source, wider_result in ((False, False), (True, False), (False, True)):
        source = "b64" if wider_source else register(of)
        result = "b64" if wider_result else register(to)
        given, names = rows(int(source[1:]), count=60), {"d": result, "a": source}
        check(f"cvt.{to}.{of} d, a", given, lambda a, r=result: extended(read(a, of), to, r), **names)


@pytest.mark.parametrize("to, of", list(itertools.product(FLOATS, INTEGERS)))
def test_integers_to_floats(to, of):
    form = KINDS[to]
    edges = [((1 << n) + d,) for n in (8, 11, 24, 25, 53, 54, 63) for d in (-1, 0, 1)]
    edges += [((1 << 60) + (1 << n) + d,) for n in (6, 7, 36, 49, 52) for d in (-1, 0, 1)]
    given = [*rows(width(of), count=60), *((x & (1 << width(of)) - 1,) for (x,) in edges)]
    given += [(-x & (1 << width(of)) - 1,) for (x,) in edges]
    names = {"d": register(to), "a": register(of)}
    check(f"cvt.rn.{to}.{of} d, a", given, lambda a: model.encode(Fraction(read(a, of)), form), **names)


@pytest.mark.parametrize("to, of", list(itertools.product(INTEGERS, FLOATS)))
def test_floats_to_integers(to, of):
    form = KINDS[of]
    bounds = (-(1 << width(to) - 1), (1 << width(to) - 1) - 1) if to[0] == "s" else (0, (1 << width(to)) - 1)

    def convert(a, mode):
        x = value(a, form)
        if x == NAN:
            number = 1 << width(to) - 1 if of == "f64" or width(to) == 64 else 0
        elif not isinstance(x, Fraction):
            number = bounds[x == model.INFINITE]
        else:
            whole = model._whole(abs(x), mode, x < 0)
            number = min(max(-whole if x < 0 else whole, bounds[0]), bounds[1])
        return extended(number, to, register(to))

    near = [
        model.encode(Fraction(n) + Fraction(d, 4), form) for n in (0, 1, 2, 127, 255, -1, -128) for d in (-2, 1, 2, 3)
    ]
    near += [model.encode(Fraction(b) + d, form) for b in bounds for d in (-1, 0, 1)]
    given = [*float_rows(form, 1, 80), *((x,) for x in near)]
    for name, mode in WHOLE.items():
        check(f"cvt.{name}.{to}.{of} d, a", given, lambda a, m=mode: convert(a, m), d=register(to), a=register(of))
    if of == "f32":
        flush = lambda a: convert(flushed(a, F32), "rp")  # noqa: E731
        check(f"cvt.rpi.ftz.{to}.f32 d, a", given, flush, d=register(to), a="b32")


def converted(a, to, of, mode="rn", saturate=False, relu=False):
    x = value(a, KINDS[of])
    if relu and x != NAN and negative(a, KINDS[of]):
        return 0
    return model.encode(x, KINDS[to], mode, negative(a, KINDS[of]), saturate)


def near_ties(to, of):
    """Numbers of type `of` at, and next to, the values of type `to` and the ties between them."""
    source, result = KINDS[of], []
    for (bits,) in float_rows(KINDS[to], 1, 60):
        for other in (bits, bits ^ 1):
            if finite(bits, KINDS[to]) and finite(other, KINDS[to]):
                x = model.encode((value(bits, KINDS[to]) + value(other, KINDS[to])) / 2, source)
                result += [x, x + 1, max(x - 1, 0)]
    return [(x,) for x in result]


NARROWER = [("f16", "f32"), ("bf16", "f32"), ("f16", "f64"), ("bf16", "f64"), ("f32", "f64")]
NARROWER += [("bf16", "f16"), ("f16", "bf16")]
WIDER = [("f32", "f16"), ("f32", "bf16"), ("f64", "f32"), ("f64", "f16"), ("f64", "bf16")]


@pytest.mark.parametrize("to, of", NARROWER)
def test_narrower_floats(to, of):
    given, names = float_rows(KINDS[of], 1) + near_ties(to, of), {"d": register(to), "a": register(of)}
    for mode in MODES:
        check(f"cvt.{mode}.{to}.{of} d, a", given, lambda a, m=mode: converted(a, to, of, m), **names)

    def unit(a):
        bits, one = converted(a, to, of), KINDS[to].bias << KINDS[to].digits
        return 0 if negative(bits, KINDS[to]) or value(bits, KINDS[to]) == NAN else min(bits, one)

    check(f"cvt.rn.sat.{to}.{of} d, a", given, unit, **names)
    if of == "f32":
        for mode, finite_only, relu in itertools.product(("rn", "rz"), (False, True), (False, True)):
            flags = ".relu" * relu + ".satfinite" * finite_only
            rounded = partial(converted, to=to, of=of, mode=mode, saturate=finite_only, relu=relu)
            check(f"cvt.{mode}{flags}.{to}.f32 d, a", given, rounded, **names)


@pytest.mark.parametrize("to, of", WIDER)
def test_wider_floats(to, of):
    def exact(a):
        return converted(a, to, of)

    # The bits of a NaN: canonical from half to float, as in hardware; otherwise the host's.
    given = [row for row in float_rows(KINDS[of], 1) if value(row[0], KINDS[of]) != NAN]
    check(f"cvt.{to}.{of} d, a", given, exact, d=register(to), a=register(of))
    if (to, of) == ("f32", "f16"):
        check("cvt.f32.f16 d, a", [(0x7C01,), (0xFE00,), (0x7FFF,)], lambda a: F32.nan, d="b32", a="b16")
    if (to, of) == ("f32", "bf16"):
        check("cvt.f32.bf16 d, a", [(0x7F81,), (0xFFC0,), (0x7FFF,)], lambda a: a << 16, d="b32", a="b16")


@pytest.mark.parametrize("to, of", (("f32", "f32"), ("f16", "f16"), ("bf16", "bf16"), ("f32", "f16"), ("f64", "f32")))
def test_unit_range(to, of):
    def unit(a):
        if value(a, KINDS[of]) == NAN or negative(a, KINDS[of]):
            return 0
        return min(converted(a, to, of), KINDS[to].bias << KINDS[to].digits)

    check(f"cvt.sat.{to}.{of} d, a", float_rows(KINDS[of], 1), unit, d=register(to), a=register(of))


@pytest.mark.parametrize("kind", FLOATS)
def test_whole_numbers(kind):
    form = KINDS[kind]
    given = [row for row in float_rows(form, 1) if value(row[0], form) != NAN or kind != "f64"]
    given += [(model.encode(Fraction(n, 4), form),) for n in range(-12, 13)]
    for name, mode in WHOLE.items():

        def whole(a, mode=mode):
            x = value(a, form)
            if not isinstance(x, Fraction):
                return form.nan if x == NAN else a
            return model.encode(
                Fraction(model._whole(abs(x), mode, x < 0)) * (-1 if x < 0 else 1), form, minus=negative(a, form)
            )

        check(f"cvt.{name}.{kind}.{kind} d, a", given, whole, d=register(kind), a=register(kind))
    check(f"cvt.{kind}.{kind} d, a", float_rows(form, 1, 40), lambda a: a, d=register(kind), a=register(kind))


def test_flushing_conversions():
    given = [*float_rows(F32, 1), (1,), (0x80400000,)]
    check("cvt.rn.ftz.f16.f32 d, a", given, lambda a: converted(flushed(a, F32), "f16", "f32"), d="b16", a="b32")
    check("cvt.ftz.f64.f32 d, a", [(1,), (0x80400000,)], lambda a: a >> 31 << 63, d="b64", a="b32")
    check("cvt.ftz.f32.f32 d, a", given, lambda a: flushed(a, F32), d="b32", a="b32")
    tiny = model.encode(Fraction(1, 2**140), model.F64)
    check("cvt.rn.ftz.f32.f64 d, a", [(tiny,), (tiny | 1 << 63,)], lambda a: a >> 63 << 31, d="b32", a="b64")


@pytest.mark.parametrize("to", ("f16", "bf16"))
def test_pairs_of_halves(to):
    given = float_rows(F32, 2) + [(a, b) for (a,), (b,) in itertools.pairwise(near_ties(to, "f32"))]
    names = {"d": "b32", "a": "b32", "b": "b32"}
    for mode, finite_only, relu in itertools.product(("rn", "rz"), (False, True), (False, True)):

        def both(a, b, mode=mode, saturate=finite_only, relu=relu):
            return converted(a, to, "f32", mode, saturate, relu) << 16 | converted(b, to, "f32", mode, saturate, relu)

        flags = ".relu" * relu + ".satfinite" * finite_only
        check(f"cvt.{mode}{flags}.{to}x2.f32 d, a, b", given, both, **names)


SMALL = {"e4m3": "b16", "e5m2": "b16", "e2m3": "b16", "e3m2": "b16", "e2m1": "b8"}


@pytest.mark.parametrize("to", SMALL)
def test_pairs_of_small_floats(to):
    shift = 4 if to == "e2m1" else 8
    given = float_rows(F32, 2) + [(a, b) for (a,), (b,) in itertools.pairwise(near_ties(to, "f32"))]
    for relu in (False, True):

        def narrow(a, of, relu=relu):
            return converted(a, to, of, "rn", True, relu)

        flags = "rn.satfinite" + ".relu" * relu
        names = {"d": SMALL[to], "a": "b32", "b": "b32"}

        def both(a, b, of="f32", narrow=narrow):
            return narrow(a, of) << shift | narrow(b, of)

        check(f"cvt.{flags}.{to}x2.f32 d, a, b", given, both, **names)
        halves = [(a | b << 16,) for a, b in float_rows(KINDS["f16"], 2)]
        packed = lambda a, both=both: both(a >> 16, a & 0xFFFF, "f16")  # noqa: E731
        check(f"cvt.{flags}.{to}x2.f16x2 d, a", halves, packed, d=SMALL[to], a="b32")

        def widen(a, relu=relu):
            parts = [a >> shift & (1 << KINDS[to].bits) - 1, a & (1 << KINDS[to].bits) - 1]
            high, low = (converted(x, "f16", to, relu=relu) for x in parts)
            return high << 16 | low

        every = [(x << shift | (x * 7 & (1 << shift) - 1),) for x in range(1 << KINDS[to].bits)]
        check(f"cvt.rn{'.relu' * relu}.f16x2.{to}x2 d, a", every, widen, d="b32", a=SMALL[to])
