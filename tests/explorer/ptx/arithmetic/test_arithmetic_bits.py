"""Bitwise operations, shifts, bytes and bit fields against loops over bits."""

import itertools
from functools import partial

import pytest

from tests.explorer.ptx.arithmetic.arithmetic_cases import RANDOM, check, rows, signed

ONES = 0xFFFFFFFF


def registers(bits, names="dabc", **others):
    return {**dict.fromkeys(names, f"b{bits}"), **others}


@pytest.mark.parametrize("bits", (16, 32, 64))
def test_bitwise(bits):
    names, ones = registers(bits), (1 << bits) - 1
    check(f"and.b{bits} d, a, b", rows(bits, bits), lambda a, b: a & b, **names)
    check(f"or.b{bits} d, a, b", rows(bits, bits), lambda a, b: a | b, **names)
    check(f"xor.b{bits} d, a, b", rows(bits, bits), lambda a, b: a ^ b, **names)
    check(f"and.b{bits} d, a, -256", rows(bits), lambda a: a & -256 & ones, **names)
    check(f"not.b{bits} d, a", rows(bits), lambda a: ~a & ones, **names)


def test_predicates():
    names = dict.fromkeys("dab", "pred")
    two = list(itertools.product((0, 1), (0, 1)))
    check("and.pred d, a, b", two, lambda a, b: a & b, **names)
    check("or.pred d, a, b", two, lambda a, b: a | b, **names)
    check("xor.pred d, a, b", two, lambda a, b: a ^ b, **names)
    check("and.pred d, a, !b", two, lambda a, b: a & 1 - b, **names)
    check("not.pred d, a", [(0,), (1,)], lambda a: 1 - a, **names)
    check("mov.pred d, a", [(0,), (1,)], lambda a: a, **names)
    check("mov.pred d, -1", [()], lambda: 1, **names)
    check("mov.pred d, 0", [()], lambda: 0, **names)


def shift_rows(bits):
    amounts = (0, 1, 5, bits - 1, bits, bits + 1, 31, 32, 33, 63, 64, 65, 255, 256, 65536, 1 << 31, ONES)
    return [(a, RANDOM.choice(amounts)) for (a,) in rows(bits)] + [((1 << bits) - 1, amount) for amount in amounts]


@pytest.mark.parametrize("bits", (16, 32, 64))
def test_shifts(bits):
    names = registers(bits, "da", b="b32")
    ones = (1 << bits) - 1
    check(f"shl.b{bits} d, a, b", shift_rows(bits), lambda a, n: a << min(n, bits) & ones, **names)
    check(f"shr.u{bits} d, a, b", shift_rows(bits), lambda a, n: a >> min(n, bits), **names)
    check(f"shr.b{bits} d, a, b", shift_rows(bits), lambda a, n: a >> min(n, bits), **names)
    check(f"shr.s{bits} d, a, b", shift_rows(bits), lambda a, n: signed(a, bits) >> min(n, bits) & ones, **names)
    for amount in (0, 3, bits - 1, bits, bits + 7, 256, 65536):
        n = min(amount, bits)
        check(f"shl.b{bits} d, a, {amount}", rows(bits), lambda a, n=n: a << n & ones, **names)
        check(f"shr.u{bits} d, a, {amount}", rows(bits), lambda a, n=n: a >> n, **names)
        check(f"shr.s{bits} d, a, {amount}", rows(bits), lambda a, n=n: signed(a, bits) >> n & ones, **names)
        check(f"shl.b{bits} d, 5, b", [(amount,)], lambda _, n=n: 5 << n & ones, **names)


@pytest.mark.parametrize("mode", ("clamp", "wrap"))
def test_funnel_shifts(mode):
    names = registers(32)

    def amount(c):
        return min(c, 32) if mode == "clamp" else c & 31

    def left(a, b, c):
        return ((b << 32 | a) << amount(c) >> 32) & ONES

    def right(a, b, c):
        return (b << 32 | a) >> amount(c) & ONES

    three = [(a, b, n) for (a, b), (_, n) in zip(rows(32, 32), shift_rows(32), strict=False)]
    check(f"shf.l.{mode}.b32 d, a, b, c", three, left, **names)
    check(f"shf.r.{mode}.b32 d, a, b, c", three, right, **names)
    for n in (0, 1, 31, 32, 33, 64):
        check(f"shf.l.{mode}.b32 d, a, b, {n}", rows(32, 32), lambda a, b, n=n: left(a, b, n), **names)
        check(f"shf.r.{mode}.b32 d, a, b, {n}", rows(32, 32), lambda a, b, n=n: right(a, b, n), **names)


def by_table(table, a, b, c, bits=32):
    result = 0
    for i in range(bits):
        index = (a >> i & 1) << 2 | (b >> i & 1) << 1 | c >> i & 1
        result |= (table >> index & 1) << i
    return result


def test_every_table_of_lop3():
    names = registers(32)
    for table in range(256):
        # These three words hold every combination of bits.
        three = [(0xF0, 0xCC, 0xAA), *rows(32, 32, 32, count=3)]
        check(f"lop3.b32 d, a, b, c, {table}", three, lambda a, b, c, t=table: by_table(t, a, b, c), **names)


