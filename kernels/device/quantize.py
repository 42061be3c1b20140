"""Quantise a row of the rounded norm: to FP8 e4m3 with a scale per tensor, row or group, or to NVFP4 with a scale per
block.

    fp8             e4m3 of norm * (1 / scale)
    fp8_per_token   scale_out = max(max(abs(norm)) / 448, 1 / (448 * 512)) of the row; e4m3 of norm / scale_out
    nvfp4           of 16 elements each, scale_out = e4m3 of scale * (max(abs(norm)) / 6); e2m1 of norm * (scale /
                    scale_out), or of 0 if that is 0; two a byte, the even element in its lower half
    fp8_per_N       of N elements each, scale = max(max(abs(norm)) / 448, 1e-10), rounded up to a power of two, whose
                    exponent is a byte of scale_out; e4m3 of norm / scale

Codes are computed by integer arithmetic, so they have the same bits on every architecture and under the interpreter.
They are rounded to nearest even and saturate. A maximum ignores NaN; an infinity makes the scale infinite. The e4m3 of
a NaN is 0x7F, its e2m1 is 6.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tricomm.kernels.device.halves import number_of
from tricomm.kernels.device.packing import raw_pointer
from tricomm.kernels.device.rows import store_tile
from tricomm.kernels.reduction import from_e4m3, to_fp8

_INFINITE = tl.constexpr(0x7F800000)
_SIXTH = tl.constexpr(0x3E2AAAAB)  # 1 / 6 in fp32
_MOST_CODED = tl.constexpr(0x43E00000)  # 448
_LEAST_SCALE = tl.constexpr(0x36924925)  # 1 / (448 * 512)
_LEAST_OF_GROUP = tl.constexpr(0x2EDBE6FF)  # 1e-10
_MANTISSA = tl.constexpr(0x7FFFFF)


@triton.jit
def quantize_row(number, normed, operands, AT: tl.constexpr, SPEC: tl.constexpr):
    """Quantise row `number`; `normed` are its planes by their `halves`. Operands from AT on: scale, unless each row has
    its own; quant_out; scale_out, unless the scale is static."""
    if SPEC.QUANTIZE == "fp8":
        inverse = tl.div_rn(1.0, tl.load(operands[AT]))
        _store_fp8(operands[AT + 1], number, normed, inverse, False, SPEC)
    elif SPEC.QUANTIZE == "fp8_per_token":
        most = tl.zeros([SPEC.PLANE], tl.int32)
        for n in tl.static_range(SPEC.ROW_PLANES):
            most = tl.maximum(most, _most(normed[n], SPEC))
        largest = tl.max(most, axis=0).to(tl.float32, bitcast=True)
        scale = tl.maximum(tl.div_rn(largest, _number(_MOST_CODED)), _number(_LEAST_SCALE))
        tl.store(operands[AT + 1] + number, scale)
        _store_fp8(operands[AT], number, normed, scale, True, SPEC)
    elif SPEC.QUANTIZE != "nvfp4":
        _store_groups(operands[AT], operands[AT + 1], operands[AT + 2], number, normed, SPEC)
    else:
        _store_nvfp4(operands[AT + 1], operands[AT + 2], number, normed, tl.load(operands[AT]), SPEC)


@triton.jit
def _number(BITS: tl.constexpr):
    return tl.full([], BITS, tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def _most(parts, SPEC: tl.constexpr):
    """The largest magnitude in each word, ignoring NaN, as bits of fp32 (int32)."""
    most = tl.zeros([SPEC.PLANE], tl.int32)
    for j in tl.static_range(SPEC.PACK):
        bits = number_of(parts, j, SPEC.ELEMENT, SPEC.BITS).to(tl.int32, bitcast=True) & 0x7FFFFFFF
        most = tl.maximum(most, tl.where(bits > _INFINITE, 0, bits))
    return most


@triton.jit
def to_e4m3(value):
    """The e4m3 code (int32) of an fp32; the code of a NaN is always 0x7F."""
    code = to_fp8(value, 20, 141, 121, -120, 0x7E)
    return tl.where(value != value, 0x7F, code)


@triton.jit
def to_e2m1(value):
    """The e2m1 code (int32) of an fp32: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and a sign."""
    bits = value.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    small = (magnitude.to(tl.float32, bitcast=True) + 4194304.0).to(tl.int32, bitcast=True) - 0x4A800000
    large = (magnitude + (-126 * (1 << 23) + (1 << 21) - 1) + ((magnitude >> 22) & 1)) >> 22
    code = tl.minimum(tl.where(magnitude < (127 << 23), small, large), 7)
    return tl.where(magnitude > _INFINITE, 7, code | ((bits >> 28) & 8))


@triton.jit
def _store_fp8(q_ptr, number, normed, scale, DIVIDE: tl.constexpr, SPEC: tl.constexpr):
    for i in tl.static_range(SPEC.ROW_TILES):
        tile = ()
        for n in tl.static_range(i * SPEC.PLANES, (i + 1) * SPEC.PLANES):
            tile = tile + (_fp8_codes(normed[n], scale, DIVIDE, SPEC),)
        store_tile(q_ptr, number, i, tile, 8, SPEC)


@triton.jit
def _fp8_codes(parts, scale, DIVIDE: tl.constexpr, SPEC: tl.constexpr):
    """The e4m3 codes of a plane's words, PACK of them packed in an integer."""
    codes = tl.zeros([SPEC.PLANE], tl.int32)
    for j in tl.static_range(SPEC.PACK):
        value = number_of(parts, j, SPEC.ELEMENT, SPEC.BITS)
        if DIVIDE:
            value = tl.div_rn(value, scale)
        else:
            value = value * scale
        codes |= to_e4m3(value) << (8 * j)
    return codes


