"""Operations that only halves have, clamping and approximations, and ties of halves."""

import math
import random
from fractions import Fraction

import pytest

from tests.explorer.ptx.arithmetic import float_model as model
from tests.explorer.ptx.arithmetic.arithmetic_cases import check, instruction, run
from tests.explorer.ptx.arithmetic.float_model import KINDS, NAN, float_rows, flushed, negative, value
from tests.explorer.ptx.arithmetic.test_arithmetic_float import HALVES, joined, of_both, saturated


@pytest.mark.parametrize("kind", HALVES)
def test_clamping(kind):
    form = KINDS[kind]

    def rectified(bits):
        return 0 if negative(bits, form) and value(bits, form) != NAN else bits

    two, three = float_rows(form, 2), float_rows(form, 3)
    names, pairs = dict.fromkeys("dabc", "b16"), dict.fromkeys("dabc", "b32")
    check(f"fma.rn.relu.{kind} d, a, b, c", three, lambda *x: rectified(model.fused(*x, form)), **names)
    if kind == "f16":
        check("add.sat.f16 d, a, b", two, lambda a, b: saturated(model.add(a, b, form), form), **names)
        both = of_both(lambda a, b: saturated(model.multiply(a, b, form), form))
        check("mul.sat.f16x2 d, a, b", joined(two), both, **pairs)

        def flush(a, b):
            return flushed(model.add(flushed(a, form), flushed(b, form), form), form)

        check("add.ftz.f16 d, a, b", two, flush, **names)
        check("add.ftz.f16x2 d, a, b", joined(two), of_both(flush), **pairs)


def test_halves_that_two_roundings_get_wrong():
    """The exact sum is so close to a tie of halves that a float, or a double, cannot represent the difference."""
    for kind in HALVES:
        form = KINDS[kind]
        one, chance = form.bias << form.digits, random.Random(3)
        given = []
        for _ in range(300):
            # (1 + k 2^-d) (2^-d-1 + ...) added to 1: ties, and tiny addends.
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
