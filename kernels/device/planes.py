"""Tiles for protocols `ll` and `ll128`: loaded, pushed, polled, reduced and stored plane by plane.

    ll       one plane        [ 0 ... BLOCK )                                16 bytes of mailbox a word of 8
    ll128    three planes     [ 0 ... p ) [ p ... 2p ) [ 2p ... 3p )         32 bytes of mailbox a word of each plane

A tile is a tuple of `SPEC.PLANES` int64 tiles of `SPEC.PLANE` words, neighbouring runs of a tensor, `SPEC.TILE` words
in all. Under `ll128` a word of each of three planes makes two wide words (`wide_words.py`). A full tile has p = PLANE.
The last tile of a run has a smaller p (`plane_words`), so that few words take few wide words. Therefore the functions
that load, push, poll or store a tile take `left`, the words from the tile's first to the end of its run, which is equal
on all ranks. A tile of codes (CODED > 1, `ll128`) ends with wide words of scales: one for SHARED words of a plane.

Poll: `device/arrival.py`. Place of a tile in a mailbox: `mailbox.ll_buffer`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tricomm.kernels.device.halves import halves, joined
from tricomm.kernels.device.packing import end_of, load_elements, load_words, store_elements, store_words
from tricomm.kernels.primitives import put_ll
from tricomm.kernels.reduction import accumulate, reduce_words
from tricomm.kernels.wide_words import load_wide, plane_words, put_wide, store_wide


@triton.jit
def plane_start(left, K: tl.constexpr, SPEC: tl.constexpr):
    """Where plane K begins in a tile, in words from the tile's first."""
    start = left * 0
    if SPEC.WIDE:
        start = K * plane_words(left, SPEC.PLANE)
    return start


@triton.jit
def plane_length(left, K: tl.constexpr, SPEC: tl.constexpr):
    """Words of plane K that are inside the run; 0 or less if none is."""
    length = left
    if SPEC.WIDE:
        plane = plane_words(left, SPEC.PLANE)
        length = tl.minimum(plane, tl.minimum(left - K * plane, SPEC.PLANE).to(tl.int32))
    return length


@triton.jit
def no_tile(SPEC: tl.constexpr):
    """A tile of zeros."""
    tile = ()
    for _ in tl.static_range(SPEC.PLANES):
        tile = tile + (tl.zeros([SPEC.PLANE], tl.int64),)
    return tile


@triton.jit
def no_scales(SPEC: tl.constexpr):
    """Zeros in place of the scales of a tile; an empty tuple if it has none."""
    thirds = ()
    for _ in tl.static_range(3 if SPEC.CODED > 1 else 0):
        thirds = thirds + (tl.zeros([SPEC.PLANE], tl.int32),)
    return thirds


@triton.jit
def put_scales(pointer, thirds, flag, count, SPEC: tl.constexpr):
    """Push the scales of the tile at `pointer`, of which the first `count` words of each plane are pushed: three int32
    tiles, equal in SHARED neighbours."""
    lane = tl.arange(0, SPEC.PLANE)
    low = joined((thirds[0], thirds[1]), SPEC.PTX)
    high = joined((thirds[2], (lane * 0 + flag).to(tl.int32)), SPEC.PTX)
    store_wide(_scale_words(pointer, SPEC), low, high, (lane % SPEC.SHARED == 0) & (lane < count))


@triton.jit
def see_scales(pointer, flag, SPEC: tl.constexpr):
    """The present scales of the tile at `pointer` for each word of a plane: (three int32 tiles, int32: 1 if their word
    has another flag)."""
    low, high = load_wide(_scale_words(pointer, SPEC))
    first, second = halves(low, SPEC.PTX)
    third, seen = halves(high, SPEC.PTX)
    return (first, second, third), (seen != flag).to(tl.int32)


@triton.jit
def _scale_words(pointer, SPEC: tl.constexpr):
    return pointer + 2 * SPEC.BLOCK + tl.arange(0, SPEC.PLANE) // SPEC.SHARED * 2


