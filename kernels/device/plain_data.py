"""Plain data between tensors and the buffers of `simple` mailboxes: runs of tiles, several in flight at once.

Flight    every loop has the tiles of all ranks, or UNROLLED tiles of one run, in flight at once: all are loaded
          before the first is stored, because a thread stalls at a store until its load has completed. Ends of runs that
          are no whole tile, and misaligned tensors, are handled tile by tile in the functions named `_ragged`. COMPACT:
          UNROLLED tiles of one rank's run, then of the next rank's, because addresses of all ranks take registers.
Order     every loop over ranks starts at this rank, so that no two ranks write to, or read from, the same rank at once.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tricomm.kernels.device.mailbox import simple_buffer
from tricomm.kernels.device.packing import (
    end_of,
    load_tile,
    load_tiles,
    load_words,
    move_tiles,
    shard_words,
    store_tile,
    store_words,
    whole_tile,
)
from tricomm.kernels.group import peer, peer_ahead, table_of
from tricomm.kernels.reduction import accumulate, combine, finish

# Tiles of a run that are in flight at once.
FULL, FEW = tl.constexpr(4), tl.constexpr(2)


@triton.jit
def stage(x_ptr, numel, chunk, SPEC: tl.constexpr):
    """Copy this block's tiles of the chunk into this rank's buffers, used as one staging area, for peers to read."""
    buffer = simple_buffer(chunk, table_of(chunk.group), 0, SPEC)
    push_part(x_ptr, numel, chunk.base, chunk.count, buffer, chunk, SPEC)


@triton.jit
def push_part(x_ptr, numel, start, count, buffer, chunk, SPEC: tl.constexpr):
    """Copy this block's tiles of `count` words of x_ptr[0:numel] from word `start` on to `buffer`, of a peer or this
    rank.

    UNROLLED tiles are in flight at once. `start` is even.
    """
    UNROLLED: tl.constexpr = FEW if SPEC.COMPACT else FULL
    limit = end_of(start + count, numel, 64 // x_ptr.dtype.element_ty.primitive_bitwidth)
    sources = runs(x_ptr.to(tl.pointer_type(tl.int64)) + start, chunk.stride, UNROLLED)
    targets = runs(buffer, chunk.stride, UNROLLED)
    ahead = (UNROLLED - 1) * chunk.stride
    first = chunk.own
    if SPEC.ALIGNED:  # Triton 3.6 crashes on a loop that has no round
        while whole_tile(first + ahead, count, start, limit, x_ptr, SPEC.BLOCK, SPEC.ALIGNED):
            move_tiles(sources, targets, first, UNROLLED, SPEC.BLOCK)
            first += UNROLLED * chunk.stride
    push_part_ragged(x_ptr, start, limit, first, count, buffer, chunk, SPEC)


@triton.jit
def push_part_ragged(x_ptr, start, limit, first, count, buffer, chunk, SPEC: tl.constexpr):
    """The rest of `push_part`: this block's tiles from word `first` on, of any length and alignment."""
    while first < count:
        words = load_words(x_ptr, start + first, limit, SPEC.BLOCK, SPEC.ALIGNED)
        store_tile(buffer, first, words, count, SPEC.BLOCK)
        first += chunk.stride


