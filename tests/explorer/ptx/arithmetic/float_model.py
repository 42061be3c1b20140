"""IEEE numbers of any width as exact fractions, and rounding in every mode. Nothing here uses numpy."""

import itertools
import math
import random
from fractions import Fraction
from typing import NamedTuple

NAN, INFINITE, NEGATIVE_INFINITE = "nan", "inf", "-inf"


class Kind(NamedTuple):
    """`ieee`: the largest exponent is for infinities and NaN; else only all ones is NaN (if `nan`)."""

    exponent: int
    digits: int
    nan: int
    ieee: bool = True

    @property
    def bits(self):
        return 1 + self.exponent + self.digits

    @property
    def bias(self):
        return (1 << self.exponent - 1) - 1

    @property
    def largest(self):
        """The bits of the largest number."""
        if self.ieee:
            return ((1 << self.exponent) - 1 << self.digits) - 1
        return (1 << self.exponent + self.digits) - (2 if self.nan else 1)


F64 = Kind(11, 52, 0xFFF8 << 48)
F32 = Kind(8, 23, 0x7FFFFFFF)
F16 = Kind(5, 10, 0x7FFF)
BF16 = Kind(8, 7, 0x7FFF)
E5M2 = Kind(5, 2, 0x7F)
E4M3 = Kind(4, 3, 0x7F, ieee=False)
E3M2 = Kind(3, 2, 0, ieee=False)
E2M3 = Kind(2, 3, 0, ieee=False)
E2M1 = Kind(2, 1, 0, ieee=False)
KINDS = {"f64": F64, "f32": F32, "f16": F16, "bf16": BF16}
KINDS |= {"e5m2": E5M2, "e4m3": E4M3, "e3m2": E3M2, "e2m3": E2M3, "e2m1": E2M1}


def width(name):
    """The bits of a float or integer type, by its name in PTX."""
    return KINDS[name].bits if name in KINDS else int(name[1:])


def negative(bits, kind):
    return bool(bits >> kind.bits - 1)


def value(bits, kind):
    """A fraction, or one of the three names. The sign of a zero is not in it."""
    field, digits = bits >> kind.digits & (1 << kind.exponent) - 1, bits & (1 << kind.digits) - 1
    if kind.ieee and field == (1 << kind.exponent) - 1:
        return NAN if digits else NEGATIVE_INFINITE if negative(bits, kind) else INFINITE
    if not kind.ieee and kind.nan and bits & (1 << kind.bits - 1) - 1 == kind.nan:
        return NAN
    significand = digits + (1 << kind.digits if field else 0)
    result = Fraction(significand) * Fraction(2) ** (max(field, 1) - kind.bias - kind.digits)
    return -result if negative(bits, kind) else result


def finite(bits, kind):
    return isinstance(value(bits, kind), Fraction)


def _whole(x, mode, minus):
    """A non-negative fraction, rounded to an integer; `minus`: as the magnitude of a negative number."""
    floor = math.floor(x)
    rest = x - floor
    if mode == "rz" or not rest:
        return floor
    if mode in ("rp", "rm"):
        return floor + ((mode == "rm") == minus)
    if rest == Fraction(1, 2):
        return floor + (floor & 1)
    return floor + (rest > Fraction(1, 2))


def encode(x, kind, mode="rn", minus=None, saturate=False):
    """The bits of a fraction (or a name), rounded; `minus` is the sign of a zero."""
    if x == NAN:
        return kind.nan if kind.nan else kind.largest
    minus = x == NEGATIVE_INFINITE or isinstance(x, Fraction) and (x < 0 or x == 0 and bool(minus))
    sign = minus << kind.bits - 1
    infinite = ((1 << kind.exponent) - 1) << kind.digits if kind.ieee else kind.largest
    if not isinstance(x, Fraction):
        return sign | (kind.largest if saturate else infinite)
    size = abs(x)
    if size == 0:
        return sign
    exponent = size.numerator.bit_length() - size.denominator.bit_length()
    exponent -= size < Fraction(2) ** exponent
    exponent = max(exponent, 1 - kind.bias)
    significand = _whole(size / Fraction(2) ** (exponent - kind.digits), mode, minus)
    bits = (exponent - 1 + kind.bias << kind.digits) + significand
    if bits > kind.largest:
        grows = mode == "rn" or mode == "rp" and not minus or mode == "rm" and minus
        bits = infinite if grows and not saturate else kind.largest
    return sign | bits


def zero_sign(mode, *signs):
    """Of an exact zero that is the sum of terms with these signs (True: negative)."""
    return signs[0] if len(set(signs)) == 1 else mode == "rm"


def add(a, b, kind, mode="rn"):
    x, y = value(a, kind), value(b, kind)
    return _sum(x, y, negative(a, kind), negative(b, kind), kind, mode)


