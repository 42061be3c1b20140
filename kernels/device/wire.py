"""Quantised tiles: 8 bits an element and a scale for each block of 128 elements, to halve the bytes on the links.

    elements   e0 ... e127 │ e128 ... e255 │ ...      of a message, from its first one on; the last block may be short
    scale      s0          │ s1            │          16 bits, the upper half of an fp32
    codes      c0 ... c127 │ c128 ... c255 │          8 bits each

    fp8    e4m3 of value / scale. The scale is the least power of two, 2^-126 or more, that brings the largest finite
           magnitude to 448 or less: so division and product are exact, and one rounding is left.
    int8   value / scale, to nearest even. The scale is the largest finite magnitude / 127 (2^-126 or more), rounded up
           to 16 bits: so the product with a code is exact in fp32.

An infinity or a NaN is coded as a NaN (e4m3 0x7F, int8 -128) and does not change the rest of its block. A block of
zeros has codes of zeros; int8 has no -0. The bits are the same on every architecture and under the interpreter, because
no operation here rounds differently on one of them.

A tile of plain data is CODED planes: neighbouring runs of BLOCK words of a tensor. Its codes have the size of one
plane: word i has the codes of word i of each plane. So no element changes its thread, and every access is 16 bytes
wide. At the end of a run planes are shorter, but whole blocks (`plane_of`). A tile takes ROOM words of a mailbox:
codes, then scales. Tiles of words with flags: `device/flagged_codes.py`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tricomm.kernels.device.halves import halves, joined, number_of
from tricomm.kernels.device.packing import end_of, load_words, store_words
from tricomm.kernels.device.quantize import to_e4m3
from tricomm.kernels.reduction import from_e4m3, raw_bits

_INFINITE = tl.constexpr(0x7F800000)
_LEAST = tl.constexpr(1 << 23)  # the least scale, 2^-126: its inverse is finite
_PER_127 = tl.constexpr(8454660 / 2**30)  # 1 / 127, rounded down to 24 bits
_ROUNDING = tl.constexpr(12582912.0)  # 1.5 * 2^23: the sum with a small number has the nearest integer in its low bits

# Two numbers an instruction, from sm_89 on. A number beyond 448 cannot occur, and a NaN's code has no sign.
_TO_FP8 = tl.constexpr(
    "{ .reg .b16 a, b; cvt.rn.satfinite.e4m3x2.f32 a, $2, $1; cvt.rn.satfinite.e4m3x2.f32 b, $4, $3; "
    "mov.b32 $0, {a, b}; }"
)
_FROM_FP8 = tl.constexpr(
    "{ .reg .b16 a, b, c, d; .reg .b32 low, high; mov.b32 {a, b}, $4; "
    "cvt.rn.f16x2.e4m3x2 low, a; cvt.rn.f16x2.e4m3x2 high, b; mov.b32 {a, b}, low; mov.b32 {c, d}, high; "
    "cvt.f32.f16 $0, a; cvt.f32.f16 $1, b; cvt.f32.f16 $2, c; cvt.f32.f16 $3, d; }"
)


@triton.jit
def shared_shard(count, SPEC: tl.constexpr):
    """Words of a rank's shard of `count` words: whole blocks."""
    return tl.cdiv(count, SPEC.UNIT * SPEC.WORLD_SIZE) * SPEC.UNIT


@triton.jit
def plane_of(left, SPEC: tl.constexpr):
    """int32: words of a plane of the tile with `left` words to the end of its run: whole blocks, at most PLANE."""
    carried = tl.maximum(tl.minimum(left, SPEC.TILE), 0).to(tl.int32)
    return tl.cdiv(carried, SPEC.PLANES * SPEC.CODED * SPEC.SHARED) * SPEC.SHARED


