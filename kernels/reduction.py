"""Reduce tiles of 64-bit words, element by element, in the order of the tuple: rank order, also within a quad.

    raw words ──accumulate──▶ accumulators ──combine──▶ accumulators ──finish──▶ raw words
                (in rank order)             (two partial sums)      (divide, round once)

Types narrower than 32 bits accumulate in 32: floats in fp32, integers in int32. A tile of words then makes PARTS
tiles of accumulator words, element i of a word in part i // 2. Wider types and bitwise operations make one.

Defined bit for bit, on a GPU and under the interpreter (except the bits of a NaN):
  integers      wrap at their own width; the sum of an average wraps at the accumulator's, and the average is truncated
                toward zero
  floats        rounded once, to nearest even; denormals are kept; infinities stay infinite, inf - inf is a NaN
  min, max      propagate a NaN; -0 is less than +0
  fp8           beyond the largest number e5m2 becomes infinite; e4m3, which has no infinity, becomes 448
  prod, sum     round in the accumulator after each rank, in rank order
"""

from __future__ import annotations

import triton
import triton.language as tl

_LOW = tl.constexpr(0xFFFFFFFF)


@triton.jit
def reduce_words(parts, SPEC: tl.constexpr):
    """Reduce the tuple `parts` of WORLD_SIZE int64 tiles of raw words to one."""
    return finish(accumulate(parts, SPEC.WORLD_SIZE, SPEC), SPEC)


