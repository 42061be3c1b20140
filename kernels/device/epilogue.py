"""What follows the all-reduce of a row: residual, RMSNorm, quantisation; and how a user's own epilogue sees a row.

    residual_out = round(s + residual), in fp32; s without a residual
    factor       = rsqrt(mean(residual_out ** 2) + eps)
    norm         = round((residual_out * factor) * (weight + weight_bias))

All of it is the same on every rank, whatever the algorithm, the grid and the tiles, because no sum depends on an order:
the squares of each word are added, and the words' sums as integers. They are scaled by a power of two, so that the
largest magnitude of the row, or 2^-11 of the root of eps if that is larger, lies in [1, 4) (if it is 2^-104 or more),
and cut to multiples of 2^-44: 2^14 squares make less than 2^62, and the mean is right to 2^-30. So neither a huge nor a
tiny row loses its norm, as it would if its squares left fp32's range. A row with an infinity has the factor 0, one with
a NaN a NaN.

16-bit types add the squares of a word and go on in fp32: root and quotient are rounded correctly, and the factor is
right to 3 units of fp32. fp32 does all of it in fp64, the sum of weight and weight_bias too, and its norm is rounded
once.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tricomm.kernels.device.packing import raw_pointer
from tricomm.kernels.device.quantize import quantize_row
from tricomm.kernels.device.reduction import element, raw_bits
from tricomm.kernels.device.rows import load_plane, store_plane, words_at

_HALF_UP, _DOWN = tl.constexpr(2.0**22), tl.constexpr(2.0**-44)
_INFINITE = tl.constexpr(0x7F800000)
_ROOT = tl.constexpr(127 - 22)  # twice the exponent of 2^-11: a subnormal eps, 2^-149 or more, counts as 2^-127
_LOW = tl.constexpr(0xFFFFFFFF)


@triton.jit
def prepare_rms_norm(number, operands, SPEC: tl.constexpr):
    """What RMSNorm needs besides the row: on its way while the row is waited for."""
    residual = ()
    weight = ()
    if SPEC.EARLY:
        for n in tl.static_range(SPEC.ROW_PLANES):
            if SPEC.RESIDUAL:
                residual = residual + (load_plane(operands[3], number, n, SPEC),)
            if SPEC.WEIGHT == SPEC.ELEMENT:
                weight = weight + (load_plane(operands[2], 0, n, SPEC),)
    return residual, weight


@triton.jit
def rms_norm(row, operands, SPEC: tl.constexpr):
    """RMSNorm of a row. `operands`: eps, weight_bias, weight, and those of residual, norm_out, scale, quant_out and
    scale_out that there are (`tricomm.core.fused.fused_call`); row.y_ptr
    takes the sums."""
    residual, weight = row.prepared
    eps = tl.zeros([], tl.float32) + operands[0]  # under the interpreter they are floats of Python's
    bias = tl.zeros([], tl.float32) + operands[1]
    hidden = ()
    most = tl.zeros([SPEC.PLANE], tl.float32)
    for n in tl.static_range(SPEC.ROW_PLANES):
        at, inside = words_at(n, SPEC)
        words = tl.where(inside, row.planes[n], 0)
        if SPEC.RESIDUAL:
            others = residual[n] if SPEC.EARLY else load_plane(operands[3], row.number, n, SPEC)
            sums = ()
            for j in tl.static_range(SPEC.PACK):
                one = element(words, j, SPEC.ELEMENT, SPEC.BITS) + element(others, j, SPEC.ELEMENT, SPEC.BITS)
                sums = sums + (one,)
            words = packed(sums, SPEC)
        store_plane(row.y_ptr, row.number, n, words, SPEC.BITS, SPEC)
        hidden = hidden + (words,)
        for j in tl.static_range(SPEC.PACK):
            value = tl.abs(element(words, j, SPEC.ELEMENT, SPEC.BITS))
            most = tl.maximum(most, value, propagate_nan=tl.PropagateNan.ALL)
    scale, factor = _factor(hidden, tl.max(magnitude(most), axis=0), eps, SPEC)
    normed = ()
    for n in tl.static_range(SPEC.ROW_PLANES):
        at, inside = words_at(n, SPEC)
        if SPEC.WEIGHT == SPEC.ELEMENT:
            gains = weight[n] if SPEC.EARLY else load_plane(operands[2], 0, n, SPEC)
        results = ()
        for j in tl.static_range(SPEC.PACK):
            if SPEC.WEIGHT == SPEC.ELEMENT:
                gain = element(gains, j, SPEC.ELEMENT, SPEC.BITS)
            else:
                raw = tl.load(raw_pointer(operands[2], 32) + at * SPEC.PACK + j, mask=inside, other=0)
                gain = raw.to(tl.float32, bitcast=True)
            value = (element(hidden[n], j, SPEC.ELEMENT, SPEC.BITS) * scale).to(factor.dtype) * factor
            results = results + ((value * (gain.to(factor.dtype) + bias.to(factor.dtype))).to(tl.float32),)
        normed = normed + (packed(results, SPEC),)
    NEXT: tl.constexpr = 4 if SPEC.RESIDUAL else 3
    if SPEC.NORM:
        for n in tl.static_range(SPEC.ROW_PLANES):
            store_plane(operands[NEXT], row.number, n, normed[n], SPEC.BITS, SPEC)
    if SPEC.QUANTIZE != "":
        quantize_row(row.number, normed, operands, NEXT + (1 if SPEC.NORM else 0), SPEC)


@triton.jit
def magnitude(value):
    """The bits of an fp32's magnitude, int32: they have the order of the numbers, NaN above all."""
    return value.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def packed(values, SPEC: tl.constexpr):
    """The words of a tuple of PACK fp32 tiles, each rounded once to the type; in halves, as a GPU's registers."""
    HALF: tl.constexpr = SPEC.PACK // 2
    low = tl.zeros([SPEC.PLANE], tl.int32)
    high = tl.zeros([SPEC.PLANE], tl.int32)
    for j in tl.static_range(HALF):
        low |= raw_bits(values[j], SPEC.ELEMENT, SPEC.BITS).to(tl.int32) << (SPEC.BITS * j)
        high |= raw_bits(values[HALF + j], SPEC.ELEMENT, SPEC.BITS).to(tl.int32) << (SPEC.BITS * j)
    return (low.to(tl.int64) & _LOW) | (high.to(tl.int64) << 32)


