"""Integer arithmetic against Python's integers."""

import pytest

from tests.explorer.ptx.arithmetic.arithmetic_cases import check, rows, signed

TYPES = ("u16", "u32", "u64", "s16", "s32", "s64")
WIDE = ("u32", "u64", "s32", "s64")


def of(kind):
    """(bits, reader of a pattern as the type's number)."""
    bits = int(kind[1:])
    return bits, (lambda x: signed(x, bits)) if kind[0] == "s" else (lambda x: x)


def registers(kind, names="dabc", **others):
    return {**dict.fromkeys(names, f"b{kind[1:]}"), **others}


def cut(value, bits):
    return value & (1 << bits) - 1


@pytest.mark.parametrize("kind", TYPES)
def test_sums_and_products(kind):
    bits, read = of(kind)
    two, three = rows(bits, bits), rows(bits, bits, bits)
    names = registers(kind)
    check(f"add.{kind} d, a, b", two, lambda a, b: cut(a + b, bits), **names)
    check(f"sub.{kind} d, a, b", two, lambda a, b: cut(a - b, bits), **names)
    check(f"sub.{kind} d, a, -3", rows(bits), lambda a: cut(a + 3, bits), **names)
    check(f"mul.lo.{kind} d, a, b", two, lambda a, b: cut(a * b, bits), **names)
    check(f"mul.hi.{kind} d, a, b", two, lambda a, b: cut(read(a) * read(b) >> bits, bits), **names)
    check(f"mul.hi.{kind} d, a, 21846", rows(bits), lambda a: cut(read(a) * 21846 >> bits, bits), **names)
    check(f"mad.lo.{kind} d, a, b, c", three, lambda a, b, c: cut(a * b + c, bits), **names)
    check(f"mad.hi.{kind} d, a, b, c", three, lambda a, b, c: cut((read(a) * read(b) >> bits) + c, bits), **names)


@pytest.mark.parametrize("kind", ("u16", "s16", "u32", "s32"))
def test_wide_products(kind):
    bits, read = of(kind)
    double = f"b{2 * bits}"
    names = registers(kind, "ab", d=double, c=double)
    check(f"mul.wide.{kind} d, a, b", rows(bits, bits), lambda a, b: cut(read(a) * read(b), 2 * bits), **names)
    check(f"mul.wide.{kind} d, a, 8", rows(bits), lambda a: cut(read(a) * 8, 2 * bits), **names)
    # A literal out of the type's range is cut to it first.
    check(f"mul.wide.{kind} d, a, -1", rows(bits), lambda a: cut(read(a) * read(cut(-1, bits)), 2 * bits), **names)
    three = rows(bits, bits, 2 * bits)
    check(f"mad.wide.{kind} d, a, b, c", three, lambda a, b, c: cut(read(a) * read(b) + c, 2 * bits), **names)
    check(f"mad.wide.{kind} d, a, 8, c", rows(bits, 2 * bits), lambda a, c: cut(read(a) * 8 + c, 2 * bits), **names)


@pytest.mark.parametrize("kind", TYPES)
def test_division(kind):
    bits, read = of(kind)

    def quotient(a, b):
        a, b = read(a), read(b)
        if b == 0:
            return cut(-1, bits)
        size = abs(a) // abs(b)
        return cut(size if (a < 0) == (b < 0) else -size, bits)

    def remainder(a, b):
        if b == 0:
            return a
        size = abs(read(a)) % abs(read(b))
        return cut(size if read(a) >= 0 else -size, bits)

    names = registers(kind)
    check(f"div.{kind} d, a, b", rows(bits, bits), quotient, **names)
    check(f"rem.{kind} d, a, b", rows(bits, bits), remainder, **names)
    for divisor in (7, -7, 0, 1, -1, 16):
        check(f"div.{kind} d, a, {divisor}", rows(bits), lambda a, by=divisor: quotient(a, cut(by, bits)), **names)
        check(f"rem.{kind} d, a, {divisor}", rows(bits), lambda a, by=divisor: remainder(a, cut(by, bits)), **names)