@triton.jit
def accumulate(parts, SOURCES: tl.constexpr, SPEC: tl.constexpr):
    """The accumulator words, a tuple of `PARTS` tiles (see the head of this file), of SOURCES tiles of raw words."""
    ELEMENT: tl.constexpr = SPEC.ELEMENT
    OP: tl.constexpr = SPEC.OP
    BITS: tl.constexpr = SPEC.BITS
    accumulators = ()
    if SPEC.BITWISE:
        total = parts[0]
        for r in tl.static_range(1, SOURCES):
            total = _bitwise(total, parts[r], OP)
        accumulators = accumulators + (total,)
    elif BITS == 64:
        total = _wide(parts[0], ELEMENT)
        for r in tl.static_range(1, SOURCES):
            total = _arithmetic(total, _wide(parts[r], ELEMENT), OP)
        accumulators = accumulators + (total.to(tl.int64, bitcast=True),)
    else:
        for part in tl.static_range(32 // BITS):
            low = element(parts[0], 2 * part, ELEMENT, BITS)
            high = element(parts[0], 2 * part + 1, ELEMENT, BITS)
            for r in tl.static_range(1, SOURCES):
                low = _arithmetic(low, element(parts[r], 2 * part, ELEMENT, BITS), OP)
                high = _arithmetic(high, element(parts[r], 2 * part + 1, ELEMENT, BITS), OP)
            accumulators = accumulators + (_pair(low, high),)
    return accumulators


@triton.jit
def combine(some, others, SPEC: tl.constexpr):
    """Combine two tuples of accumulator tiles. Bitwise commutative, so both sides of an exchange get the same bits."""
    PARTS: tl.constexpr = SPEC.PARTS
    ELEMENT: tl.constexpr = SPEC.ELEMENT
    OP: tl.constexpr = SPEC.OP
    HALF: tl.constexpr = SPEC.ACCUMULATOR
    accumulators = ()
    if SPEC.BITWISE:
        accumulators = accumulators + (_bitwise(some[0], others[0], OP),)
    elif SPEC.BITS == 64:
        total = _arithmetic(_wide(some[0], ELEMENT), _wide(others[0], ELEMENT), OP)
        if ELEMENT == "float64":
            # PTX has one NaN for fp32, and does not define which of two NaNs an addition of fp64 returns.
            total = tl.where(total == total, total, float("nan"))
        accumulators = accumulators + (total.to(tl.int64, bitcast=True),)
    else:
        for part in tl.static_range(PARTS):
            low = _arithmetic(_half(some[part], 0, HALF), _half(others[part], 0, HALF), OP)
            high = _arithmetic(_half(some[part], 1, HALF), _half(others[part], 1, HALF), OP)
            accumulators = accumulators + (_pair(low, high),)
    return accumulators


@triton.jit
def finish(totals, SPEC: tl.constexpr):
    """The raw words (int64 tile) of accumulator tiles: an average is divided by WORLD_SIZE, and elements are
    rounded."""
    ELEMENT: tl.constexpr = SPEC.ELEMENT
    BITS: tl.constexpr = SPEC.BITS
    HALF: tl.constexpr = SPEC.ACCUMULATOR
    result = totals[0]
    if SPEC.BITWISE:
        result = totals[0]
    elif BITS == 64:
        if SPEC.OP == "avg":
            result = divide(_wide(totals[0], ELEMENT), SPEC.WORLD_SIZE).to(tl.int64, bitcast=True)
    else:
        result = tl.zeros(totals[0].shape, tl.int64)
        for j in tl.static_range(64 // BITS):
            value = _half(totals[j // 2], j % 2, HALF)
            if SPEC.OP == "avg":
                value = divide(value, SPEC.WORLD_SIZE)
            result |= raw_bits(value, ELEMENT, BITS) << (BITS * j)
    return result


@triton.jit
def _wide(words, ELEMENT: tl.constexpr):
    value = words
    if ELEMENT == "float64":
        value = words.to(tl.float64, bitcast=True)
    return value


@triton.jit
def _half(words, j: tl.constexpr, ELEMENT: tl.constexpr):
    """Accumulator j of an accumulator word."""
    value = (words >> (32 * j)).to(tl.int32)
    if ELEMENT == "float32":
        value = value.to(tl.float32, bitcast=True)
    return value


@triton.jit
def _pair(low, high):
    """The accumulator word of two 32-bit accumulators."""
    bottom = low.to(tl.int32, bitcast=True).to(tl.int64) & _LOW
    return bottom | (high.to(tl.int32, bitcast=True).to(tl.int64) << 32)


@triton.jit
def element(words, j: tl.constexpr, ELEMENT: tl.constexpr, BITS: tl.constexpr):
    """Element j of a word in its accumulator's type, without rounding."""
    if ELEMENT == "float32":
        value = (words >> (32 * j)).to(tl.int32).to(tl.float32, bitcast=True)
    elif ELEMENT == "float16":
        value = (words >> (16 * j)).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    elif ELEMENT == "bfloat16":
        # bf16 is the upper half of fp32: this takes one instruction per element, a conversion two for every other
        # element.
        two = (words >> (16 * (j // 2 * 2))).to(tl.int32)
        value = ((two & -65536) if j % 2 else (two << 16)).to(tl.float32, bitcast=True)
    elif ELEMENT == "float8_e5m2":
        value = ((words >> (8 * j)) << 8).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    elif ELEMENT == "float8_e4m3fn":
        value = from_e4m3((words >> (8 * j)).to(tl.int32) & 0xFF)
    elif ELEMENT == "uint8":
        value = (words >> (8 * j)).to(tl.int32) & 0xFF
    elif BITS == 32:
        value = (words >> (32 * j)).to(tl.int32)
    elif BITS == 16:
        value = (words >> (16 * j)).to(tl.int16).to(tl.int32)
    else:
        value = (words >> (8 * j)).to(tl.int8).to(tl.int32)
    return value


@triton.jit
def raw_bits(value, ELEMENT: tl.constexpr, BITS: tl.constexpr):
    """An accumulator rounded to its element's type, in the low BITS of an int64."""
    if ELEMENT == "float16":
        bits = value.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int64) & 0xFFFF
    elif ELEMENT == "bfloat16":
        bits = value.to(tl.bfloat16).to(tl.int16, bitcast=True).to(tl.int64) & 0xFFFF
    elif ELEMENT == "float8_e5m2":
        bits = to_fp8(value, 21, 134, 113, -112, 0x7C).to(tl.int64)
    elif ELEMENT == "float8_e4m3fn":
        bits = to_fp8(value, 20, 141, 121, -120, 0x7E).to(tl.int64)
    elif ELEMENT == "float32":
        bits = value.to(tl.int32, bitcast=True).to(tl.int64) & _LOW
    else:
        bits = value.to(tl.int64) & ((1 << BITS) - 1)
    return bits


@triton.jit
def from_e4m3(code):
    """fp32 of an e4m3 code (int32, 0 to 255): its bits are shifted to their place in fp32, and a power of two corrects
    the bias."""
    magnitude = code & 0x7F
    value = (magnitude << 20).to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2**120
    value = tl.where(magnitude == 0x7F, float("nan"), value)
    return (value.to(tl.int32, bitcast=True) | ((code & 0x80) << 24)).to(tl.float32, bitcast=True)


@triton.jit
def to_fp8(
    value, SHIFT: tl.constexpr, STEP: tl.constexpr, NORMAL: tl.constexpr, BIAS: tl.constexpr, MOST: tl.constexpr
):
    """fp8 code (int32) of an fp32, to nearest even. Not a conversion, because sm_80 has no e4m3 and the interpreter
    truncates.

    SHIFT mantissa bits are dropped. STEP is the fp32 exponent of the number that, added to a small one, rounds it to a
    multiple of the least fp8; NORMAL is the exponent of the least normal fp8. BIAS is the difference between the
    exponents of fp32 and fp8, MOST the largest code.
    """
    bits = value.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    step = tl.full(magnitude.shape, STEP << 23, tl.int32)
    small = (magnitude.to(tl.float32, bitcast=True) + step.to(tl.float32, bitcast=True)).to(tl.int32, bitcast=True)
    odd = (magnitude >> SHIFT) & 1
    large = (magnitude + (BIAS * (1 << 23) + (1 << (SHIFT - 1)) - 1) + odd) >> SHIFT
    code = tl.minimum(tl.where(magnitude < (NORMAL << 23), small - step, large), MOST)
    code = tl.where(magnitude > 0x7F800000, 0x7F, code)
    return code | ((bits >> 24) & 0x80)


@triton.jit
def _bitwise(a, b, OP: tl.constexpr):
    if OP == "band":
        c = a & b
    elif OP == "bor":
        c = a | b
    else:
        c = a ^ b
    return c


@triton.jit
def _arithmetic(a, b, OP: tl.constexpr):
    if OP == "min":
        c = tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)
    elif OP == "max":
        c = tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)
    elif OP == "prod":
        c = a * b
    else:
        tl.static_assert((OP == "sum") | (OP == "avg"), "unknown operation")
        c = a + b
    return c


@triton.jit
def divide(total, WORLD_SIZE: tl.constexpr):
    if total.dtype.is_int():
        mean = total // WORLD_SIZE
    elif total.dtype == tl.float32:
        # `/` on fp32 is an approximate division on a GPU; this one is rounded as in IEEE 754.
        mean = tl.div_rn(total, tl.zeros(total.shape, tl.float32) + WORLD_SIZE)
    else:
        mean = total / WORLD_SIZE
    return mean