@triton.jit
def _store_groups(q_ptr, scales, rows, number, normed, SPEC: tl.constexpr):
    """Store the exponents of a row's groups. The layout has a column for every four groups: 32 bits for each row, the
    number of rows rounded up to a multiple of four. Bytes after a row's last group and rows after the last one are
    zero; the memory of the last column ends with its last row."""
    WORDS: tl.constexpr = SPEC.SCALED
    GROUPS: tl.constexpr = SPEC.PLANE // WORDS
    COLUMNS: tl.constexpr = SPEC.HIDDEN // SPEC.GROUP // 4
    LEFT: tl.constexpr = SPEC.HIDDEN // SPEC.GROUP % 4
    step = (rows + 3) // 4 * 4
    exponents = raw_pointer(scales, 8) + number * 4
    for i in tl.static_range(SPEC.ROW_TILES):
        tile = ()
        for n in tl.static_range(i * SPEC.PLANES, (i + 1) * SPEC.PLANES):
            most = tl.max(tl.reshape(_most(normed[n], SPEC), [GROUPS, WORDS]), axis=1).to(tl.float32, bitcast=True)
            bits = tl.maximum(tl.div_rn(most, _number(_MOST_CODED)), _number(_LEAST_OF_GROUP))
            exponent = (bits.to(tl.int32, bitcast=True) + _MANTISSA) >> 23
            group = SPEC.FIRSTS[n] // WORDS + tl.arange(0, GROUPS)
            there = tl.arange(0, GROUPS) * WORDS < SPEC.LENGTHS[n]
            tl.store(exponents + (group // 4) * step * 4 + group % 4, exponent.to(tl.int8), mask=there)
            # The reciprocal of a power of two is exact, so this has the bits of the quotient. Of infinity it is 0.
            inverse = tl.where(exponent == 255, 0, (254 - exponent) << 23).to(tl.float32, bitcast=True)
            of_words = tl.reshape(tl.broadcast_to(tl.expand_dims(inverse, 1), [GROUPS, WORDS]), [SPEC.PLANE])
            tile = tile + (_fp8_codes(normed[n], of_words, False, SPEC),)
        store_tile(q_ptr, number, i, tile, 8, SPEC)
    for k in tl.static_range(LEFT, 4 if LEFT else 0):
        tl.store(exponents + COLUMNS * step * 4 + k, tl.zeros([], tl.int8))
    if number == rows - 1:
        for column in range(COLUMNS - (0 if LEFT else 1)):
            for k in tl.static_range(1, 4):
                if number + k < step:
                    tl.store(raw_pointer(scales, 32) + column * step + number + k, 0)


@triton.jit
def _store_nvfp4(q_ptr, scales, number, normed, scale, SPEC: tl.constexpr):
    WORDS: tl.constexpr = SPEC.SCALED
    GROUPS: tl.constexpr = SPEC.PLANE // WORDS
    BLOCKS: tl.constexpr = SPEC.HIDDEN // 16
    for i in tl.static_range(SPEC.ROW_TILES):
        planes = ()
        for n in tl.static_range(i * SPEC.PLANES, (i + 1) * SPEC.PLANES):
            most = tl.max(tl.reshape(_most(normed[n], SPEC), [GROUPS, WORDS]), axis=1).to(tl.float32, bitcast=True)
            codes_of_scales = to_e4m3(scale * (most * _number(_SIXTH)))
            rounded = from_e4m3(codes_of_scales)
            inverse = tl.where(rounded == 0, 0.0, tl.div_rn(scale + rounded * 0, rounded))
            block = SPEC.FIRSTS[n] // WORDS + tl.arange(0, GROUPS)
            if SPEC.SWIZZLED:
                tile = (number // 128) * ((BLOCKS + 3) // 4) + block // 4
                place = tile * 512 + (number % 32) * 16 + (number // 32 % 4) * 4 + block % 4
            else:
                place = number * BLOCKS + block
            tl.store(
                raw_pointer(scales, 8) + place,
                codes_of_scales.to(tl.int8),
                mask=tl.arange(0, GROUPS) * WORDS < SPEC.LENGTHS[n],
            )
            of_words = tl.reshape(tl.broadcast_to(tl.expand_dims(inverse, 1), [GROUPS, WORDS]), [SPEC.PLANE])
            codes = tl.zeros([SPEC.PLANE], tl.int32)
            for j in tl.static_range(SPEC.PACK):
                value = number_of(normed[n], j, SPEC.ELEMENT, SPEC.BITS)
                codes |= to_e2m1(value * of_words) << (4 * j)
            planes = planes + (codes,)
        store_tile(q_ptr, number, i, planes, 4, SPEC)
