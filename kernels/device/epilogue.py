"""The epilogue of a reduced row: residual, RMSNorm, quantisation; and the interface of a user's own epilogue.

    residual_out = round(s + residual), in fp32; s without a residual
    factor       = rsqrt(mean(residual_out ** 2) + eps)
    norm         = round((residual_out * factor) * (weight + weight_bias))

All results are the same on every rank, for any algorithm, grid and tiles. No sum depends on an order: the squares of a
word's elements are added, and then the sums of the words as integers. Before that, the row is scaled by a power of two,
so that its largest magnitude, or 2^-11 of the root of eps if that is larger, is in [1, 4) (if it was 2^-104 or more).
So the squares stay in fp32's range for huge and for tiny rows. The sums are truncated to multiples of 2^-44: 2^14
squares add up to less than 2^62 of these, and the mean is exact to 2^-30. The factor of a row with an infinity is 0, of
a row with a NaN a NaN.

For 16-bit types the squares of a word are added in fp32, and all steps after the integer sum are in fp32: root and
quotient are correctly rounded, and the factor is exact to 3 units in the last place. For fp32 all steps are in fp64,
including weight + weight_bias, and the norm is rounded once.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tricomm.kernels.device.halves import halves, joined, number_of
from tricomm.kernels.device.packing import raw_pointer
from tricomm.kernels.device.quantize import quantize_row
from tricomm.kernels.device.rows import load_tile, store_tile, words_at
from tricomm.kernels.reduction import element, raw_bits

_HALF_UP, _DOWN = tl.constexpr(2.0**22), tl.constexpr(2.0**-44)
_INFINITE = tl.constexpr(0x7F800000)
_ROOT = tl.constexpr(127 - 22)  # twice the exponent of 2^-11: a subnormal eps, 2^-149 or more, counts as 2^-127
_TO_BF16 = tl.constexpr("cvt.rn.bf16x2.f32 $0, $1, $2;")
_TO_FP16 = tl.constexpr("cvt.rn.f16x2.f32 $0, $1, $2;")
_ADD_BF16 = tl.constexpr("{ .reg .b32 one; mov.b32 one, 0x3F803F80; fma.rn.bf16x2 $0, $1, one, $2; }")
_ADD_FP16 = tl.constexpr("{ .reg .b32 one; mov.b32 one, 0x3C003C00; fma.rn.f16x2 $0, $1, one, $2; }")
_MAX_BF16 = tl.constexpr("{ .reg .b32 size; and.b32 size, $2, 0x7FFF7FFF; max.NaN.bf16x2 $0, $1, size; }")
_MAX_FP16 = tl.constexpr("{ .reg .b32 size; and.b32 size, $2, 0x7FFF7FFF; max.NaN.f16x2 $0, $1, size; }")


@triton.jit
def prepare_rms_norm(number, operands, SPEC: tl.constexpr):
    """Load RMSNorm's operands other than the row; the loads are in flight while the block polls for the row."""
    residual = ()
    weight = ()
    if SPEC.EARLY:
        for i in tl.static_range(SPEC.ROW_TILES):
            if SPEC.RESIDUAL:
                residual = residual + load_tile(operands[3], number, i, SPEC)
            if SPEC.WEIGHT == SPEC.ELEMENT:
                weight = weight + load_tile(operands[2], 0, i, SPEC)
    return residual, weight