@triton.jit
def load_planes(x_ptr, start, left, numel, SPEC: tl.constexpr):
    """The tile at word `start` of x_ptr[0:numel]. Words past the end of the run are zeros with three planes; with one
    they are the words that follow in the tensor."""
    return load_planes_if(x_ptr, start, left, numel, SPEC.ALIGNED, SPEC)


@triton.jit
def load_planes_if(x_ptr, start, left, numel, ALIGNED, SPEC: tl.constexpr):
    """`load_planes` of a tensor that is 16-byte aligned if `ALIGNED`."""
    if SPEC.WIDE:
        tile = _load_three(x_ptr, start, left, numel, ALIGNED, SPEC)
    else:
        tile = (load_words(x_ptr, start, numel, SPEC.PLANE, ALIGNED),)
    return tile


@triton.jit
def store_planes(y_ptr, start, tile, left, numel, SPEC: tl.constexpr):
    """The inverse of `load_planes`: store the elements of the run that are in y_ptr[0:numel]."""
    store_planes_if(y_ptr, start, tile, left, numel, SPEC.ALIGNED, SPEC)


@triton.jit
def store_planes_if(y_ptr, start, tile, left, numel, ALIGNED, SPEC: tl.constexpr):
    """`store_planes` to a tensor that is 16-byte aligned if `ALIGNED`."""
    if SPEC.WIDE:
        _store_three(y_ptr, start, tile, left, numel, ALIGNED, SPEC)
    else:
        store_words(y_ptr, start, tile[0], numel, SPEC.PLANE, ALIGNED)