@triton.jit
def _factor(hidden, largest, eps, SPEC: tl.constexpr):
    """(scale, factor): an element of the norm is (element * scale) * factor. The scale is a power of two.

    The squares of a word's elements are added first, in their order, which no tile divides.
    """
    root = tl.where(magnitude(eps) == 0, 0, ((magnitude(eps) >> 23) + _ROOT) >> 1)
    exponent = tl.minimum(tl.maximum(tl.maximum(largest >> 23, root), 23), 253)
    scale = ((254 + 22 - exponent) << 23).to(tl.float32, bitcast=True)
    squares = tl.zeros([SPEC.PLANE], tl.int64)
    for n in tl.static_range(SPEC.ROW_PLANES):
        of_word = tl.zeros([SPEC.PLANE], tl.float64 if SPEC.ELEMENT == "float32" else tl.float32)
        for j in tl.static_range(SPEC.PACK):
            value = (element(hidden[n], j, SPEC.ELEMENT, SPEC.BITS) * scale).to(of_word.dtype)
            of_word += value * value
        squares += of_word.to(tl.int64)
    total = tl.sum(squares, axis=0)
    lower = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    if SPEC.ELEMENT == "float32":
        wide = lower.to(tl.float64)
        mean = total.to(tl.float64) * _DOWN / SPEC.HIDDEN + eps.to(tl.float64) * wide * wide
        factor = 1.0 / tl.sqrt(mean)
    else:
        mean = tl.div_rn(total.to(tl.float32) * _DOWN, SPEC.HIDDEN + scale * 0.0) + eps * lower * lower
        factor = tl.div_rn(mean * 0.0 + 1.0, tl.sqrt_rn(mean))
    factor = tl.where(largest == _INFINITE, 0.0, factor / _HALF_UP)
    return scale, tl.where(largest > _INFINITE, float("nan"), factor)


@triton.jit
def nothing(number, operands, SPEC: tl.constexpr):
    """The `prepare` of an epilogue that needs none."""
    return ()
