"""Rows: how a kernel with an epilogue divides a tensor [rows, hidden]. A block takes whole rows.

    row      ROW words of 64 bits. A multiple of 16 bytes, because `hidden` is a multiple of 8
    shard    one of SHARDS in a row, SHARD words each, the last ones fewer; one shot has one shard, two shots one per
             rank
    tile     one of STEPS in a shard; a row's tile i is step i // SHARDS of shard i % SHARDS
    plane    int64 [PLANE], one of PLANES in a tile (`device/planes.py`); a row's plane n is plane n % PLANES of its
             tile n // PLANES

All of these are known when the kernel is compiled. In a mailbox a shard has room for whole tiles, PITCH words.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from tricomm.kernels.device.mailbox import flagged_bytes, ll_buffer, ll_place
from tricomm.kernels.device.packing import load_elements, raw_pointer
from tricomm.kernels.device.planes import load_three, plane_length, plane_start, put_planes, store_three
from tricomm.kernels.group import table_of
from tricomm.kernels.primitives import store_ll
from tricomm.kernels.reduction import element, raw_bits


class Row(NamedTuple):
    """A reduced row, the argument of an epilogue.

    number     its number in the tensor, int64
    planes     its words: a tuple of ROW_PLANES int64 planes; `words_at` has their places in the row
    prepared   the result of the epilogue's `prepare`, which ran before the row had arrived
    y_ptr      the second tensor of the launch, as integers of the elements' width
    """

    number: Any
    planes: Any
    prepared: Any
    y_ptr: Any


@triton.jit
def values(row, n: tl.constexpr, j: tl.constexpr, SPEC: tl.constexpr):
    """fp32 [PLANE]: element j of each word of the row's plane n; `columns_at` has their columns."""
    return element(row.planes[n], j, SPEC.ELEMENT, SPEC.BITS)


@triton.jit
def columns_at(n: tl.constexpr, j: tl.constexpr, SPEC: tl.constexpr):
    """The columns of `values` (int32 [PLANE]), and a mask of those inside the row."""
    at, inside = words_at(n, SPEC)
    return at * SPEC.PACK + j, inside


@triton.jit
def words_at(n: tl.constexpr, SPEC: tl.constexpr):
    """The places in a row of the words of plane n (int32 [PLANE]), and a mask of those inside the row."""
    lane = tl.arange(0, SPEC.PLANE)
    return SPEC.FIRSTS[n] + lane, lane < SPEC.LENGTHS[n]


@triton.jit
def fresh(number, PTX: tl.constexpr):
    """`number` (int64), hidden from the compiler's optimisations. The compiler would keep each address derived from a
    loop counter in a separate register and increment all of them; addresses derived from this number differ by
    constants."""
    if PTX:
        number = tl.inline_asm_elementwise("mov.b64 $0, $1;", "=l,l", [number], dtype=tl.int64, is_pure=True, pack=1)
    return number


@triton.jit
def load_tile(x_ptr, number, i: tl.constexpr, SPEC: tl.constexpr):
    """Tile i of row `number` of a tensor of the reduced type; zeros past the end of its shard."""
    return load_tile_at(x_ptr, number, SPEC.STARTS[i], SPEC.LEFTS[i], SPEC.LEFTS[i] >= SPEC.TILE, SPEC)


@triton.jit
def load_tile_at(x_ptr, number, start, left, ALL: tl.constexpr, SPEC: tl.constexpr):
    """The tile at word `start` of row `number`, `left` words before its shard ends. ALL: all words of the tile are
    inside the shard."""
    if SPEC.ALIGNED:
        wide = tl.multiple_of(x_ptr.to(tl.pointer_type(tl.int64)) + number * SPEC.ROW, 16) + start
        if SPEC.WIDE:
            tile = load_three(wide, left, ALL, SPEC)
        elif ALL:
            tile = (tl.load(wide + tl.arange(0, SPEC.PLANE)),)
        else:
            lane = tl.arange(0, SPEC.PLANE)
            tile = (tl.load(wide + lane, mask=lane < left, other=0),)
    else:
        raw = raw_pointer(x_ptr, SPEC.BITS) + number * SPEC.HIDDEN
        tile = ()
        for k in tl.static_range(SPEC.PLANES):
            first = start + plane_start(left, k, SPEC)
            end = (first + plane_length(left, k, SPEC)) * SPEC.PACK
            tile = tile + (load_elements(raw, first, end, SPEC.PLANE),)
    return tile