@triton.jit
def rms_norm(row, operands, SPEC: tl.constexpr):
    """RMSNorm of a row. `operands`: eps, weight_bias, weight, and residual, norm_out, scale, quant_out and scale_out,
    if given (`tricomm.core.fused.fused_call`). row.y_ptr receives the sums."""
    residual, weight = row.prepared
    eps = tl.zeros([], tl.float32) + operands[0]  # the interpreter passes Python floats
    bias = tl.zeros([], tl.float32) + operands[1]
    hidden = ()
    most = tl.zeros([SPEC.PLANE], tl.int32)
    for g in tl.static_range(0, SPEC.ROW_TILES, SPEC.AT_ONCE):
        others = ()
        if SPEC.RESIDUAL and not SPEC.EARLY:
            for i in tl.static_range(g, min(g + SPEC.AT_ONCE, SPEC.ROW_TILES)):
                others = others + load_tile(operands[3], row.number, i, SPEC)
        for i in tl.static_range(g, min(g + SPEC.AT_ONCE, SPEC.ROW_TILES)):
            sums = ()
            for n in tl.static_range(i * SPEC.PLANES, (i + 1) * SPEC.PLANES):
                at, inside = words_at(n, SPEC)
                words = row.planes[n]
                if SPEC.LENGTHS[n] != SPEC.PLANE:
                    words = tl.where(inside, words, 0)
                parts = halves(words, SPEC.PTX)
                if SPEC.RESIDUAL:
                    other = residual[n] if SPEC.EARLY else others[n - g * SPEC.PLANES]
                    parts = _added(parts, halves(other, SPEC.PTX), SPEC)
                sums = sums + (joined(parts, SPEC.PTX),)
                hidden = hidden + (parts,)
                most = _larger(most, parts, SPEC)
            store_tile(row.y_ptr, row.number, i, sums, SPEC.BITS, SPEC)
    scale, factor = _factor(hidden, _largest(most, SPEC), eps, SPEC)
    if SPEC.PTX and SPEC.BITS == 32:  # otherwise the compiler keeps all elements in fp64, and spills them
        scale = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=f,f", [scale], dtype=tl.float32, is_pure=True, pack=1)
    normed = ()
    NEXT: tl.constexpr = 4 if SPEC.RESIDUAL else 3
    for g in tl.static_range(0, SPEC.ROW_TILES, SPEC.AT_ONCE):
        gains = ()
        if not SPEC.EARLY or SPEC.WEIGHT != SPEC.ELEMENT:
            for i in tl.static_range(g, min(g + SPEC.AT_ONCE, SPEC.ROW_TILES)):
                gains = gains + _gains(operands, i, SPEC)
        for n in tl.static_range(g * SPEC.PLANES, min(g + SPEC.AT_ONCE, SPEC.ROW_TILES) * SPEC.PLANES):
            gain_of = weight[n] if SPEC.EARLY and SPEC.WEIGHT == SPEC.ELEMENT else gains[n - g * SPEC.PLANES]
            results = ()
            for j in tl.static_range(SPEC.PACK):
                if SPEC.WEIGHT == SPEC.ELEMENT:
                    gain = number_of(halves(gain_of, SPEC.PTX), j, SPEC.ELEMENT, SPEC.BITS).to(factor.dtype)
                else:
                    gain = gain_of[j].to(factor.dtype)
                if SPEC.BIASED:
                    gain += bias.to(factor.dtype)
                value = (number_of(hidden[n], j, SPEC.ELEMENT, SPEC.BITS) * scale).to(factor.dtype) * factor
                results = results + ((value * gain).to(tl.float32),)
            normed = normed + (packed(results, SPEC),)
        if SPEC.NORM:
            for i in tl.static_range(g, min(g + SPEC.AT_ONCE, SPEC.ROW_TILES)):
                norm = ()
                for n in tl.static_range(i * SPEC.PLANES, (i + 1) * SPEC.PLANES):
                    norm = norm + (joined(normed[n], SPEC.PTX),)
                store_tile(operands[NEXT], row.number, i, norm, SPEC.BITS, SPEC)
    if SPEC.QUANTIZE != "":
        quantize_row(row.number, normed, operands, NEXT + (1 if SPEC.NORM else 0), SPEC)


@triton.jit
def _gains(operands, i: tl.constexpr, SPEC: tl.constexpr):
    """The planes of tile i of the weight, each as words of the row's type or as a tuple of PACK fp32 tiles."""
    if SPEC.WEIGHT == SPEC.ELEMENT:
        gains = load_tile(operands[2], 0, i, SPEC)
    else:
        gains = ()
        for n in tl.static_range(i * SPEC.PLANES, (i + 1) * SPEC.PLANES):
            at, inside = words_at(n, SPEC)
            of_word = ()
            for j in tl.static_range(SPEC.PACK):
                raw = tl.load(raw_pointer(operands[2], 32) + at * SPEC.PACK + j, mask=inside, other=0)
                of_word = of_word + (raw.to(tl.float32, bitcast=True),)
            gains = gains + (of_word,)
    return gains


@triton.jit
def magnitude(value):
    """The bits of an fp32's magnitude as int32. They compare as the magnitudes do, with NaN as the largest."""
    return value.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def packed(values, SPEC: tl.constexpr):
    """The `halves` of words whose elements are a tuple of PACK fp32 tiles, each rounded once to the type."""
    if SPEC.BITS == 32:
        low, high = values[0].to(tl.int32, bitcast=True), values[1].to(tl.int32, bitcast=True)
    else:
        low, high = _pair(values[0], values[1], SPEC), _pair(values[2], values[3], SPEC)
    return low, high