@triton.jit
def whole_planes(start, left, numel, like, ALIGNED, SPEC: tl.constexpr):
    """True if all words of the tile at word `start`, with `left` words to the end of its run, are entirely inside
    like[0:numel], so that they are loaded and stored as words."""
    if SPEC.WIDE:
        whole = _whole_words(like, start, left, numel, SPEC)
    else:
        whole = (start + SPEC.PLANE) * (64 // like.dtype.element_ty.primitive_bitwidth) <= numel
    return whole & ALIGNED


@triton.jit
def load_whole(x_ptr, start, left, SPEC: tl.constexpr):
    """`load_planes` of a tile for which `whole_planes` is true."""
    if SPEC.WIDE:
        tile = load_three(x_ptr.to(tl.pointer_type(tl.int64)) + start, left, False, SPEC)
    else:
        wide = tl.multiple_of(x_ptr.to(tl.pointer_type(tl.int64)) + start, 16)
        tile = (tl.load(wide + tl.arange(0, SPEC.PLANE)),)
    return tile


@triton.jit
def store_whole(y_ptr, start, tile, left, SPEC: tl.constexpr):
    """`store_planes` of a tile for which `whole_planes` is true."""
    if SPEC.WIDE:
        store_three(y_ptr.to(tl.pointer_type(tl.int64)) + start, tile, left, False, SPEC)
    else:
        wide = tl.multiple_of(y_ptr.to(tl.pointer_type(tl.int64)) + start, 16)
        tl.store(wide + tl.arange(0, SPEC.PLANE), tile[0])


@triton.jit
def put_planes(pointer, tile, flag, left, SPEC: tl.constexpr):
    """Push a tile with `flag` to `pointer` (int64*, 16-byte aligned), its place in a mailbox (`ll_buffer`)."""
    if SPEC.WIDE:
        put_wide(pointer, tile, flag, plane_words(left, SPEC.PLANE), SPEC.PLANE)
    else:
        put_ll(pointer, tile[0], flag, left, SPEC.PLANE, SPEC.PTX)


@triton.jit
def reduce_planes(tiles, SPEC: tl.constexpr):
    """The reduction of WORLD_SIZE `tiles` of raw words, in the order of the tuple, which is rank order."""
    reduced = ()
    for k in tl.static_range(SPEC.PLANES):
        parts = ()
        for r in tl.static_range(SPEC.WORLD_SIZE):
            parts = parts + (tiles[r][k],)
        reduced = reduced + (reduce_words(parts, SPEC),)
    return reduced


@triton.jit
def accumulate_planes(tiles, SOURCES: tl.constexpr, SPEC: tl.constexpr):
    """Accumulator tiles of SOURCES `tiles` of raw words: for each plane a tuple of `SPEC.PARTS`, as by `accumulate`."""
    sums = ()
    for k in tl.static_range(SPEC.PLANES):
        parts = ()
        for n in tl.static_range(SOURCES):
            parts = parts + (tiles[n][k],)
        sums = sums + (accumulate(parts, SOURCES, SPEC),)
    return sums


@triton.jit
def across(tuples, N: tl.constexpr, COUNT: tl.constexpr):
    """A tuple of element N of each of COUNT tuples."""
    members = ()
    for k in tl.static_range(COUNT):
        members = members + (tuples[k][N],)
    return members


@triton.jit
def _whole_words(like, start, left, numel, SPEC: tl.constexpr):
    """True if every word of the tile at word `start` is entirely inside like[0:numel]."""
    PACK: tl.constexpr = 64 // like.dtype.element_ty.primitive_bitwidth
    return (start + tl.minimum(left, SPEC.TILE)) * PACK <= numel


@triton.jit
def _load_three(x_ptr, start, left, numel, ALIGNED, SPEC: tl.constexpr):
    """Load three planes, all in flight at once: by words of 64 bits, or element by element if some are not whole
    words."""
    if whole_planes(start, left, numel, x_ptr, ALIGNED, SPEC):
        tile = load_whole(x_ptr, start, left, SPEC)
    else:
        PACK: tl.constexpr = 64 // x_ptr.dtype.element_ty.primitive_bitwidth
        tile = ()
        for k in tl.static_range(SPEC.PLANES):
            first = start + plane_start(left, k, SPEC)
            limit = end_of(first + plane_length(left, k, SPEC), numel, PACK)
            tile = tile + (load_elements(x_ptr, first, limit, SPEC.PLANE),)
    return tile


@triton.jit
def load_three(pointer, left, ALL: tl.constexpr, SPEC: tl.constexpr):
    """The three planes of the tile of words at `pointer` (int64*). ALL: no word is past the end of the run.

    Written as a loop of three rounds, which the compiler unrolls late. Its early passes then see one load, of a pointer
    that the loop increments, and stay fast.
    """
    lane = tl.arange(0, SPEC.PLANE)
    plane = plane_words(left, SPEC.PLANE)
    at = pointer + lane
    rest = left
    one, two, three = no_tile(SPEC)
    for _ in range(3):
        if ALL:
            words = tl.load(at)
            at += SPEC.PLANE
        else:
            words = tl.load(at, mask=lane < tl.minimum(plane, rest), other=0)
            at += plane
        one, two, three = two, three, words
        rest -= plane
    return one, two, three


@triton.jit
def store_three(pointer, tile, left, ALL: tl.constexpr, SPEC: tl.constexpr):
    """The inverse of `load_three`, for words of the type of `pointer`, also other than int64."""
    lane = tl.arange(0, SPEC.PLANE)
    plane = plane_words(left, SPEC.PLANE)
    at = pointer + lane
    rest = left
    one, two, three = tile
    for _ in range(3):
        if ALL:
            tl.store(at, one)
            at += SPEC.PLANE
        else:
            tl.store(at, one, mask=lane < tl.minimum(plane, rest))
            at += plane
        one, two, three = two, three, one
        rest -= plane


@triton.jit
def _store_three(y_ptr, start, tile, left, numel, ALIGNED, SPEC: tl.constexpr):
    if whole_planes(start, left, numel, y_ptr, ALIGNED, SPEC):
        store_whole(y_ptr, start, tile, left, SPEC)
    else:
        PACK: tl.constexpr = 64 // y_ptr.dtype.element_ty.primitive_bitwidth
        for k in tl.static_range(SPEC.PLANES):
            first = start + plane_start(left, k, SPEC)
            limit = end_of(first + plane_length(left, k, SPEC), numel, PACK)
            store_elements(y_ptr, first, tile[k], limit, SPEC.PLANE)
