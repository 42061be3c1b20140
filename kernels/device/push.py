"""Push tiles into peers' buffers, synchronize, and receive tiles from this rank's buffers, by any protocol.

    open_epoch ─▶ push_* (tiles of the input into this rank's buffer at some ranks) ─▶ synchronize ─▶ receive

LL        the words carry flags, so there is no barrier: `receive_*` polls words and headers in one loop
          (`device/arrival.py`), and a rank or block that receives nothing waits for headers. Hops: 1. The `first_*`
          functions load the tiles that are pushed first, in flight together with the epoch (`run_ll` in
          `device/chunks.py`). Both widths of words (`device/planes.py`).
simple    plain data; `synchronize` is a barrier after the pushes, and `receive` loads the data that has arrived. Hops:
          1, a barrier. The next chunk is pushed before this one is received (`run_pushed` in `device/chunks.py`).

Bytes     the pushed data; under `ll` twice that, because half of it is flags, under `ll128` 4/3. Nothing is read from a
          peer.
Waits     header, in every chunk, from every peer, also if no data is exchanged with it: the peer made the same call and
          has left the epoch before the last. Under `simple` it is release to acquire at `.sys`: data that the peer's
          block b pushed here is visible. LL words: the flag is this epoch; flag and payload are one access.
Reuse     two mailboxes, by the epoch's parity. A peer writes epoch e + 2 only after it has seen this block's header of
          e + 1, sent after this block has received all its data of e. Under `simple` the peer may write it before it
          receives e + 1 itself. A rank that receives nothing (the root of a broadcast, all ranks but the root of a
          gather) sends and awaits the same headers, so it never runs ahead.
Copies    received data is copied out of the mailbox, because only its own rank knows where an output is.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tricomm.kernels.device.arrival import poll_planes
from tricomm.kernels.device.mailbox import clear_idle, clears, flagged_bytes, ll_buffer, simple_buffer
from tricomm.kernels.device.packing import load_tiles, store_tile
from tricomm.kernels.device.plain_data import copy_part, copy_rows, push_part
from tricomm.kernels.device.planes import load_planes, put_planes, reduce_planes, store_planes
from tricomm.kernels.group import peer, peer_ahead, table_of
from tricomm.kernels.primitives import barrier, send_headers, wait_headers


@triton.jit
def open_epoch(chunk, PARTS: tl.constexpr, SPEC: tl.constexpr):
    """Clear the idle mailbox if this epoch does that. Under LL then send the headers: this block is in this epoch.

    That header is relaxed, because every word of data has a flag. After a clearing it releases the zeros: otherwise one
    of them could overwrite a word that a peer pushed after it had seen the header.
    """
    group, epoch, call = chunk.group, chunk.epoch, chunk.call
    clear_idle(group, epoch, PARTS, SPEC)
    if SPEC.LL:
        if clears(epoch):
            send_headers(group, epoch, call, 0, True, SPEC.WORLD_SIZE, SPEC.LANES, SPEC.PTX)
        else:
            send_headers(group, epoch, call, 0, False, SPEC.WORLD_SIZE, SPEC.LANES, SPEC.PTX)


@triton.jit
def synchronize(chunk, PHASE: tl.constexpr, SPEC: tl.constexpr):
    """Under `simple` a barrier: every peer's block has made the same call, and its earlier writes are visible. Returns
    the status."""
    group, epoch, call = chunk.group, chunk.epoch, chunk.call
    if SPEC.LL:
        status = wait_headers(group, epoch, call, PHASE, SPEC.WORLD_SIZE, SPEC.LANES, SPEC.PTX)
    else:
        status = barrier(group, epoch, call, PHASE, SPEC.WORLD_SIZE, SPEC.LANES, SPEC.PTX, SPEC.SWITCH)
    return status


@triton.jit
def push_tile(chunk, to, first, tile, count, SPEC: tl.constexpr):
    """Push the tile at word `first` of a run of `count` into this rank's buffer at rank `to`."""
    head = peer(chunk.group, to)
    if SPEC.LL:
        put_planes(ll_buffer(chunk, head, chunk.me, first, SPEC), tile, chunk.epoch, count - first, SPEC)
    else:
        store_tile(simple_buffer(chunk, head, chunk.me, SPEC), first, tile[0], count, SPEC.BLOCK)