@triton.jit
def copy_part(y_ptr, numel, start, count, buffer, chunk, SPEC: tl.constexpr):
    """The inverse of `push_part`: copy from this rank's `buffer` to y_ptr."""
    UNROLLED: tl.constexpr = FEW if SPEC.COMPACT else FULL
    limit = end_of(start + count, numel, 64 // y_ptr.dtype.element_ty.primitive_bitwidth)
    sources = runs(buffer, chunk.stride, UNROLLED)
    targets = runs(y_ptr.to(tl.pointer_type(tl.int64)) + start, chunk.stride, UNROLLED)
    ahead = (UNROLLED - 1) * chunk.stride
    first = chunk.own
    if SPEC.ALIGNED:  # Triton 3.6 crashes on a loop that has no round
        while whole_tile(first + ahead, count, start, limit, y_ptr, SPEC.BLOCK, SPEC.ALIGNED):
            move_tiles(sources, targets, first, UNROLLED, SPEC.BLOCK)
            first += UNROLLED * chunk.stride
    copy_part_ragged(y_ptr, start, limit, first, count, buffer, chunk, SPEC)


@triton.jit
def copy_part_ragged(y_ptr, start, limit, first, count, buffer, chunk, SPEC: tl.constexpr):
    """The inverse of `push_part_ragged`."""
    while first < count:
        words = load_tile(buffer, first, count, SPEC.BLOCK)
        store_words(y_ptr, start + first, words, limit, SPEC.BLOCK, SPEC.ALIGNED)
        first += chunk.stride


@triton.jit
def runs(pointer, stride, UNROLLED: tl.constexpr):
    """Pointers to UNROLLED consecutive tiles of a block, the first at `pointer`."""
    pointers = ()
    for n in tl.static_range(UNROLLED):
        pointers = pointers + (pointer + n * stride,)
    return pointers


@triton.jit
def buffer_for(chunk, to, STAGED: tl.constexpr, SPEC: tl.constexpr):
    """This rank's buffer in the mailbox of rank `to`. STAGED: buffer `to` of this rank's own mailbox, which the switch
    reads for `to`."""
    if STAGED:
        buffer = simple_buffer(chunk, table_of(chunk.group), to, SPEC)
    else:
        buffer = simple_buffer(chunk, peer(chunk.group, to), chunk.me, SPEC)
    return buffer


@triton.jit
def buffer_ahead(chunk, STEP: tl.constexpr, STAGED: tl.constexpr, SPEC: tl.constexpr):
    """`buffer_for` rank (me + STEP) % WORLD_SIZE."""
    if STAGED:
        buffer = buffer_for(chunk, (chunk.me + STEP) % SPEC.WORLD_SIZE, STAGED, SPEC)
    else:
        buffer = simple_buffer(chunk, peer_ahead(chunk.group, STEP, SPEC.WORLD_SIZE), chunk.me, SPEC)
    return buffer


@triton.jit
def whole_pairs(count, STAGED: tl.constexpr):
    """`count`; STAGED: rounded up to an even number, because the switch reads words in pairs."""
    if STAGED:
        count = count + (count & 1)
    return count


@triton.jit
def push_plain_rows(tensors, chunk, SPEC: tl.constexpr):
    """Push row r of x_ptr[0 : WORLD_SIZE * numel] to rank r, this one included.

    `tensors` begins with (x_ptr, y_ptr, numel).
    """
    send_rows(tensors[0], tensors[2], chunk, False, SPEC)


@triton.jit
def send_rows(x_ptr, numel, chunk, STAGED: tl.constexpr, SPEC: tl.constexpr):
    """Copy row r of x_ptr[0 : WORLD_SIZE * numel] into the buffer for rank r (`buffer_for`), this rank included."""
    me = chunk.me
    if SPEC.COMPACT:
        for step in range(SPEC.WORLD_SIZE):
            to = (me + step) % SPEC.WORLD_SIZE
            buffer, words = buffer_for(chunk, to, STAGED, SPEC), whole_pairs(chunk.count, STAGED)
            push_part(x_ptr + to * numel, numel, chunk.base, words, buffer, chunk, SPEC)
    else:
        rows, buffers = (), ()
        for n in tl.static_range(SPEC.WORLD_SIZE):
            to = (me + n) % SPEC.WORLD_SIZE
            rows = rows + ((x_ptr + to * numel).to(tl.pointer_type(tl.int64)) + chunk.base,)
            buffers = buffers + (buffer_ahead(chunk, n, STAGED, SPEC),)
        for first in range(chunk.own, chunk.count, chunk.stride):
            if whole_tile(first, chunk.count, chunk.base, numel, x_ptr, SPEC.BLOCK, SPEC.ALIGNED):
                move_tiles(rows, buffers, first, SPEC.WORLD_SIZE, SPEC.BLOCK)
            else:
                send_rows_ragged(x_ptr, numel, first, chunk, STAGED, SPEC)


@triton.jit
def send_rows_ragged(x_ptr, numel, first, chunk, STAGED: tl.constexpr, SPEC: tl.constexpr):
    """The rest of `send_rows`: the tile at word `first` of every row, of any length and alignment."""
    for step in range(SPEC.WORLD_SIZE):
        to = (chunk.me + step) % SPEC.WORLD_SIZE
        words = load_words(x_ptr + to * numel, chunk.base + first, numel, SPEC.BLOCK, SPEC.ALIGNED)
        buffer = buffer_for(chunk, to, STAGED, SPEC)
        store_tile(buffer, first, words, whole_pairs(chunk.count, STAGED), SPEC.BLOCK)


@triton.jit
def row_buffer(chunk, head, source, STAGED: tl.constexpr, SPEC: tl.constexpr):
    """The buffer that holds the words of rank `source`. STAGED: the beginning of that rank's mailbox, else the buffer
    for it in this rank's mailbox."""
    if STAGED:
        buffer = simple_buffer(chunk, head, 0, SPEC)
    else:
        buffer = simple_buffer(chunk, table_of(chunk.group), source, SPEC)
    return buffer


@triton.jit
def copy_rows(y_ptr, numel, STAGED: tl.constexpr, chunk, SPEC: tl.constexpr):
    """Copy the chunk's words of each rank r, from this rank's buffer or from r's staging area, into row r of y_ptr[0 :
    WORLD_SIZE * numel]. The tiles of all ranks are in flight at once."""
    me = chunk.me
    if SPEC.COMPACT:
        for step in range(SPEC.WORLD_SIZE):
            source = (me + step) % SPEC.WORLD_SIZE
            buffer = row_buffer(chunk, peer(chunk.group, source), source, STAGED, SPEC)
            copy_part(y_ptr + source * numel, numel, chunk.base, chunk.count, buffer, chunk, SPEC)
    else:
        rows, targets, buffers = (), (), ()
        for n in tl.static_range(SPEC.WORLD_SIZE):
            source = (me + n) % SPEC.WORLD_SIZE
            rows = rows + (y_ptr + source * numel,)
            targets = targets + (rows[n].to(tl.pointer_type(tl.int64)) + chunk.base,)
            head = peer_ahead(chunk.group, n, SPEC.WORLD_SIZE)
            buffers = buffers + (row_buffer(chunk, head, source, STAGED, SPEC),)
        for first in range(chunk.own, chunk.count, chunk.stride):
            if whole_tile(first, chunk.count, chunk.base, numel, y_ptr, SPEC.BLOCK, SPEC.ALIGNED):
                move_tiles(buffers, targets, first, SPEC.WORLD_SIZE, SPEC.BLOCK)
            else:
                for n in tl.static_range(SPEC.WORLD_SIZE):
                    words = load_tile(buffers[n], first, chunk.count, SPEC.BLOCK)
                    store_words(rows[n], chunk.base + first, words, numel, SPEC.BLOCK, SPEC.ALIGNED)


@triton.jit
def push_shards(x_ptr, numel, chunk, STAGED: tl.constexpr, SPEC: tl.constexpr):
    """Copy shard r of the chunk of x_ptr[0:numel] into the buffer for rank r (`buffer_for`), this rank included.

    Starts at this rank, so that no two ranks write to the same rank at the same time. The tiles for all ranks are in
    flight at once.
    """
    me = chunk.me
    shard = shard_words(chunk.count, SPEC.WORLD_SIZE)
    if SPEC.COMPACT:
        for step in range(SPEC.WORLD_SIZE):
            to = (me + step) % SPEC.WORLD_SIZE
            theirs = whole_pairs(tl.minimum(chunk.count - to * shard, shard), STAGED)
            push_part(x_ptr, numel, chunk.base + to * shard, theirs, buffer_for(chunk, to, STAGED, SPEC), chunk, SPEC)
    else:
        behind = chunk.base + (SPEC.WORLD_SIZE - 1) * shard
        last = chunk.count - (SPEC.WORLD_SIZE - 1) * shard  # words of the shortest shard; negative if it is empty
        shards, buffers = (), ()
        for n in tl.static_range(SPEC.WORLD_SIZE):
            to = (me + n) % SPEC.WORLD_SIZE
            shards = shards + (x_ptr.to(tl.pointer_type(tl.int64)) + chunk.base + to * shard,)
            buffers = buffers + (buffer_ahead(chunk, n, STAGED, SPEC),)
        for first in range(chunk.own, shard, chunk.stride):
            if whole_tile(first, last, behind, numel, x_ptr, SPEC.BLOCK, SPEC.ALIGNED):
                move_tiles(shards, buffers, first, SPEC.WORLD_SIZE, SPEC.BLOCK)
            else:
                push_shards_ragged(x_ptr, numel, first, chunk, STAGED, SPEC)


@triton.jit
def push_shards_ragged(x_ptr, numel, first, chunk, STAGED: tl.constexpr, SPEC: tl.constexpr):
    """The rest of `push_shards`: the tile at word `first` of every shard, of any length and alignment."""
    shard = shard_words(chunk.count, SPEC.WORLD_SIZE)
    for step in range(SPEC.WORLD_SIZE):
        to = (chunk.me + step) % SPEC.WORLD_SIZE
        start, theirs = chunk.base + to * shard, tl.minimum(chunk.count - to * shard, shard)
        limit = end_of(start + theirs, numel, 64 // x_ptr.dtype.element_ty.primitive_bitwidth)
        words = load_words(x_ptr, start + first, limit, SPEC.BLOCK, SPEC.ALIGNED)
        buffer = buffer_for(chunk, to, STAGED, SPEC)
        store_tile(buffer, first, words, whole_pairs(theirs, STAGED), SPEC.BLOCK)


@triton.jit
def take_shards(y_ptr, numel, half, chunk, SPEC: tl.constexpr):
    """Copy the chunk's shards, except this rank's, from the second halves of the buffers of their senders to y_ptr."""
    shard = shard_words(chunk.count, SPEC.WORLD_SIZE)
    if SPEC.COMPACT:
        for step in range(1, SPEC.WORLD_SIZE):
            source = (chunk.me + step) % SPEC.WORLD_SIZE
            theirs = tl.minimum(chunk.count - source * shard, shard)
            buffer = simple_buffer(chunk, table_of(chunk.group), source, SPEC) + half
            copy_part(y_ptr, numel, chunk.base + source * shard, theirs, buffer, chunk, SPEC)
    else:
        behind = chunk.base + (SPEC.WORLD_SIZE - 1) * shard
        last = chunk.count - (SPEC.WORLD_SIZE - 1) * shard
        shards, buffers = (), ()
        for n in tl.static_range(1, SPEC.WORLD_SIZE):
            source = (chunk.me + n) % SPEC.WORLD_SIZE
            shards = shards + (y_ptr.to(tl.pointer_type(tl.int64)) + chunk.base + source * shard,)
            buffers = buffers + (simple_buffer(chunk, table_of(chunk.group), source, SPEC) + half,)
        for first in range(chunk.own, shard, chunk.stride):
            if whole_tile(first, last, behind, numel, y_ptr, SPEC.BLOCK, SPEC.ALIGNED):
                move_tiles(buffers, shards, first, SPEC.WORLD_SIZE - 1, SPEC.BLOCK)
            else:
                take_shards_ragged(y_ptr, numel, half, first, chunk, SPEC)


@triton.jit
def take_shards_ragged(y_ptr, numel, half, first, chunk, SPEC: tl.constexpr):
    """The rest of `take_shards`: the tile at word `first` of every shard except this rank's, of any length and
    alignment."""
    shard = shard_words(chunk.count, SPEC.WORLD_SIZE)
    for step in range(1, SPEC.WORLD_SIZE):
        source = (chunk.me + step) % SPEC.WORLD_SIZE
        start, theirs = chunk.base + source * shard, tl.minimum(chunk.count - source * shard, shard)
        buffer = simple_buffer(chunk, table_of(chunk.group), source, SPEC) + half
        words = load_tile(buffer, first, theirs, SPEC.BLOCK)
        limit = end_of(start + theirs, numel, 64 // y_ptr.dtype.element_ty.primitive_bitwidth)
        store_words(y_ptr, start + first, words, limit, SPEC.BLOCK, SPEC.ALIGNED)


@triton.jit
def pass_on_in_turn(but, first, words, count, half, chunk, SPEC: tl.constexpr):
    """Copy the tile at word `first` of `count` into the second half of this rank's buffer at all other ranks except
    `but`, one after another."""
    for step in range(1, SPEC.WORLD_SIZE):
        to = (chunk.me + step) % SPEC.WORLD_SIZE
        if to != but:
            buffer = simple_buffer(chunk, peer(chunk.group, to), chunk.me, SPEC) + half
            store_tile(buffer, first, words, count, SPEC.BLOCK)


@triton.jit
def reduce_in_turn(buffers, first, count, AT_ONCE: tl.constexpr, SPEC: tl.constexpr):
    """The tile at word `first` of `count` of all ranks' `buffers`, reduced in rank order; AT_ONCE loads are in flight
    at once."""
    sums = ()
    for begin in tl.static_range(0, SPEC.WORLD_SIZE, AT_ONCE):
        some = ()
        for n in tl.static_range(begin, min(begin + AT_ONCE, SPEC.WORLD_SIZE)):
            some = some + (buffers[n],)
        tiles = load_tiles(some, first, count, min(AT_ONCE, SPEC.WORLD_SIZE - begin), SPEC.BLOCK)
        for n in tl.static_range(min(AT_ONCE, SPEC.WORLD_SIZE - begin)):
            one = accumulate((tiles[n],), 1, SPEC)
            if begin + n == 0:
                sums = one
            else:
                sums = combine(sums, one, SPEC)
    return finish(sums, SPEC)