@triton.jit
def store_tile(y_ptr, number, i: tl.constexpr, tile, BITS: tl.constexpr, SPEC: tl.constexpr):
    """Store tile i of row `number` with BITS bits per element; a word of `tile` has the PACK elements of one word
    packed. BITS times PACK is 8 or more."""
    WHOLE: tl.constexpr = BITS * SPEC.PACK
    ALL: tl.constexpr = SPEC.LEFTS[i] >= SPEC.TILE
    if SPEC.ALIGNED:
        y = raw_pointer(y_ptr, WHOLE) + number * SPEC.ROW
        if WHOLE == 64:
            y = tl.multiple_of(y, 16)
        y += SPEC.STARTS[i]
        TYPE: tl.constexpr = y.dtype.element_ty
        if SPEC.WIDE:
            store_three(y, (tile[0].to(TYPE), tile[1].to(TYPE), tile[2].to(TYPE)), SPEC.LEFTS[i], ALL, SPEC)
        elif ALL:
            tl.store(y + tl.arange(0, SPEC.PLANE), tile[0].to(TYPE))
        else:
            lane = tl.arange(0, SPEC.PLANE)
            tl.store(y + lane, tile[0].to(TYPE), mask=lane < SPEC.LEFTS[i])
    else:
        UNIT: tl.constexpr = max(BITS, 8)
        UNITS: tl.constexpr = WHOLE // UNIT
        for k in tl.static_range(SPEC.PLANES):
            at, inside = words_at(i * SPEC.PLANES + k, SPEC)
            y = raw_pointer(y_ptr, UNIT) + number * (SPEC.ROW * UNITS) + at * UNITS
            for j in range(UNITS):
                tl.store(y, (tile[k] >> (UNIT * j)).to(y.dtype.element_ty), mask=inside)
                y += 1


@triton.jit
def put_tile(chunk, head, place, tile, left, SPEC: tl.constexpr):
    """Push a tile to payload word `place` of this rank's buffer in the peer's arena at `head`."""
    if SPEC.WIDE:
        put_planes(ll_buffer(chunk, head, chunk.me, place, SPEC), tile, chunk.epoch, left, SPEC)
    else:  # the same offset in every arena, so that a peer's address takes one addition
        lane = tl.arange(0, SPEC.PLANE)
        words = ll_place(chunk, chunk.me, place, SPEC) + 2 * lane
        store_ll(head + words, tile[0], chunk.epoch, lane < left, SPEC.PTX)