def permuted(a, b, selector):
    source = (b << 32 | a).to_bytes(8, "little")
    result = bytearray()
    for place in range(4):
        pick = selector >> 4 * place & 15
        byte = source[pick & 7]
        result.append((0xFF if byte & 0x80 else 0) if pick & 8 else byte)
    return int.from_bytes(result, "little")


def test_byte_permutation():
    names = registers(32)
    selectors = [0x5410, 0x7632, 0x3340, 0x7770, 0x7771, 0x7772, 0x7773, 0x0123, 0x3210, 0x7654, 0x8880, 0xBA98, 0xFEDC]
    selectors += [RANDOM.getrandbits(16) for _ in range(60)]
    for selector in selectors:
        check(f"prmt.b32 d, a, b, {selector}", rows(32, 32, count=8), partial(permuted, selector=selector), **names)
        check(f"prmt.b32 d, a, 0, {selector}", rows(32, count=8), partial(permuted, b=0, selector=selector), **names)
    check("prmt.b32 d, a, b, c", rows(32, 32, 32), permuted, **names)


def field(bits, sign):
    def extract(a, start, length):
        start, length = start & 0xFF, length & 0xFF
        top = a >> min(start + length - 1, bits - 1) & 1 if sign and length else 0
        taken = [(a >> start + i & 1) if i < length and start + i < bits else top for i in range(bits)]
        return sum(bit << i for i, bit in enumerate(taken))

    return extract


PLACES = (0, 1, 7, 16, 31, 32, 33, 63, 64, 65, 200, 255, 256, 300)


@pytest.mark.parametrize("kind", ("u32", "s32", "u64", "s64"))
def test_field_extraction(kind):
    bits = int(kind[1:])
    names = registers(bits, "da", b="b32", c="b32")
    model = field(bits, kind[0] == "s")
    given = [(a, start, length) for start in PLACES for length in PLACES for (a,) in rows(bits, count=2)]
    check(f"bfe.{kind} d, a, b, c", given, model, **names)
    for start, length in ((0, 8), (7, 1), (8, 24), (31, 1), (0, bits), (5, 0), (bits - 4, 9), (300, 5)):
        part = partial(model, start=start, length=length)
        check(f"bfe.{kind} d, a, {start}, {length}", rows(bits, count=20), part, **names)


@pytest.mark.parametrize("bits", (32, 64))
def test_field_insertion(bits):
    names = registers(bits, "fab", c="b32", d="b32")

    def model(a, b, start, length):
        start, length = start & 0xFF, length & 0xFF
        for i in range(length):
            if start + i < bits:
                b = b & ~(1 << start + i) | (a >> i & 1) << start + i
        return b

    given = [(*pair, start, length) for start in PLACES for length in PLACES for pair in rows(bits, bits, count=2)]
    check(f"bfi.b{bits} f, a, b, c, d", given, model, **names)
    for start, length in ((0, 8), (8, 16), (0, bits), (5, 0), (bits - 4, 9), (300, 5), (bits - 1, 1)):
        part = partial(model, start=start, length=length)
        check(f"bfi.b{bits} f, a, b, {start}, {length}", rows(bits, bits, count=20), part, **names)


@pytest.mark.parametrize("bits", (32, 64))
def test_counting(bits):
    word, names = registers(bits, "da"), registers(bits, "a", d="b32")
    one = [*rows(bits), *((1 << i,) for i in range(bits)), *(((1 << i) - 1,) for i in range(bits))]
    check(f"popc.b{bits} d, a", one, lambda a: bin(a).count("1"), **names)
    check(f"clz.b{bits} d, a", one, lambda a: bits - a.bit_length(), **names)
    check(f"brev.b{bits} d, a", one, lambda a: int(f"{a:0{bits}b}"[::-1], 2), **word)


def test_moves():
    for kind in ("b16", "u16", "s16", "b32", "u32", "s32", "f32", "b64", "u64", "s64", "f64"):
        names = registers(int(kind[1:]), "da")
        check(f"mov.{kind} d, a", rows(int(kind[1:]), count=20), lambda a: a, **names)
    check("mov.f32 d, 0f3F800000", [()], lambda: 0x3F800000, d="f32")
    check("mov.b32 d, 0fBF800000", [()], lambda: 0xBF800000, d="b32")
    check("mov.f64 d, 0dBFF0000000000001", [()], lambda: 0xBFF0000000000001, d="f64")
    check("mov.u16 d, -1", [()], lambda: 0xFFFF, d="b16")


@pytest.mark.parametrize("whole, count", ((32, 2), (64, 2), (64, 4), (32, 4), (16, 2), (128, 2)))
def test_packing(whole, count):
    part = whole // count
    names = {f"x{i}": f"b{part}" for i in range(count)}
    listed = ", ".join(names)

    def packed(*parts):
        return sum(x << part * i for i, x in enumerate(parts))

    def unpacked(word):
        return tuple(word >> part * i & (1 << part) - 1 for i in range(count))

    given = rows(*[part] * count, count=40)
    check(f"mov.b{whole} d, {{{listed}}}", given, packed, d=f"b{whole}", **names)
    check(f"mov.b{whole} {{{listed}}}, d", [(packed(*row),) for row in given], unpacked, d=f"b{whole}", **names)
    dropped = listed.replace("x0", "_")
    check(f"mov.b{whole} {{{dropped}}}, d", [(packed(*row),) for row in given], unpacked, d=f"b{whole}", **names)