@triton.jit
def load_source(x_ptr, start, plane, limit, SPEC: tl.constexpr):
    """The planes of `plane` words from word `start` on of a tensor that ends at element `limit`; zeros past that."""
    planes = ()
    for k in tl.static_range(SPEC.CODED):
        planes = planes + (load_words(x_ptr, start + k * plane, limit, SPEC.BLOCK, SPEC.ALIGNED),)
    return planes


@triton.jit
def load_whole_source(x_ptr, start, SPEC: tl.constexpr):
    """`load_source` of a whole tile, whose planes are in flight at once."""
    wide = tl.multiple_of(x_ptr.to(tl.pointer_type(tl.int64)) + start, 16)
    planes = ()
    for k in tl.static_range(SPEC.CODED):
        planes = planes + (tl.load(wide + k * SPEC.BLOCK + tl.arange(0, SPEC.BLOCK)),)
    return planes


@triton.jit
def store_values(y_ptr, start, values, plane, limit, SPEC: tl.constexpr):
    """Round `values` of a tile and store its planes, the inverse of `load_source`."""
    for k in tl.static_range(SPEC.CODED):
        words = tl.zeros([SPEC.BLOCK], tl.int64)
        for j in tl.static_range(SPEC.PACK):
            words |= raw_bits(values[k * SPEC.PACK + j], SPEC.ELEMENT, SPEC.BITS) << (SPEC.BITS * j)
        end = end_of(start + (k + 1) * plane, limit, SPEC.PACK)
        store_words(y_ptr, start + k * plane, words, end, SPEC.BLOCK, SPEC.ALIGNED)


@triton.jit
def values_of(planes, SPEC: tl.constexpr):
    """Eight fp32 tensors of a tile's planes: number k * PACK + j has element j of each word of plane k."""
    values = ()
    for k in tl.static_range(SPEC.CODED):
        parts = halves(planes[k], SPEC.PTX)
        for j in tl.static_range(SPEC.PACK):
            values = values + (number_of(parts, j, SPEC.ELEMENT, SPEC.BITS),)
    return values


@triton.jit
def quantize(values, SPEC: tl.constexpr):
    """Quantise eight fp32 tensors: (words of codes; SCALES times the bits of each block's scale, int32, and each word's
    scale, fp32). Each scale is that of 8 // SCALES of the eight, in SHARED neighbours."""
    EACH: tl.constexpr = 8 // SPEC.SCALES
    scaled, scales, by_word = (), (), ()
    for k in tl.static_range(SPEC.SCALES):
        most = tl.zeros([SPEC.PLANE], tl.int32)
        for j in tl.static_range(EACH):
            magnitude = values[k * EACH + j].to(tl.int32, bitcast=True) & 0x7FFFFFFF
            most = tl.maximum(most, tl.where(magnitude < _INFINITE, magnitude, 0))
        scale, inverse = _scale(tl.max(tl.reshape(most, [SPEC.BLOCKS, SPEC.SHARED]), axis=1), SPEC)
        scales = scales + (scale,)
        by_word = by_word + (_spread(scale.to(tl.float32, bitcast=True), SPEC),)
        each = _spread(inverse, SPEC)
        for j in tl.static_range(EACH):
            scaled = scaled + (_finite(values[k * EACH + j]) * each,)
    return joined((_coded(scaled, 0, SPEC), _coded(scaled, 4, SPEC)), SPEC.PTX), scales, by_word