@triton.jit
def push_row(x_ptr, numel, to, chunk, SPEC: tl.constexpr):
    """Simple: push this block's tiles of the chunk of x_ptr[0:numel] to rank `to`."""
    buffer = simple_buffer(chunk, peer(chunk.group, to), chunk.me, SPEC)
    push_part(x_ptr, numel, chunk.base, chunk.count, buffer, chunk, SPEC)


@triton.jit
def first_tile(tensors, chunk, SPEC: tl.constexpr):
    """LL: load this block's first tile of the chunk, for `push_to_all` and `push_to_others`."""
    return nth_tile(tensors, chunk, chunk.own, SPEC)


@triton.jit
def nth_tile(tensors, chunk, first, SPEC: tl.constexpr):
    """The tile at word `first` of the chunk."""
    return load_planes(tensors[0], chunk.base + first, chunk.count - first, tensors[2], SPEC)


@triton.jit
def push_to_all(tensors, chunk, tile, SPEC: tl.constexpr):
    """LL: push this block's tiles of the chunk, of which `tile` is the first, to every rank, this one included."""
    push_to_ranks(tensors, chunk, tile, 0, SPEC)


@triton.jit
def push_to_others(tensors, chunk, tile, SPEC: tl.constexpr):
    """LL: `push_to_all` except to this rank."""
    push_to_ranks(tensors, chunk, tile, 1, SPEC)


@triton.jit
def push_to_ranks(tensors, chunk, tile, FIRST: tl.constexpr, SPEC: tl.constexpr):
    """LL: push to every rank, starting with rank (me + FIRST) % WORLD_SIZE, so that no two ranks write to the same rank
    at the same time."""
    first = chunk.own
    while first < chunk.count:
        for step in tl.static_range(FIRST, SPEC.WORLD_SIZE):
            buffer = ll_buffer(chunk, peer_ahead(chunk.group, step, SPEC.WORLD_SIZE), chunk.me, first, SPEC)
            put_planes(buffer, tile, chunk.epoch, chunk.count - first, SPEC)
        first += chunk.stride
        if first < chunk.count:
            tile = nth_tile(tensors, chunk, first, SPEC)


@triton.jit
def first_tile_and_root(tensors, chunk, SPEC: tl.constexpr):
    """LL: load (`first_tile`, the head of the arena of the root, rank tensors[3]), for `push_to_root`."""
    return first_tile(tensors, chunk, SPEC), peer(chunk.group, tensors[3])


@triton.jit
def push_to_root(tensors, chunk, loaded, SPEC: tl.constexpr):
    """LL: push this block's tiles of the chunk to the root; `loaded` is the result of `first_tile_and_root`."""
    tile, head = loaded
    first = chunk.own
    while first < chunk.count:
        buffer = ll_buffer(chunk, head, chunk.me, first, SPEC)
        put_planes(buffer, tile, chunk.epoch, chunk.count - first, SPEC)
        first += chunk.stride
        if first < chunk.count:
            tile = nth_tile(tensors, chunk, first, SPEC)


@triton.jit
def first_tiles(tensors, chunk, SPEC: tl.constexpr):
    """LL: load the tiles that `push_rows` pushes first: this block's first tile of every row of the chunk, or only of
    the next rank's row if the registers cannot hold all of them."""
    if SPEC.ROWS_AT_ONCE:
        tiles = nth_tiles(tensors, chunk, chunk.own, SPEC)
    else:
        tiles = row_tile(tensors, chunk, 1, chunk.own, SPEC)
    return tiles


