"""Pushing, by either protocol: tiles into peers' buffers, a synchronization, and tiles out of one's own buffers.

    open_epoch ─▶ push_* (tiles of the input into this rank's buffer at some ranks) ─▶ synchronize ─▶ receive

LL        the words carry flags, so nothing synchronizes: `receive_*` polls words and headers in one loop
          (`device/arrival.py`), a rank that receives nothing polls headers. Hops: 1.
simple    plain data; `synchronize` is a barrier behind the pushes, and `receive` loads what has arrived. Hops: 1, a
          barrier. The next chunk is pushed before this one is received (`run_pushed` in `device/chunks.py`).

Bytes     what is pushed; under LL twice that, because half of it is flags. Nothing is read from a peer.
Waits     header, in every chunk, from every peer, whatever is sent and to whom: the peer made the same call and has
          left the epoch before the last. Under `simple` it is release to acquire at `.sys`: what the peer's block b
          pushed here is visible. LL words: the flag is this epoch; flag and payload are one access.
Reuse     two mailboxes, by the epoch's parity. A peer writes epoch e + 2 only after it has seen this block's header
          of e + 1, sent after this block has received all that it receives of e. Under `simple` it may do so at once,
          before it receives e + 1 itself. A rank that receives nothing (of a broadcast its root, of a gather all but
          the root) sends and awaits the same headers: so a root never runs ahead.
Copies    what has come is copied out of the mailbox, because only its own rank knows where an output is.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tricomm.kernels.device.arrival import poll_words
from tricomm.kernels.device.group import ll_bytes, peer, peer_ahead, table_of
from tricomm.kernels.device.mailbox import clear_idle, clears, ll_buffer, simple_buffer
from tricomm.kernels.device.packing import load_tiles, load_words, store_tile, store_words
from tricomm.kernels.device.plain_data import copy_part, copy_rows, push_part, push_plain_rows
from tricomm.kernels.device.reduction import reduce_words
from tricomm.kernels.primitives import barrier, get_ll, put_ll, send_headers, wait_headers


@triton.jit
def open_epoch(chunk, PARTS: tl.constexpr, SPEC: tl.constexpr):
    """Clear the idle mailbox if its time has come; under LL, say then that this block is in this epoch.

    That header is relaxed, because the data carry flags of their own; but if it follows a clearing it releases the
    zeros, or one of them could still land on a word that a peer pushed after it had seen the header.
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
    """Every peer's block has made the same call; under `simple`, its earlier writes are visible. Returns the status."""
    group, epoch, call = chunk.group, chunk.epoch, chunk.call
    if SPEC.LL:
        status = wait_headers(group, epoch, call, PHASE, SPEC.WORLD_SIZE, SPEC.LANES, SPEC.PTX)
    else:
        status = barrier(group, epoch, call, PHASE, SPEC.WORLD_SIZE, SPEC.LANES, SPEC.PTX)
    return status


@triton.jit
def push_tile(chunk, to, first, words, count, SPEC: tl.constexpr):
    """The tile at word `first` of a run of `count`, into this rank's buffer at rank `to`."""
    group = chunk.group
    me = chunk.me
    if SPEC.LL:
        buffer = ll_buffer(chunk, peer(group, to), me, first, SPEC)
        put_ll(buffer, words, chunk.epoch, count - first, SPEC.BLOCK, SPEC.PTX)
    else:
        store_tile(simple_buffer(chunk, peer(group, to), me, SPEC), first, words, count, SPEC.BLOCK)


@triton.jit
def push_row(x_ptr, numel, to, chunk, SPEC: tl.constexpr):
    """This block's tiles of the chunk's words of x_ptr[0:numel], to rank `to`."""
    if SPEC.LL:
        for first in range(chunk.own, chunk.count, chunk.stride):
            words = load_words(x_ptr, chunk.base + first, numel, SPEC.BLOCK, SPEC.ALIGNED)
            push_tile(chunk, to, first, words, chunk.count, SPEC)
    else:
        buffer = simple_buffer(chunk, peer(chunk.group, to), chunk.me, SPEC)
        push_part(x_ptr, numel, chunk.base, chunk.count, buffer, chunk, SPEC)


@triton.jit
def push_rows(x_ptr, numel, chunk, SPEC: tl.constexpr):
    """Row r of x_ptr[0 : WORLD_SIZE * numel] to rank r, one's own included.

    Starts at the own rank, so that no two ranks write to the same one at the same time. Under `simple` the tiles for
    all ranks are on their way at once.
    """
    me = chunk.me
    if SPEC.LL:
        for step in range(SPEC.WORLD_SIZE):
            to = (me + step) % SPEC.WORLD_SIZE
            push_row(x_ptr + to * numel, numel, to, chunk, SPEC)
    else:
        push_plain_rows(x_ptr, numel, chunk, SPEC)


@triton.jit
def first_tile(tensors, chunk, SPEC: tl.constexpr):
    """LL: this block's first tile of the chunk, for `push_to_all`."""
    return load_words(tensors[0], chunk.base + chunk.own, tensors[2], SPEC.BLOCK, SPEC.ALIGNED)


