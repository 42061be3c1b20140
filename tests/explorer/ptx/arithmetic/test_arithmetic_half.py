"""Arithmetic of halves, alone and in pairs, against fractions that are rounded once."""

import math
import random

import pytest

from tests.explorer.ptx.arithmetic import float_model as model
from tests.explorer.ptx.arithmetic.arithmetic_cases import check, instruction, run
from tests.explorer.ptx.arithmetic.float_model import KINDS, NAN, float_rows, flushed, negative, value

HALVES = ("f16", "bf16")


def operations(form):
    def subtract(a, b):
        return form.nan if value(b, form) == NAN else model.add(a, b ^ 0x8000, form)

    return {
        "add": (2, lambda a, b: model.add(a, b, form)),
        "sub": (2, subtract),
        "mul": (2, lambda a, b: model.multiply(a, b, form)),
        "fma.rn": (3, lambda a, b, c: model.fused(a, b, c, form)),
        "min": (2, lambda a, b: model.extreme(a, b, form, True)),
        "max": (2, lambda a, b: model.extreme(a, b, form, False)),
        "min.NaN": (2, lambda a, b: model.extreme(a, b, form, True, True)),
        "max.NaN": (2, lambda a, b: model.extreme(a, b, form, False, True)),
        "neg": (1, lambda a: a ^ 0x8000),
        "abs": (1, lambda a: a & 0x7FFF),
    }


def joined(rows):
    """Rows of pairs of two rows each."""
    return [tuple(a | b << 16 for a, b in zip(x, y, strict=True)) for x, y in zip(rows, reversed(rows), strict=True)]


def of_both(operation):
    return lambda *row: operation(*(x & 0xFFFF for x in row)) | operation(*(x >> 16 for x in row)) << 16


@pytest.mark.parametrize("kind", HALVES)
@pytest.mark.parametrize("name", list(operations(model.F16)))
def test_arithmetic(kind, name):
    count, operation = operations(KINDS[kind])[name]
    given = float_rows(KINDS[kind], count)
    sources = ", ".join("abc"[:count])
    check(f"{name}.{kind} d, {sources}", given, operation, **dict.fromkeys("dabc", "b16"))
    check(f"{name}.{kind}x2 d, {sources}", joined(given), of_both(operation), **dict.fromkeys("dabc", "b32"))
    if name in ("add", "sub", "mul"):
        check(f"{name}.rn.{kind} d, a, b", given, operation, **dict.fromkeys("dab", "b16"))


@pytest.mark.parametrize("kind", HALVES)
def test_clamping(kind):
    form = KINDS[kind]
    one = form.bias << form.digits

    def saturated(bits):
        return 0 if value(bits, form) == NAN or negative(bits, form) else min(bits, one)

    def rectified(bits):
        return 0 if negative(bits, form) and value(bits, form) != NAN else bits

    two, three = float_rows(form, 2), float_rows(form, 3)
    names, pairs = dict.fromkeys("dabc", "b16"), dict.fromkeys("dabc", "b32")
    check(f"fma.rn.relu.{kind} d, a, b, c", three, lambda *x: rectified(model.fused(*x, form)), **names)
    if kind == "f16":
        check("add.sat.f16 d, a, b", two, lambda a, b: saturated(model.add(a, b, form)), **names)
        both = of_both(lambda a, b: saturated(model.multiply(a, b, form)))
        check("mul.sat.f16x2 d, a, b", joined(two), both, **pairs)

        def flush(a, b):
            return flushed(model.add(flushed(a, form), flushed(b, form), form), form)

        check("add.ftz.f16 d, a, b", two, flush, **names)
        check("add.ftz.f16x2 d, a, b", joined(two), of_both(flush), **pairs)


def test_halves_that_two_roundings_get_wrong():
    """The exact sum lies beside a tie of halves by less than a float, or a double, can hold."""
    for kind in HALVES:
        form = KINDS[kind]
        one, chance = form.bias << form.digits, random.Random(3)
        given = []
        for _ in range(300):
            # (1 + k 2^-d) (2^-d-1 + ...) beside 1: ties, and tiny addends.
            a = one + chance.getrandbits(form.digits)
            b = (form.bias - form.digits - 1 << form.digits) + chance.choice((0, 0, 1, chance.getrandbits(form.digits)))
            given.append((a, b, chance.choice((one, one + 1, 1, 0x8001, a))))
            given.append((one, 1, a))
        check(f"fma.rn.{kind} d, a, b, c", given, lambda *x, f=form: model.fused(*x, f), **dict.fromkeys("dabc", "b16"))


@pytest.mark.parametrize("kind", HALVES)
@pytest.mark.parametrize("name", ("ex2", "tanh"))
def test_approximations(kind, name):
    form = KINDS[kind]
    function = math.tanh if name == "tanh" else lambda x: 2.0**x
    flags = ".ftz" if (name, kind) == ("ex2", "bf16") else ""
    given = [(a,) for a in range(0, 0x10000, 37)]
    made = instruction(f"{name}.approx{flags}.{kind} d, a", d="b16", a="b16")
    from fractions import Fraction

    for (a,), (got,) in zip(given, run(made, given), strict=True):
        x = value(flushed(a, form) if flags else a, form)
        if not isinstance(x, Fraction):
            expected = {
                NAN: form.nan,
                model.INFINITE: model.encode(Fraction(1), form) if name == "tanh" else 0x7C00,
                model.NEGATIVE_INFINITE: model.encode(Fraction(-1), form) if name == "tanh" else 0,
            }[x]
            expected = 0x7F80 if (kind, name, x) == ("bf16", "ex2", model.INFINITE) else expected
        elif name == "ex2" and abs(x) > 1000:
            expected = model.encode(model.INFINITE, form) if x > 0 else 0
        else:
            expected = model.encode(Fraction(function(float(x))), form, minus=negative(a, form))
        if flags:
            expected = flushed(expected, form)
        assert got == expected, f"{name} of {a:#x}: {got:#x} instead of {expected:#x}"