@triton.jit
def nth_tiles(tensors, chunk, first, SPEC: tl.constexpr):
    """The tile at word `first` of each of the chunk's WORLD_SIZE rows, starting with this rank's."""
    tiles = ()
    for step in tl.static_range(SPEC.WORLD_SIZE):
        tiles = tiles + (row_tile(tensors, chunk, step, first, SPEC),)
    return tiles


@triton.jit
def row_tile(tensors, chunk, step, first, SPEC: tl.constexpr):
    """The tile at word `first` of the row for rank (me + `step`) % WORLD_SIZE."""
    to = (chunk.me + step) % SPEC.WORLD_SIZE
    row = tensors[0] + to * tensors[2]
    return load_planes(row, chunk.base + first, chunk.count - first, tensors[2], SPEC)


@triton.jit
def push_rows(tensors, chunk, tiles, SPEC: tl.constexpr):
    """LL: push row r of the chunk to rank r, this one included; `tiles` is the result of `first_tiles`.

    Starts at this rank or the next one, so that no two ranks write to the same rank at the same time.
    """
    first = chunk.own
    if SPEC.ROWS_AT_ONCE:
        while first < chunk.count:
            for step in tl.static_range(SPEC.WORLD_SIZE):
                buffer = ll_buffer(chunk, peer_ahead(chunk.group, step, SPEC.WORLD_SIZE), chunk.me, first, SPEC)
                put_planes(buffer, tiles[step], chunk.epoch, chunk.count - first, SPEC)
            first += chunk.stride
            if first < chunk.count:
                tiles = nth_tiles(tensors, chunk, first, SPEC)
    else:
        step = 1
        more = first < chunk.count
        while more:
            push_tile(chunk, (chunk.me + step) % SPEC.WORLD_SIZE, first, tiles, chunk.count, SPEC)
            first += chunk.stride
            if first >= chunk.count:
                first = chunk.own
                step += 1
            more = step <= SPEC.WORLD_SIZE
            if more:
                tiles = row_tile(tensors, chunk, step, first, SPEC)


@triton.jit
def receive(chunk, source, first, count, SOURCES: tl.constexpr, SPEC: tl.constexpr):
    """The tile at word `first` of this rank's buffers for ranks `source` to `source` + SOURCES - 1: (a tuple of tiles,
    status)."""
    group = chunk.group
    status = 0
    if SPEC.LL:
        pointers, lefts = (), ()
        for n in tl.static_range(SOURCES):
            pointers = pointers + (ll_buffer(chunk, table_of(group), source + n, first, SPEC),)
            lefts = lefts + (count - first,)
        tiles, status = poll_planes(chunk, pointers, lefts, SOURCES, False, SPEC)
    else:
        buffers = ()
        for n in tl.static_range(SOURCES):
            buffers = buffers + (simple_buffer(chunk, table_of(group), source + n, SPEC),)
        words = load_tiles(buffers, first, count, SOURCES, SPEC.BLOCK)
        tiles = ()
        for n in tl.static_range(SOURCES):
            tiles = tiles + ((words[n],),)
    return tiles, status


@triton.jit
def meet_ahead(chunk, alone, status, SPEC: tl.constexpr):
    """LL: wait for every peer's header before any word, if this epoch clears a mailbox or this block is `alone`, which
    means that it has no words to take. Returns the status. A TAKE (`run_ll`) calls this first.

    A poll also waits for headers, but only some threads acquire them. After a clearing all threads must, before one of
    them pushes over the zeros; this takes a barrier, because a reduction inside a single warp orders no memory. And a
    block without words must not read a mailbox, because the place that it would read is another block's, and peers
    overwrite it as soon as that block has taken it.
    """
    if (status == 0) & (clears(chunk.epoch) | alone):
        status = synchronize(chunk, 0, SPEC)
        tl.debug_barrier()
    return status