@triton.jit
def _added(parts, others, SPEC: tl.constexpr):
    """The sums of elements, rounded once; words are given and returned by their `halves`. 16-bit elements are added two
    at a time in their type: fp32 has more than twice the digits, so rounding to it first would give the same bits."""
    if SPEC.PTX and SPEC.BITS == 16:
        asm: tl.constexpr = _ADD_BF16 if SPEC.ELEMENT == "bfloat16" else _ADD_FP16
        low = tl.inline_asm_elementwise(asm, "=r,r,r", [parts[0], others[0]], dtype=tl.int32, is_pure=True, pack=1)
        high = tl.inline_asm_elementwise(asm, "=r,r,r", [parts[1], others[1]], dtype=tl.int32, is_pure=True, pack=1)
        sums = (low, high)
    else:
        values = ()
        for j in tl.static_range(SPEC.PACK):
            one = number_of(parts, j, SPEC.ELEMENT, SPEC.BITS)
            values = values + (one + number_of(others, j, SPEC.ELEMENT, SPEC.BITS),)
        sums = packed(values, SPEC)
    return sums


@triton.jit
def _larger(most, parts, SPEC: tl.constexpr):
    """The larger of `most` and the magnitudes of elements, with NaN as the largest, as bits of fp32 (int32); with PTX,
    of 16-bit elements, pairs of their bits."""
    if SPEC.PTX and SPEC.BITS == 16:
        asm: tl.constexpr = _MAX_BF16 if SPEC.ELEMENT == "bfloat16" else _MAX_FP16
        for k in tl.static_range(2):
            most = tl.inline_asm_elementwise(asm, "=r,r,r", [most, parts[k]], dtype=tl.int32, is_pure=True, pack=1)
    else:
        for j in tl.static_range(SPEC.PACK):
            most = tl.maximum(most, magnitude(number_of(parts, j, SPEC.ELEMENT, SPEC.BITS)))
    return most


@triton.jit
def _largest(most, SPEC: tl.constexpr):
    """The largest magnitude in `most`, the result of `_larger` over a row."""
    if SPEC.PTX and SPEC.BITS == 16:
        first = magnitude(element(most, 0, SPEC.ELEMENT, SPEC.BITS))
        most = tl.maximum(first, magnitude(element(most, 1, SPEC.ELEMENT, SPEC.BITS)))
    return tl.max(most, axis=0)


@triton.jit
def _pair(low, high, SPEC: tl.constexpr):
    """int32: two fp32 rounded to 16 bits, `low` in the lower half."""
    if SPEC.PTX:
        asm: tl.constexpr = _TO_BF16 if SPEC.ELEMENT == "bfloat16" else _TO_FP16
        both = tl.inline_asm_elementwise(asm, "=r,f,f", [high, low], dtype=tl.int32, is_pure=True, pack=1)
    else:
        both = raw_bits(low, SPEC.ELEMENT, 16).to(tl.int32) | (raw_bits(high, SPEC.ELEMENT, 16).to(tl.int32) << 16)
    return both


@triton.jit
def _factor(hidden, largest, eps, SPEC: tl.constexpr):
    """(scale, factor): an element of the norm is (element * scale) * factor. The scale is a power of two.

    The squares of a word's elements are added first, in order; no tile divides a word.
    """
    root = tl.where(magnitude(eps) == 0, 0, ((magnitude(eps) >> 23) + _ROOT) >> 1)
    exponent = tl.minimum(tl.maximum(tl.maximum(largest >> 23, root), 23), 253)
    scale = ((254 + 22 - exponent) << 23).to(tl.float32, bitcast=True)
    squares = tl.zeros([SPEC.PLANE], tl.int64)
    for n in tl.static_range(SPEC.ROW_PLANES):
        of_word = tl.zeros([SPEC.PLANE], tl.float64 if SPEC.ELEMENT == "float32" else tl.float32)
        for j in tl.static_range(SPEC.PACK):
            value = (number_of(hidden[n], j, SPEC.ELEMENT, SPEC.BITS) * scale).to(of_word.dtype)
            of_word = tl.fma(value, value, of_word)  # the product is exact, so this has the bits of a separate addition
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
    """The `prepare` function for an epilogue that loads nothing in advance."""
    return ()