@triton.jit
def places(chunk, place, SPEC: tl.constexpr):
    """Pointers into this rank's mailbox for `poll_planes`: a tuple of TOGETHER tiles from payload word `place` on, each
    for every rank."""
    first = ll_buffer(chunk, table_of(chunk.group), 0, place, SPEC)
    pointers = ()
    for g in tl.static_range(SPEC.TOGETHER):
        for r in tl.static_range(SPEC.WORLD_SIZE):
            at = first + g * tile_words(SPEC) + r * (flagged_bytes(chunk.group, SPEC) // 8)
            pointers = pointers + (tl.multiple_of(at, 16),)
    return pointers


@triton.jit
def tile_words(SPEC: tl.constexpr):
    """64-bit words that a tile takes in a mailbox of `ll` or `ll128`."""
    return 2 * SPEC.BLOCK


@triton.jit
def of_step(tiles, g: tl.constexpr, SPEC: tl.constexpr):
    """The tiles of all ranks for step g of the steps that were polled at once."""
    step = ()
    for r in tl.static_range(SPEC.WORLD_SIZE):
        step = step + (tiles[g * SPEC.WORLD_SIZE + r],)
    return step


@triton.jit
def own_row(x_ptr, operands, number, SPEC: tl.constexpr):
    """All tiles of a row to send; the loads are in flight at once."""
    tiles = ()
    for i in tl.static_range(SPEC.ROW_TILES):
        tile = own_tile(x_ptr, operands, number, SPEC.STARTS[i], SPEC.LEFTS[i], SPEC.LEFTS[i] >= SPEC.TILE, SPEC)
        tiles = tiles + (tile,)
    return tiles


@triton.jit
def own_tile(x_ptr, operands, number, start, left, ALL: tl.constexpr, SPEC: tl.constexpr):
    """A tile of a row to send: loaded from the input by `load_tile_at`, or computed by the prologue."""
    if SPEC.PROLOGUE is None:
        tile = load_tile_at(x_ptr, number, start, left, ALL, SPEC)
    else:
        tile = ()
        for k in tl.static_range(SPEC.PLANES):
            first = start + plane_start(left, k, SPEC)
            tile = tile + (_made(number, operands, first, plane_length(left, k, SPEC), SPEC),)
    return tile


@triton.jit
def _made(number, operands, first, length, SPEC: tl.constexpr):
    """The plane of `length` words at word `first` of row `number`, computed by the prologue in fp32 and rounded to the
    type; zeros after the last word."""
    lane = tl.arange(0, SPEC.PLANE * SPEC.PACK)
    # `first` and `length` are even, so that accesses are 16 bytes wide.
    columns = tl.multiple_of(tl.zeros([], tl.int32) + first * SPEC.PACK, 2 * SPEC.PACK) + lane
    inside = lane < tl.multiple_of(tl.zeros([], tl.int32) + length * SPEC.PACK, 2 * SPEC.PACK)
    values = in_fp32(SPEC.PROLOGUE(number, columns, inside, operands, SPEC), columns)
    bits = raw_bits(tl.where(inside, values, 0.0), SPEC.ELEMENT, SPEC.BITS) << (lane % SPEC.PACK * SPEC.BITS)
    return tl.sum(tl.reshape(bits, [SPEC.PLANE, SPEC.PACK]), axis=1)


@triton.jit
def in_fp32(values, columns):
    """`values`, a prologue's result at `columns`, in fp32."""
    tl.static_assert(values.shape == columns.shape, "a prologue has to return a block in the shape of its columns")
    return values.to(tl.float32)


@triton.jit
def try_functions(y_ptr, operands, SPEC: tl.constexpr):
    """Run a user's functions on row 0 before a call, to find errors: the epilogue with a reduced row of zeros, the
    prologue on the first columns."""
    number, columns = tl.zeros([], tl.int64), tl.arange(0, SPEC.PLANE * SPEC.PACK)
    prepared = SPEC.PREPARE(number, operands, SPEC)
    if SPEC.PROLOGUE is not None:
        in_fp32(SPEC.PROLOGUE(number, columns, columns < SPEC.HIDDEN, operands, SPEC), columns)
    planes = ()
    for _ in tl.static_range(SPEC.ROW_PLANES):
        planes = planes + (tl.zeros([SPEC.PLANE], tl.int64),)
    SPEC.EPILOGUE(Row(number, planes, prepared, y_ptr), operands, SPEC)


@triton.jit
def rows_of(chunk, SPEC: tl.constexpr):
    """(first row of the chunk, number of its rows, this block's first row within the chunk, step to this block's next
    row)."""
    own = tl.program_id(0).to(tl.int64)
    return _rows(chunk.base, SPEC), _rows(chunk.count, SPEC), own, tl.num_programs(0)


@triton.jit
def _rows(words, SPEC: tl.constexpr):
    """Rows in `words` words. The division is unsigned, because a signed one takes several times as long."""
    return (words.to(tl.uint64) // SPEC.ROW).to(tl.int64)