@triton.jit
def arrived(chunk, source, first, SOURCES: tl.constexpr, SPEC: tl.constexpr):
    """LL: wait for every peer's header and for the tile at word `first` of the chunk in this rank's buffers for ranks
    `source` to `source` + SOURCES - 1: (a tuple of tiles, status)."""
    pointers, lefts = (), ()
    # The comparison is always true, but the compiler does not know it; otherwise it would keep an address for each
    # source.
    buffer = ll_buffer(chunk, table_of(chunk.group), source, tl.where(first < chunk.count, first, 0), SPEC)
    for n in tl.static_range(SOURCES):
        pointers = pointers + (tl.multiple_of(buffer + n * (flagged_bytes(chunk.group, SPEC) // 8), 16),)
        lefts = lefts + (chunk.count - first,)
    return poll_planes(chunk, pointers, lefts, SOURCES, True, SPEC)


@triton.jit
def receive_row(y_ptr, numel, source, chunk, takes, status, SPEC: tl.constexpr):
    """Copy the chunk's words from `source` into y_ptr[0:numel], if this rank `takes` them and `status` is zero; returns
    the status.

    Under LL a block without words waits for headers.
    """
    first = chunk.own
    if SPEC.LL:
        status = meet_ahead(chunk, (first >= chunk.count) | (not takes), status, SPEC)
        more = (status == 0) & (first < chunk.count) & takes
        while more:
            tiles, status = arrived(chunk, source, first, 1, SPEC)
            if status == 0:
                store_planes(y_ptr, chunk.base + first, tiles[0], chunk.count - first, numel, SPEC)
            first += chunk.stride
            more = (status == 0) & (first < chunk.count)
    elif (status == 0) & takes:
        buffer = simple_buffer(chunk, table_of(chunk.group), source, SPEC)
        copy_part(y_ptr, numel, chunk.base, chunk.count, buffer, chunk, SPEC)
    return status


@triton.jit
def receive_rows(y_ptr, numel, chunk, takes, status, SPEC: tl.constexpr):
    """As `receive_row`, for all ranks: copy the chunk's words from rank r into row r of y_ptr[0 : WORLD_SIZE *
    numel]."""
    first = chunk.own
    if SPEC.LL:
        status = meet_ahead(chunk, (first >= chunk.count) | (not takes), status, SPEC)
        more = (status == 0) & (first < chunk.count) & takes
        while more:
            tiles, status = arrived(chunk, 0, first, SPEC.WORLD_SIZE, SPEC)
            if status == 0:
                for r in tl.static_range(SPEC.WORLD_SIZE):
                    store_planes(y_ptr + r * numel, chunk.base + first, tiles[r], chunk.count - first, numel, SPEC)
            first += chunk.stride
            more = (status == 0) & (first < chunk.count)
    elif takes:
        copy_rows(y_ptr, numel, False, chunk, SPEC)
    return status


@triton.jit
def receive_reduced(y_ptr, numel, chunk, takes, status, SPEC: tl.constexpr):
    """As `receive_row`, for all ranks: reduce the chunk's words from all ranks into y_ptr[0:numel]."""
    first = chunk.own
    if SPEC.LL:
        status = meet_ahead(chunk, (first >= chunk.count) | (not takes), status, SPEC)
    more = (status == 0) & (first < chunk.count) & takes
    while more:
        if SPEC.LL:
            tiles, status = arrived(chunk, 0, first, SPEC.WORLD_SIZE, SPEC)
        else:
            tiles, status = receive(chunk, 0, first, chunk.count, SPEC.WORLD_SIZE, SPEC)
        if status == 0:
            total = reduce_planes(tiles, SPEC)
            store_planes(y_ptr, chunk.base + first, total, chunk.count - first, numel, SPEC)
        first += chunk.stride
        more = (status == 0) & (first < chunk.count)
    return status