@triton.jit
def dequantize(codes, by_word, SPEC: tl.constexpr):
    """The inverse of `quantize`: eight fp32 tensors."""
    low, high = halves(codes, SPEC.PTX)
    numbers = _decoded(low, SPEC) + _decoded(high, SPEC)
    values = ()
    for n in tl.static_range(8):
        values = values + (numbers[n] * by_word[n * SPEC.SCALES // 8],)
    return values


@triton.jit
def _scale(most, SPEC: tl.constexpr):
    """(bits of the scale, in int32; its inverse) of blocks whose largest magnitude has the bits `most`."""
    if SPEC.WIRE == "int8":
        # Not `div_rn`: each call of its slow path takes registers, which eight ranks do not leave. `covered` is exact.
        below = (most.to(tl.float32, bitcast=True) * _PER_127).to(tl.int32, bitcast=True)
        scale = tl.maximum((below + 0xFFFF) & -0x10000, _LEAST)
        covered = (scale.to(tl.float32, bitcast=True) * 127.0).to(tl.int32, bitcast=True)
        scale += tl.where(covered < most, 0x10000, 0)
        mantissa = ((scale >> 16) & 0x7F | 0x80).to(tl.uint32)
        nearest = (tl.full(most.shape, 1 << 31, tl.uint32) + (mantissa >> 1)) // mantissa
        inverse = ((252 << 23) - (scale & _INFINITE) + nearest.to(tl.int32)).to(tl.float32, bitcast=True)
    else:
        # 448 is 1.75 * 2^8: a larger mantissa takes the next power of two.
        scale = tl.maximum(((most + 0x1FFFFF) & _INFINITE) - (8 << 23), _LEAST)
        inverse = ((254 << 23) - scale).to(tl.float32, bitcast=True)
    return scale, inverse


@triton.jit
def _spread(of_blocks, SPEC: tl.constexpr):
    """For each word of a plane its block's element of `of_blocks`."""
    columns = tl.broadcast_to(tl.expand_dims(of_blocks, 1), [SPEC.BLOCKS, SPEC.SHARED])
    return tl.reshape(columns, [SPEC.PLANE])


@triton.jit
def _finite(value):
    """`value`, with NaNs in place of infinities."""
    return tl.where((value.to(tl.int32, bitcast=True) & _INFINITE) == _INFINITE, float("nan"), value)


@triton.jit
def _coded(scaled, AT: tl.constexpr, SPEC: tl.constexpr):
    """int32: the codes of four of the `scaled` numbers, from number AT on."""
    a, b, c, d = scaled[AT], scaled[AT + 1], scaled[AT + 2], scaled[AT + 3]
    if SPEC.WIRE == "int8":
        word = _whole(a) | (_whole(b) << 8) | (_whole(c) << 16) | (_whole(d) << 24)
    elif SPEC.PTX:
        word = tl.inline_asm_elementwise(_TO_FP8, "=r,f,f,f,f", [a, b, c, d], dtype=tl.int32, is_pure=True, pack=1)
    else:
        word = to_e4m3(a) | (to_e4m3(b) << 8) | (to_e4m3(c) << 16) | (to_e4m3(d) << 24)
    return word


@triton.jit
def _whole(value):
    """The int8 code of a number from -127 to 127, in the low bits of an int32; -128 for a NaN."""
    code = (value + _ROUNDING).to(tl.int32, bitcast=True) & 0xFF
    return tl.where(value == value, code, 0x80)


@triton.jit
def _decoded(word, SPEC: tl.constexpr):
    """The numbers of four codes in an int32: a tuple of fp32."""
    if SPEC.WIRE == "int8":
        numbers = (_number(word, 24), _number(word, 16), _number(word, 8), _number(word, 0))
    elif SPEC.PTX:
        numbers = tl.inline_asm_elementwise(
            _FROM_FP8,
            "=f,=f,=f,=f,r",
            [word],
            dtype=(tl.float32, tl.float32, tl.float32, tl.float32),
            is_pure=True,
            pack=1,
        )
    else:
        numbers = (
            from_e4m3(word & 0xFF),
            from_e4m3((word >> 8) & 0xFF),
            from_e4m3((word >> 16) & 0xFF),
            from_e4m3((word >> 24) & 0xFF),
        )
    return numbers


@triton.jit
def _number(word, ABOVE: tl.constexpr):
    """The fp32 value of the int8 code in `word` that has ABOVE bits above it."""
    code = (word << ABOVE) >> 24
    return tl.where(code == -128, float("nan"), code.to(tl.float32))


@triton.jit
def put_codes(buffers, codes, scales, plane, COUNT: tl.constexpr, SPEC: tl.constexpr):
    """Store a tile of codes and its scales (their bits, int32) at each of COUNT pointers (int64*, 16-byte aligned)."""
    lane = tl.arange(0, SPEC.BLOCK)
    for n in tl.static_range(COUNT):
        at = tl.multiple_of(buffers[n] + lane, 16)  # on `buffers[n]`, an argument, the hint would be lost
        if plane == SPEC.BLOCK:
            tl.store(at, codes)
        else:
            tl.store(at, codes, mask=lane < plane)
        _put_scales(buffers[n] + SPEC.BLOCK, scales, plane, SPEC)


@triton.jit
def _put_scales(buffer, scales, plane, SPEC: tl.constexpr):
    upper, block = buffer.to(tl.pointer_type(tl.int16)), tl.arange(0, SPEC.BLOCKS)
    for k in tl.static_range(SPEC.CODED):
        bits = (scales[k] >> 16).to(tl.int16)
        tl.store(upper + k * SPEC.BLOCKS + block, bits, mask=block * SPEC.SHARED < plane)


@triton.jit
def get_codes(buffers, plane, COUNT: tl.constexpr, SPEC: tl.constexpr):
    """The tiles at each of COUNT pointers (int64*, 16-byte aligned): (words of codes of each; for each a tuple of each
    word's scales, by plane). All loads are in flight at once."""
    lane = tl.arange(0, SPEC.BLOCK)
    if plane == SPEC.BLOCK:
        codes = ()
        for n in tl.static_range(COUNT):
            codes = codes + (tl.load(tl.multiple_of(buffers[n] + lane, 16)),)
    else:
        codes = ()
        for n in tl.static_range(COUNT):
            codes = codes + (tl.load(tl.multiple_of(buffers[n] + lane, 16), mask=lane < plane, other=0),)
    scales = ()
    for n in tl.static_range(COUNT):
        scales = scales + (_get_scales(buffers[n] + SPEC.BLOCK, plane, SPEC),)
    return codes, scales


@triton.jit
def _get_scales(buffer, plane, SPEC: tl.constexpr):
    upper, lane = buffer.to(tl.pointer_type(tl.int16)), tl.arange(0, SPEC.BLOCK)
    scales = ()
    for k in tl.static_range(SPEC.CODED):
        bits = tl.load(upper + k * SPEC.BLOCKS + lane // SPEC.SHARED, mask=lane < plane, other=0)
        scales = scales + ((bits.to(tl.int32) << 16).to(tl.float32, bitcast=True),)
    return scales


@triton.jit
def put_source(buffer, planes, plane, SPEC: tl.constexpr):
    """Store the planes of a tile as they are at `buffer` (int64*, 16-byte aligned)."""
    lane = tl.arange(0, SPEC.BLOCK)
    at = tl.multiple_of(buffer, 16) + lane
    if plane == SPEC.BLOCK:
        for k in tl.static_range(SPEC.CODED):
            tl.store(at + k * SPEC.BLOCK, planes[k])
    else:
        for k in tl.static_range(SPEC.CODED):
            tl.store(at + k * SPEC.BLOCK, planes[k], mask=lane < plane)


@triton.jit
def get_source(buffers, plane, COUNT: tl.constexpr, SPEC: tl.constexpr):
    """The inverse of `put_source`, at each of COUNT pointers, all in flight at once: a tuple of planes for each."""
    lane = tl.arange(0, SPEC.BLOCK)
    tiles = ()
    for n in tl.static_range(COUNT):
        planes = ()
        for k in tl.static_range(SPEC.CODED):
            at = tl.multiple_of(buffers[n], 16) + k * SPEC.BLOCK + lane
            planes = planes + (tl.load(at, mask=lane < plane, other=0),)
        tiles = tiles + (planes,)
    return tiles