def _sum(x, y, x_minus, y_minus, kind, mode):
    if x == NAN or y == NAN or not isinstance(x, Fraction) and not isinstance(y, Fraction) and x != y:
        return kind.nan
    if not isinstance(x, Fraction):
        return encode(x, kind)
    if not isinstance(y, Fraction):
        return encode(y, kind)
    # Terms that cancel have opposite signs.
    minus = zero_sign(mode, x_minus, y_minus)
    return encode(x + y, kind, mode, minus)


def _product(a, b, kind):
    """(value, sign)."""
    x, y, minus = value(a, kind), value(b, kind), negative(a, kind) != negative(b, kind)
    if x == NAN or y == NAN:
        return NAN, minus
    if isinstance(x, Fraction) and isinstance(y, Fraction):
        return x * y, minus
    return (NAN if 0 in (x, y) else NEGATIVE_INFINITE if minus else INFINITE), minus


def multiply(a, b, kind, mode="rn"):
    product, minus = _product(a, b, kind)
    return encode(product, kind, mode, minus)


def fused(a, b, c, kind, mode="rn"):
    product, minus = _product(a, b, kind)
    return _sum(product, value(c, kind), minus, negative(c, kind), kind, mode)


def divide(a, b, kind, mode="rn"):
    x, y, minus = value(a, kind), value(b, kind), negative(a, kind) != negative(b, kind)
    if NAN in (x, y) or x == y == 0 or not isinstance(x, Fraction) and not isinstance(y, Fraction):
        return kind.nan
    if not isinstance(x, Fraction) or y == 0:
        return encode(NEGATIVE_INFINITE if minus else INFINITE, kind)
    if not isinstance(y, Fraction):
        return minus << kind.bits - 1
    return encode(x / y, kind, mode, minus)


def root(a, kind, mode="rn"):
    x = value(a, kind)
    if x == NAN or x == NEGATIVE_INFINITE or isinstance(x, Fraction) and x < 0:
        return kind.nan
    if x == INFINITE or x == 0:
        return a
    # 1400 binary digits, which are more than enough, and one more for a remainder decide the rounding.
    scaled = x * 4**1400
    result = math.isqrt(math.floor(scaled))
    exact = result * result == scaled
    return encode(Fraction(result * 2 + (not exact), 2 ** (1400 + 1)), kind, mode)


def flushed(bits, kind):
    """A subnormal number as a zero of its sign."""
    field = bits >> kind.digits & (1 << kind.exponent) - 1
    return bits if field or kind.bits < 16 else bits & 1 << kind.bits - 1


def extreme(a, b, kind, least, nan_wins=False):
    """min or max; of two NaN, or with `nan_wins` of one, the canonical NaN."""
    x, y = value(a, kind), value(b, kind)
    if NAN in (x, y):
        return kind.nan if nan_wins or x == y else b if x == NAN else a
    order = sorted((a, b), key=lambda bits: (_order(value(bits, kind)), not negative(bits, kind)))
    return order[0 if least else 1]


def _order(x):
    return Fraction(2) ** 2000 if x == INFINITE else -(Fraction(2) ** 2000) if x == NEGATIVE_INFINITE else x


_RANDOM = random.Random(5)


def patterns(kind, count):
    """Bits of numbers: special ones, near ones, and random ones."""
    one, sign, digits = kind.bias << kind.digits, 1 << kind.bits - 1, kind.digits
    infinite = ((1 << kind.exponent) - 1) << digits
    special = [0, 1, 2, (1 << digits) - 1, 1 << digits, (1 << digits) + 1, one, one + 1, one - 1, one + (1 << digits)]
    special += [kind.largest, kind.largest - 1, kind.largest >> 1]
    if kind.ieee:
        special += [infinite, infinite + 1, kind.nan & sign - 1, infinite | 1 << digits - 1]
    special += [x | sign for x in special]
    while len(special) < count:
        near = one + _RANDOM.randrange(-3, 4) * (1 << digits) + _RANDOM.getrandbits(digits)
        special.append(_RANDOM.choice((_RANDOM.getrandbits(kind.bits), near, near | sign)) & 2 * sign - 1)
    return special


def float_rows(kind, operands, count=160):
    """Rows of patterns; many of them close to each other, so that sums cancel and products tie."""
    choices = patterns(kind, 250)
    results = [tuple(_RANDOM.choice(choices) for _ in range(operands)) for _ in range(count)]
    results += [tuple(_RANDOM.choice(choices[:26]) for _ in range(operands)) for _ in range(count // 4)]
    results += itertools.product((0, 1 << kind.bits - 1), repeat=operands)
    results += [(kind.largest, *(kind.largest - i & (1 << kind.bits) - 1 for i in range(1, operands)))]
    results += [tuple(x | 1 << kind.bits - 1 for x in results[-1])]
    for _ in range(count // 4):
        first = _RANDOM.choice(choices)
        near = [first ^ _RANDOM.choice((0, 1, 3, 1 << kind.bits - 1)) for _ in range(operands - 1)]
        results.append((first, *near))
    return results