@pytest.mark.parametrize("kind", TYPES)
def test_order(kind):
    bits, read = of(kind)
    names = registers(kind)
    check(f"min.{kind} d, a, b", rows(bits, bits), lambda a, b: min(a, b, key=read), **names)
    check(f"max.{kind} d, a, b", rows(bits, bits), lambda a, b: max(a, b, key=read), **names)
    if kind[0] == "s":
        check(f"abs.{kind} d, a", rows(bits), lambda a: cut(abs(read(a)), bits), **names)
        check(f"neg.{kind} d, a", rows(bits), lambda a: cut(-a, bits), **names)
    if kind == "s32":
        check("min.relu.s32 d, a, b", rows(32, 32), lambda a, b: max(0, min(read(a), read(b))), **names)
        check("max.relu.s32 d, a, b", rows(32, 32), lambda a, b: max(0, read(a), read(b)), **names)


def test_saturation():
    names = registers("s32")

    def saturated(value):
        return cut(max(-(1 << 31), min((1 << 31) - 1, value)), 32)

    check("add.sat.s32 d, a, b", rows(32, 32), lambda a, b: saturated(signed(a, 32) + signed(b, 32)), **names)
    check("sub.sat.s32 d, a, b", rows(32, 32), lambda a, b: saturated(signed(a, 32) - signed(b, 32)), **names)


@pytest.mark.parametrize("kind", WIDE)
def test_carry(kind):
    bits, read = of(kind)
    names, limit = registers(kind), 1 << bits
    two, three = rows(bits, bits), rows(bits, bits, 1)
    check(f"add.cc.{kind} d, a, b", two, lambda a, b: (cut(a + b, bits), a + b >= limit), **names)
    check(f"sub.cc.{kind} d, a, b", two, lambda a, b: (cut(a - b, bits), a < b), **names)
    check(f"addc.{kind} d, a, b", three, lambda a, b, f: cut(a + b + f, bits), **names)
    check(f"addc.cc.{kind} d, a, b", three, lambda a, b, f: (cut(a + b + f, bits), a + b + f >= limit), **names)
    check(f"subc.{kind} d, a, b", three, lambda a, b, f: cut(a - b - f, bits), **names)
    check(f"subc.cc.{kind} d, a, b", three, lambda a, b, f: (cut(a - b - f, bits), a < b + f), **names)
    for mode in ("lo", "hi"):

        def total(a, b, c, f=0, mode=mode):
            result = cut(read(a) * read(b) >> (bits if mode == "hi" else 0), bits) + c + f
            return cut(result, bits), result >= limit

        check(f"mad.{mode}.cc.{kind} d, a, b, c", rows(bits, bits, bits), total, **names)
        check(f"madc.{mode}.cc.{kind} d, a, b, c", rows(bits, bits, bits, 1), total, **names)
        check(f"madc.{mode}.{kind} d, a, b, c", rows(bits, bits, bits, 1), lambda *x, t=total: t(*x)[0], **names)


@pytest.mark.parametrize("kind", ("s16x2", "u16x2"))
def test_packed(kind):
    read = (lambda x: signed(x, 16)) if kind[0] == "s" else (lambda x: x)
    names = registers("b32")

    def halves(operation):
        return lambda a, b: operation(a & 0xFFFF, b & 0xFFFF) & 0xFFFF | (operation(a >> 16, b >> 16) & 0xFFFF) << 16

    check(f"add.{kind} d, a, b", rows(32, 32), halves(lambda a, b: a + b), **names)
    check(f"min.{kind} d, a, b", rows(32, 32), halves(lambda a, b: min(read(a), read(b))), **names)
    check(f"max.{kind} d, a, b", rows(32, 32), halves(lambda a, b: max(read(a), read(b))), **names)
    check(f"max.{kind} d, a, 65537", rows(32), lambda a: halves(lambda x, y: max(read(x), read(y)))(a, 65537), **names)
    if kind == "s16x2":
        check("min.relu.s16x2 d, a, b", rows(32, 32), halves(lambda a, b: max(0, min(read(a), read(b)))), **names)
        check("max.relu.s16x2 d, a, b", rows(32, 32), halves(lambda a, b: max(0, read(a), read(b))), **names)
