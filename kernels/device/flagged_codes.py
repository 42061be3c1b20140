"""Tiles of codes in wide words: PLANES planes of codes (`device/wire.py`) of PLANE words each, and after them scales.

    words of a tensor   w0 w1 │ w2 w3 │ ...    two neighbours, loaded in one access of 16 bytes, or for fp32 two such
    words of codes      c0    │ c1    │ ...    pairs, from runs that are neighbours: so no element changes its thread
    scales              a wide word for each SHARED words of a plane: SCALES of each plane, 16 bits each

So a thread of a receiver reads its scales itself, with its codes, and nothing is shuffled but for the largest magnitude
of a block, among 16 threads, or 32 for fp32. At the end of a shard runs are shorter, but whole blocks (`plane_of`).
"""

from __future__ import annotations

import triton
import triton.language as tl

from tricomm.kernels.device.packing import end_of, load_elements, store_elements
from tricomm.kernels.device.planes import put_planes, put_scales, whole_planes
from tricomm.kernels.device.wire import dequantize, plane_of, quantize, values_of
from tricomm.kernels.reduction import raw_bits


@triton.jit
def load_pairs(x_ptr, start, left, limit, WHOLE: tl.constexpr, SPEC: tl.constexpr):
    """The tile at word `start` of a tensor that ends at element `limit`, with `left` words to the end of its shard: for
    each plane a tuple of CODED tiles of words; zeros past either end. WHOLE: `whole_planes` is true of it."""
    lane, plane = tl.arange(0, 2 * SPEC.PLANE), plane_of(left, SPEC)
    tile = ()
    for p in tl.static_range(SPEC.PLANES):
        words = ()
        for k in tl.static_range(p * SPEC.SCALES, (p + 1) * SPEC.SCALES):
            first, count = start + 2 * k * plane, _run_words(left, k, plane)
            if WHOLE:
                at = tl.multiple_of(x_ptr.to(tl.pointer_type(tl.int64)) + first, 16)
                run = tl.load(at + lane, mask=lane < count, other=0)
                words = words + tl.split(tl.reshape(run, [SPEC.PLANE, 2]))
            else:  # no tile of pairs, which would be moved between threads
                end = end_of(first + count, limit, SPEC.PACK)
                for n in tl.static_range(2):
                    words = words + (load_elements(x_ptr, first + n, end, SPEC.PLANE, 2),)
        tile = tile + (words,)
    return tile


@triton.jit
def store_pairs(y_ptr, start, values, left, limit, SPEC: tl.constexpr):
    """Round `values`, eight fp32 tiles for each plane, and store them: the inverse of `load_pairs`."""
    lane, plane = tl.arange(0, 2 * SPEC.PLANE), plane_of(left, SPEC)
    words = ()
    for n in tl.static_range(SPEC.PLANES * SPEC.CODED):
        word = tl.zeros([SPEC.PLANE], tl.int64)
        for j in tl.static_range(SPEC.PACK):
            value = values[n // SPEC.CODED][n % SPEC.CODED * SPEC.PACK + j]
            word |= raw_bits(value, SPEC.ELEMENT, SPEC.BITS) << (SPEC.BITS * j)
        words = words + (word,)
    if whole_planes(start, left, limit, y_ptr, SPEC.ALIGNED, SPEC):
        for k in tl.static_range(SPEC.PLANES * SPEC.SCALES):
            at = tl.multiple_of(y_ptr.to(tl.pointer_type(tl.int64)) + start + 2 * k * plane, 16)
            run = tl.reshape(tl.join(words[2 * k], words[2 * k + 1]), [2 * SPEC.PLANE])
            tl.store(at + lane, run, mask=lane < _run_words(left, k, plane))
    else:
        for n in tl.static_range(SPEC.PLANES * SPEC.CODED):
            first = start + n // 2 * 2 * plane
            end = end_of(first + _run_words(left, n // 2, plane), limit, SPEC.PACK)
            store_elements(y_ptr, first + n % 2, words[n], end, SPEC.PLANE, 2)


@triton.jit
def _run_words(left, K: tl.constexpr, plane):
    """int32: words of run K of a tile. Whole blocks in any case, but only so does the compiler know that a mask does
    not divide an access."""
    words = tl.minimum(tl.maximum(left - 2 * K * plane, 0), 2 * plane).to(tl.int32)
    return words // 32 * 32


@triton.jit
def put_words(pointer, tile, flag, left, SPEC: tl.constexpr):
    """Quantise the words of a tile, as of `load_pairs`, and push them as `put_coded` does."""
    values = ()
    for p in tl.static_range(SPEC.PLANES):
        values = values + (values_of(tile[p], SPEC),)
    codes, scales = coded(values, SPEC)
    put_coded(pointer, codes, scales, flag, left, SPEC)


@triton.jit
def coded(values, SPEC: tl.constexpr):
    """Quantise `values`, eight fp32 tiles for each plane: (planes of codes, for each plane its words' scales)."""
    codes, scales = (), ()
    for p in tl.static_range(SPEC.PLANES):
        words, of_blocks, by_word = quantize(values[p], SPEC)
        codes = codes + (words,)
        scales = scales + (by_word,)
    return codes, scales


@triton.jit
def decoded(codes, scales, SPEC: tl.constexpr):
    """The inverse of `coded`."""
    values = ()
    for p in tl.static_range(SPEC.PLANES):
        values = values + (dequantize(codes[p], scales[p], SPEC),)
    return values


@triton.jit
def put_coded(pointer, codes, scales, flag, left, SPEC: tl.constexpr):
    """Push what `coded` has returned, with `flag`, to its place at `pointer` (int64*, 16-byte aligned)."""
    plane = plane_of(left, SPEC)
    put_planes(pointer, codes, flag, SPEC.PLANES * plane, SPEC)
    bits = ()
    for n in tl.static_range(6):
        if n < SPEC.PLANES * SPEC.SCALES:
            bits = bits + (scales[n // SPEC.SCALES][n % SPEC.SCALES].to(tl.int32, bitcast=True),)
        else:
            bits = bits + (tl.zeros([SPEC.PLANE], tl.int32),)
    thirds = ()
    for n in tl.static_range(3):
        thirds = thirds + (((bits[2 * n] >> 16) & 0xFFFF) | bits[2 * n + 1],)
    put_scales(pointer, thirds, flag, plane, SPEC)


@triton.jit
def scales_in(tile, SPEC: tl.constexpr):
    """For each plane of a tile that was polled, its words' scales."""
    scales = ()
    for p in tl.static_range(SPEC.PLANES):
        some = ()
        for k in tl.static_range(p * SPEC.SCALES, (p + 1) * SPEC.SCALES):
            third = tile[SPEC.PLANES + k // 2]
            bits = third << 16 if k % 2 == 0 else third & -0x10000
            some = some + (bits.to(tl.float32, bitcast=True),)
        scales = scales + (some,)
    return scales