@triton.jit
def push_to_all(tensors, chunk, tile, SPEC: tl.constexpr):
    """LL: this block's tiles of the chunk, of which `tile` is the first, to every rank, one's own included.

    Starts at the own rank, so that no two ranks write to the same one at the same time.
    """
    first = chunk.own
    while first < chunk.count:
        for step in tl.static_range(SPEC.WORLD_SIZE):
            buffer = ll_buffer(chunk, peer_ahead(chunk.group, step, SPEC.WORLD_SIZE), chunk.me, first, SPEC)
            put_ll(buffer, tile, chunk.epoch, chunk.count - first, SPEC.BLOCK, SPEC.PTX)
        first += chunk.stride
        if first < chunk.count:
            tile = load_words(tensors[0], chunk.base + first, tensors[2], SPEC.BLOCK, SPEC.ALIGNED)


@triton.jit
def receive(chunk, source, first, count, SOURCES: tl.constexpr, SPEC: tl.constexpr):
    """The tile at word `first` of SOURCES buffers of one's own from rank `source` on: (a tuple of tiles, status)."""
    group = chunk.group
    status = 0
    if SPEC.LL:
        buffer = ll_buffer(chunk, table_of(group), source, first, SPEC)
        distance = ll_bytes(group) // 8
        parts, status = get_ll(group, buffer, distance, chunk.epoch, count - first, SOURCES, SPEC.BLOCK, SPEC.PTX)
    else:
        buffers = ()
        for n in tl.static_range(SOURCES):
            buffers = buffers + (simple_buffer(chunk, table_of(group), source + n, SPEC),)
        parts = load_tiles(buffers, first, count, SOURCES, SPEC.BLOCK)
    return parts, status


@triton.jit
def after_clearing(chunk, SPEC: tl.constexpr):
    """LL: wait for the headers of an epoch that clears, which have to be acquired; returns the status.

    A poll acquires them as well, in some threads; here all of them do before any pushes over the zeros.
    """
    status = 0
    if clears(chunk.epoch):
        status = synchronize(chunk, 0, SPEC)
    return status


@triton.jit
def receive_nothing(chunk, status, SPEC: tl.constexpr):
    """LL: wait for what a rank that receives nothing has to know, the headers; returns the status."""
    if SPEC.LL:
        if status == 0:
            status = synchronize(chunk, 0, SPEC)
    return status


@triton.jit
def arrived(chunk, source, first, SOURCES: tl.constexpr, SPEC: tl.constexpr):
    """LL: the tile at word `first` of the chunk in SOURCES buffers of one's own from rank `source` on, and every peer's
    header: (a tuple of tiles, status). A tile without words is there at once, so only headers are waited for."""
    pointers, counts = (), ()
    buffer = ll_buffer(chunk, table_of(chunk.group), source, tl.where(first < chunk.count, first, 0), SPEC)
    for n in tl.static_range(SOURCES):
        pointers = pointers + (tl.multiple_of(buffer + n * (ll_bytes(chunk.group) // 8), 16),)
        counts = counts + (chunk.count - first,)
    return poll_words(chunk, pointers, counts, SOURCES, True, SPEC)


@triton.jit
def receive_row(y_ptr, numel, source, chunk, status, SPEC: tl.constexpr):
    """Copy the chunk's words from `source` into y_ptr[0:numel], unless `status` is not zero; returns the status.

    Under LL a block without words looks for headers, too.
    """
    if SPEC.LL:
        first = chunk.own
        more = status == 0
        while more:
            parts, status = arrived(chunk, source, first, 1, SPEC)
            if (status == 0) & (first < chunk.count):
                store_words(y_ptr, chunk.base + first, parts[0], numel, SPEC.BLOCK, SPEC.ALIGNED)
            first += chunk.stride
            more = (status == 0) & (first < chunk.count)
    elif status == 0:
        buffer = simple_buffer(chunk, table_of(chunk.group), source, SPEC)
        copy_part(y_ptr, numel, chunk.base, chunk.count, buffer, chunk, SPEC)
    return status


@triton.jit
def receive_rows(y_ptr, numel, chunk, status, SPEC: tl.constexpr):
    """Copy the chunk's words from rank r into row r of y_ptr[0 : WORLD_SIZE * numel]; otherwise as `receive_row`."""
    if SPEC.LL:
        first = chunk.own
        more = status == 0
        while more:
            parts, status = arrived(chunk, 0, first, SPEC.WORLD_SIZE, SPEC)
            if (status == 0) & (first < chunk.count):
                for r in tl.static_range(SPEC.WORLD_SIZE):
                    store_words(y_ptr + r * numel, chunk.base + first, parts[r], numel, SPEC.BLOCK, SPEC.ALIGNED)
            first += chunk.stride
            more = (status == 0) & (first < chunk.count)
    else:
        copy_rows(y_ptr, numel, False, chunk, SPEC)
    return status


@triton.jit
def receive_reduced(y_ptr, numel, chunk, status, SPEC: tl.constexpr):
    """Reduce the chunk's words from all ranks into y_ptr[0:numel]; otherwise as `receive_row`."""
    first = chunk.own
    more = (status == 0) & (SPEC.LL | (first < chunk.count))
    while more:
        if SPEC.LL:
            parts, status = arrived(chunk, 0, first, SPEC.WORLD_SIZE, SPEC)
        else:
            parts, status = receive(chunk, 0, first, chunk.count, SPEC.WORLD_SIZE, SPEC)
        if (status == 0) & (first < chunk.count):
            store_words(y_ptr, chunk.base + first, reduce_words(parts, SPEC), numel, SPEC.BLOCK, SPEC.ALIGNED)
        first += chunk.stride
        more = (status == 0) & (first < chunk.count)
    return status
