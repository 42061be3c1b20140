"""setp, set and selp against Python's comparisons."""

import operator

import pytest

from tests.explorer.ptx.arithmetic import float_model as model
from tests.explorer.ptx.arithmetic.arithmetic_cases import check, rows, signed
from tests.explorer.ptx.arithmetic.float_model import KINDS, float_rows, value, width

ORDER = {name: getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")}
UNSIGNED = {"lo": operator.lt, "ls": operator.le, "hi": operator.gt, "hs": operator.ge}
PREDICATES = {"p": "pred", "q": "pred"}


def holds(compare, kind):
    """The comparison of two patterns of a type, as bool."""

    def test(a, b):
        if kind in KINDS:
            x, y = value(a, KINDS[kind]), value(b, KINDS[kind])
            unordered = model.NAN in (x, y)
            if compare in ("num", "nan"):
                return unordered == (compare == "nan")
            if compare in ORDER:
                return not unordered and ORDER[compare](model._order(x), model._order(y))
            return unordered or ORDER[compare.removesuffix("u")](model._order(x), model._order(y))
        if compare in UNSIGNED:
            return UNSIGNED[compare](a, b)
        bits = int(kind[1:])
        return ORDER[compare](signed(a, bits), signed(b, bits)) if kind[0] == "s" else ORDER[compare](a, b)

    return test


def cases():
    for kind in ("b16", "b32", "b64"):
        yield from ((kind, compare) for compare in ("eq", "ne"))
    for bits in (16, 32, 64):
        yield from ((f"s{bits}", compare) for compare in ORDER)
        yield from ((f"u{bits}", compare) for compare in (*ORDER, *UNSIGNED))
    for kind in ("f16", "bf16", "f32", "f64"):
        yield from ((kind, compare) for compare in (*ORDER, *(f"{c}u" for c in ORDER), "num", "nan"))


def given(kind, count=60):
    if kind in KINDS:
        return float_rows(KINDS[kind], 2, count)
    bits = int(kind[1:])
    equal = [(a, a) for (a,) in rows(bits, count=20)]
    return rows(bits, bits, count=count) + equal


@pytest.mark.parametrize("kind, compare", list(cases()))
def test_setp(kind, compare):
    test, word = holds(compare, kind), f"b{width(kind)}"
    names = {**PREDICATES, "a": word, "b": word}
    two = given(kind)
    check(f"setp.{compare}.{kind} p, a, b", two, test, **names)


def test_setp_of_literals():
    check("setp.lt.s32 p, a, -5", rows(32), lambda a: signed(a, 32) < -5, p="pred", a="b32")
    check("setp.gt.s64 p, a, 4294967295", rows(64), lambda a: signed(a, 64) > 4294967295, p="pred", a="b64")
    check("setp.ne.b32 p, a, -1", rows(32), lambda a: a != 0xFFFFFFFF, p="pred", a="b32")
    one = [(a,) for a, _ in given("f32")]
    check("setp.lt.f32 p, a, 0f3F800000", one, lambda a: holds("lt", "f32")(a, 0x3F800000), p="pred", a="b32")


def test_setp_without_subnormals():
    def test(a, b):
        return holds("eq", "f32")(model.flushed(a, model.F32), model.flushed(b, model.F32))

    two = [*given("f32"), (1, 0), (1, 0x80000002), (0x007FFFFF, 0x00800000)]
    check("setp.eq.ftz.f32 p, a, b", two, test, p="pred", a="b32", b="b32")


@pytest.mark.parametrize("kind", ("f16", "bf16"))
@pytest.mark.parametrize("compare", (*ORDER, *(f"{c}u" for c in ORDER), "num", "nan"))
def test_setp_of_pairs(kind, compare):
    test, names = holds(compare, kind), {**PREDICATES, "a": "b32", "b": "b32"}
    two = given(kind)
    pairs = [(a | c << 16, b | d << 16) for (a, b), (c, d) in zip(two, reversed(two), strict=True)]

    def both(a, b):
        return test(a & 0xFFFF, b & 0xFFFF), test(a >> 16, b >> 16)

    check(f"setp.{compare}.{kind}x2 p|q, a, b", pairs, both, **names)


@pytest.mark.parametrize("kind, true", (("f16", 0x3C00), ("bf16", 0x3F80)))
@pytest.mark.parametrize("compare", ("nan", "lt"))
def test_set_of_pairs(compare, kind, true):
    test, two = holds(compare, kind), given(kind)
    pairs = [(a | c << 16, b | d << 16) for (a, b), (c, d) in zip(two, reversed(two), strict=True)]

    def both(a, b):
        return true * test(a & 0xFFFF, b & 0xFFFF) | true * test(a >> 16, b >> 16) << 16

    check(f"set.{compare}.{kind}x2.{kind}x2 d, a, b", pairs, both, **dict.fromkeys("dab", "b32"))


@pytest.mark.parametrize("kind", ("b16", "b32", "b64", "u16", "u32", "u64", "s16", "s32", "s64", "f32", "f64"))
def test_selections(kind):
    bits = width(kind)
    names = {**dict.fromkeys("dab", f"b{bits}"), "p": "pred"}
    check(f"selp.{kind} d, a, b, p", rows(bits, bits, 1), lambda a, b, p: a if p else b, **names)
    if kind[0] != "f":
        ones = (1 << bits) - 1
        for x, y in ((1, 0), (0, 1), (-1, 0), (0, -1), (5, 7), (3, 0), (0, 3), (0, 0)):
            one = [(0,), (1,)]
            check(f"selp.{kind} d, {x}, {y}, p", one, lambda p, x=x, y=y: (x if p else y) & ones, **names)
            check(f"selp.{kind} d, {x}, {y}, !p", one, lambda p, x=x, y=y: (y if p else x) & ones, **names)
        check(f"selp.{kind} d, a, -2, p", rows(bits, 1), lambda a, p: a if p else -2 & ones, **names)
        check(f"selp.{kind} d, a, 0, p", rows(bits, 1), lambda a, p: a if p else 0, **names)
        check(f"selp.{kind} d, 0, b, p", rows(bits, 1), lambda b, p: 0 if p else b, **names)
        check(f"selp.{kind} d, 9, b, p", rows(bits, 1), lambda b, p: 9 if p else b, **names)
