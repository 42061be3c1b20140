"""All-reduce, two shots, quantised on the links: push shard p to rank p in 8 bits an element, sum one's own shard in
fp32, push the sum to all in 8 bits again.

    shards         a b c d         reduce-scatter of codes           all-gather of codes
    rank 0:  [a0 b0 c0 d0]  ─▶  0 gets q(a0) q(a1) q(a2) q(a3)  ─▶  A = q(their sum) to all
    rank 1:  [a1 b1 c1 d1]  ─▶  1 gets q(b0) q(b1) q(b2) q(b3)  ─▶  B to all            y = [A B C D] on every rank
    rank 2:  [a2 b2 c2 d2]  ─▶  2 gets q(c0) q(c1) q(c2) q(c3)  ─▶  C to all
    rank 3:  [a3 b3 c3 d3]  ─▶  3 gets q(d0) q(d1) q(d2) q(d3)  ─▶  D to all

q is 8 bits an element and a scale of 16 bits for each block of 128 (`device/wire.py`). A rank sums its own part from
codes, too, and takes its own result from the codes that it sends. So every rank has the same bits, and they depend on
the inputs in rank order alone, not on grid, chunks, arena or protocol.

Order     rank 0 .. N-1 in fp32, each part exactly as its codes decode; an average is divided in fp32; each leg rounds
          to codes once. The result is rounded to the element's type, which is exact for fp8 unless a half overflows.
Source    reduce-scatter plus all-gather of FP8 as FlashInfer and vLLM's QuickReduce quantise them; unlike those, the
          owner's part and result are quantised, too.

ll128: flags in the data, as in `all_reduce_two_shot`, LL; no barrier. A rank also pushes its own codes, into its own
buffer. Scales travel in wide words after the codes of their tile (`device/flagged_codes.py`).

Bytes     8/3 (N-1)/N n / itemsize * 33/32 (65/64 for fp32) written to peers per rank: 0.52 of an unquantised call's for
          16-bit elements. All shards are pushed at one length, the last with padding. Nothing is read from a peer.
Hops      2.
Waits     header, polled with the words of the first hop, and for a block without words, as in `all_reduce_two_shot`.
          word:   its flag is this epoch. Codes and scales of a tile are awaited at once; neither orders the other.
          Each of the two hops has a half of each buffer.
Reuse     as in `all_reduce_two_shot`, LL: the protocol is the same, only tiles have room for scales, so they are not
          powers of two. Every word in that room has its flag in the same place, whichever tile it is of.

simple: `fp8_gather` sends the first leg unquantised.

Bytes     (N-1)/N n / itemsize * 130/128 written to peers per rank and leg: 0.51 of an unquantised leg for 16-bit
          elements, a quarter for fp32. `fp8_gather`: n (N-1)/N in the first leg. Nothing is read from a peer.
Hops      2 one-way pushes, each followed by a barrier; C chunks: C + 1 barriers, as in `all_reduce_two_shot`, simple.
Waits     header of phase 0 of chunk k, release to acquire at `.sys`: codes and scales of chunk k that block b of each
          peer pushed here are visible, and the results of chunk k - 1. Header of phase 1 of the last chunk: so are its
          results.
Reuse     as in `all_reduce_two_shot`, simple: two mailboxes by the epoch's parity, half of each buffer for shards and
          half for results (`run_two_hops` in `device/chunks.py`). A scale is in the room of its tile, so that it is
          written, read and overwritten with it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tricomm.kernels.device.arrival import poll_planes
from tricomm.kernels.device.chunks import run_ll, run_two_hops
from tricomm.kernels.device.flagged_codes import (
    coded,
    decoded,
    load_pairs,
    put_coded,
    put_words,
    scales_in,
    store_pairs,
)
from tricomm.kernels.device.mailbox import buffer_words, flagged_bytes, ll_buffer, simple_buffer
from tricomm.kernels.device.packing import end_of, whole_tile
from tricomm.kernels.device.planes import whole_planes
from tricomm.kernels.device.push import meet_ahead
from tricomm.kernels.device.wire import (
    dequantize,
    get_codes,
    get_source,
    load_source,
    load_whole_source,
    plane_of,
    put_codes,
    put_source,
    quantize,
    shared_shard,
    store_values,
    values_of,
)
from tricomm.kernels.group import peer_ahead, table_of
from tricomm.kernels.reduction import divide


@triton.jit(do_not_specialize=["numel", "call"])
def all_reduce_two_shot_quantized(x_ptr, y_ptr, group, numel: tl.int64, call: tl.int64, SPEC: tl.constexpr):
    if SPEC.LL:
        half = (flagged_bytes(group, SPEC).to(tl.uint64) // 16).to(tl.int64)
    else:
        half = buffer_words(group, 2, SPEC)
    tensors = (x_ptr, y_ptr, numel, half)
    tiles = (half.to(tl.uint64) // SPEC.FIRST_ROOM).to(tl.int64)  # FIRST_ROOM is ROOM or more
    chunk_words = tiles * SPEC.TILE * SPEC.WORLD_SIZE
    if SPEC.LL:
        run_ll(_load_ll, _push_ll, _take_ll, tensors, group, call, chunk_words, 2, SPEC)
    else:
        run_two_hops(_push, _reduce, _take, tensors, group, call, chunk_words, SPEC)


@triton.jit
def _load_ll(tensors, chunk, SPEC: tl.constexpr):
    return _shards(tensors, chunk, chunk.own, 0, SPEC)


@triton.jit
def _shards(tensors, chunk, first, FROM: tl.constexpr, SPEC: tl.constexpr):
    """The tile at word `first` of the shards of the next ranks, from the one that is FROM ahead on: as many as
    registers hold."""
    x_ptr, y_ptr, numel, half = tensors
    UNTIL: tl.constexpr = min(FROM + SPEC.LOADED, SPEC.WORLD_SIZE)
    shard = shared_shard(chunk.count, SPEC)
    limit = end_of(chunk.base + chunk.count, numel, SPEC.PACK)
    last = chunk.base + (SPEC.WORLD_SIZE - 1) * shard + first
    if whole_planes(last, shard - first, limit, x_ptr, SPEC.ALIGNED, SPEC):
        tiles = ()
        for step in tl.static_range(FROM, UNTIL):
            there = chunk.base + (chunk.me + step) % SPEC.WORLD_SIZE * shard + first
            tiles = tiles + (load_pairs(x_ptr, there, shard - first, limit, True, SPEC),)
    else:
        tiles = ()
        for step in tl.static_range(FROM, UNTIL):
            there = chunk.base + (chunk.me + step) % SPEC.WORLD_SIZE * shard + first
            tiles = tiles + (load_pairs(x_ptr, there, shard - first, limit, False, SPEC),)
    return tiles


@triton.jit
def _place(chunk, head, source, first, part, SPEC: tl.constexpr):
    """Where the tile at word `first` of a shard is in `source`'s buffer of wide words, from word `part` of it on."""
    return tl.multiple_of(ll_buffer(chunk, head, source, 0, SPEC) + part + first // SPEC.TILE * SPEC.ROOM, 16)


@triton.jit
def _push_ll(tensors, chunk, tiles, SPEC: tl.constexpr):
    shard = shared_shard(chunk.count, SPEC)
    first = chunk.own
    while first < shard:
        for some in tl.static_range(0, SPEC.WORLD_SIZE, SPEC.LOADED):
            if some > 0:
                tiles = _shards(tensors, chunk, first, some, SPEC)
            for step in tl.static_range(some, min(some + SPEC.LOADED, SPEC.WORLD_SIZE)):
                head = peer_ahead(chunk.group, step, SPEC.WORLD_SIZE)
                buffer = _place(chunk, head, chunk.me, first, 0, SPEC)
                put_words(buffer, tiles[step - some], chunk.epoch, shard - first, SPEC)
        first += chunk.stride
        if first < shard:
            tiles = _shards(tensors, chunk, first, 0, SPEC)


@triton.jit
def _take_ll(tensors, chunk, status, SPEC: tl.constexpr):
    x_ptr, y_ptr, numel, half = tensors
    WORLD_SIZE: tl.constexpr = SPEC.WORLD_SIZE
    group, me = chunk.group, chunk.me
    shard = shared_shard(chunk.count, SPEC)
    limit = end_of(chunk.base + chunk.count, numel, SPEC.PACK)
    first = chunk.own
    status = meet_ahead(chunk, first >= shard, status, SPEC)
    more = (status == 0) & (first < shard)
    while more:
        pointers, lefts = (), ()
        buffer = _place(chunk, table_of(group), 0, tl.where(first < shard, first, 0), 0, SPEC)  # as in `push.arrived`
        for r in tl.static_range(WORLD_SIZE):
            pointers = pointers + (tl.multiple_of(buffer + r * (flagged_bytes(group, SPEC) // 8), 16),)
            lefts = lefts + (SPEC.PLANES * plane_of(shard - first, SPEC),)
        tiles, status = poll_planes(chunk, pointers, lefts, WORLD_SIZE, True, SPEC)
        if status == 0:
            codes, scales = coded(_summed(tiles, SPEC), SPEC)
            for step in tl.static_range(1, WORLD_SIZE):
                buffer = _place(chunk, peer_ahead(group, step, WORLD_SIZE), me, first, half, SPEC)
                put_coded(buffer, codes, scales, chunk.epoch, shard - first, SPEC)
            there = chunk.base + me * shard + first
            store_pairs(y_ptr, there, decoded(codes, scales, SPEC), shard - first, limit, SPEC)
        first += chunk.stride
        more = (status == 0) & (first < shard)
    first = chunk.own
    while (first < shard) & (status == 0):
        pointers, lefts = (), ()
        buffer = _place(chunk, table_of(group), 0, first, half, SPEC)
        for step in tl.static_range(1, WORLD_SIZE):
            source = (me + step) % WORLD_SIZE
            pointers = pointers + (tl.multiple_of(buffer + source * (flagged_bytes(group, SPEC) // 8), 16),)
            lefts = lefts + (SPEC.PLANES * plane_of(shard - first, SPEC),)
        tiles, status = poll_planes(chunk, pointers, lefts, WORLD_SIZE - 1, False, SPEC)
        if status == 0:
            for step in tl.static_range(1, WORLD_SIZE):
                there = chunk.base + (me + step) % WORLD_SIZE * shard + first
                values = decoded(tiles[step - 1], scales_in(tiles[step - 1], SPEC), SPEC)
                store_pairs(y_ptr, there, values, shard - first, limit, SPEC)
        first += chunk.stride
    return status


@triton.jit
def _summed(tiles, SPEC: tl.constexpr):
    """The sums of WORLD_SIZE tiles of codes, or their averages: eight fp32 tiles for each plane."""
    results = ()
    for p in tl.static_range(SPEC.PLANES):
        sums = ()
        for r in tl.static_range(SPEC.WORLD_SIZE):
            sums = _added(sums, dequantize(tiles[r][p], scales_in(tiles[r], SPEC)[p], SPEC), r)
        results = results + (_averaged(sums, SPEC),)
    return results


@triton.jit
def _push(tensors, chunk, SPEC: tl.constexpr):
    x_ptr, y_ptr, numel, half = tensors
    WORLD_SIZE: tl.constexpr = SPEC.WORLD_SIZE
    shard = shared_shard(chunk.count, SPEC)
    last = (WORLD_SIZE - 1) * shard
    AT_ONCE: tl.constexpr = SPEC.LOADED
    for first in range(chunk.own, shard, chunk.stride):
        whole = whole_tile(first, chunk.count - last, chunk.base + last, numel, x_ptr, SPEC.TILE, SPEC.ALIGNED)
        for some in tl.static_range(0, WORLD_SIZE, AT_ONCE):
            _push_some(tensors, chunk, first, shard, whole, some, min(some + AT_ONCE, WORLD_SIZE), SPEC)


@triton.jit
def _push_some(tensors, chunk, first, shard, whole, FROM: tl.constexpr, UNTIL: tl.constexpr, SPEC: tl.constexpr):
    """Push the tiles at word `first` of the shards of the ranks FROM to UNTIL - 1 ahead, in flight at once."""
    x_ptr, y_ptr, numel, half = tensors
    WORLD_SIZE: tl.constexpr = SPEC.WORLD_SIZE
    if whole:
        tiles = ()
        for step in tl.static_range(FROM, UNTIL):
            start = chunk.base + (chunk.me + step) % WORLD_SIZE * shard + first
            tiles = tiles + (load_whole_source(x_ptr, start, SPEC),)
    else:
        tiles = ()
        for step in tl.static_range(FROM, UNTIL):
            there = (chunk.me + step) % WORLD_SIZE * shard
            limit = end_of(chunk.base + tl.minimum(there + shard, chunk.count), numel, SPEC.PACK)
            plane = plane_of(_words(chunk, there, shard) - first, SPEC)
            tiles = tiles + (load_source(x_ptr, chunk.base + there + first, plane, limit, SPEC),)
    for step in tl.static_range(FROM, UNTIL):
        there = (chunk.me + step) % WORLD_SIZE * shard
        plane = plane_of(_words(chunk, there, shard) - first, SPEC)
        buffer = simple_buffer(chunk, peer_ahead(chunk.group, step, WORLD_SIZE), chunk.me, SPEC)
        buffer += first // SPEC.TILE * SPEC.FIRST_ROOM
        if SPEC.GATHER:
            put_source(buffer, tiles[step - FROM], plane, SPEC)
        else:
            codes, scales, by_word = quantize(values_of(tiles[step - FROM], SPEC), SPEC)
            put_codes((buffer,), codes, scales, plane, 1, SPEC)


@triton.jit
def _words(chunk, there, shard):
    """Words of the shard that begins at word `there` of the chunk; the last shards are shorter, or negative."""
    return tl.minimum(chunk.count - there, shard)


@triton.jit
def _reduce(tensors, chunk, SPEC: tl.constexpr):
    x_ptr, y_ptr, numel, half = tensors
    WORLD_SIZE: tl.constexpr = SPEC.WORLD_SIZE
    group, me = chunk.group, chunk.me
    shard = shared_shard(chunk.count, SPEC)
    ours = _words(chunk, me * shard, shard)
    here = chunk.base + me * shard
    limit = end_of(here + ours, numel, SPEC.PACK)
    for first in range(chunk.own, ours, chunk.stride):
        plane = plane_of(ours - first, SPEC)
        given, results = (), ()
        for r in tl.static_range(WORLD_SIZE):
            buffer = simple_buffer(chunk, table_of(group), r, SPEC)
            given = given + (buffer + first // SPEC.TILE * SPEC.FIRST_ROOM,)
        for step in tl.static_range(1, WORLD_SIZE):
            buffer = simple_buffer(chunk, peer_ahead(group, step, WORLD_SIZE), me, SPEC)
            results = results + (buffer + half + first // SPEC.TILE * SPEC.ROOM,)
        if SPEC.GATHER:
            parts, of_parts = get_source(given, plane, WORLD_SIZE, SPEC), ()
        else:
            parts, of_parts = get_codes(given, plane, WORLD_SIZE, SPEC)
        sums = ()
        for r in tl.static_range(WORLD_SIZE):
            if SPEC.GATHER:
                values = values_of(parts[r], SPEC)
            else:
                values = dequantize(parts[r], of_parts[r], SPEC)
            sums = _added(sums, values, r)
        codes, scales, by_word = quantize(_averaged(sums, SPEC), SPEC)
        put_codes(results, codes, scales, plane, WORLD_SIZE - 1, SPEC)
        store_values(y_ptr, here + first, dequantize(codes, by_word, SPEC), plane, limit, SPEC)


@triton.jit
def _added(sums, values, r: tl.constexpr):
    """`sums` of the ranks before `r`, plus the `values` of `r`."""
    if r == 0:
        totals = values
    else:
        totals = ()
        for n in tl.static_range(8):
            totals = totals + (sums[n] + values[n],)
    return totals


@triton.jit
def _averaged(sums, SPEC: tl.constexpr):
    """`sums`, divided if the operation is an average."""
    if SPEC.OP == "avg":
        results = ()
        for n in tl.static_range(8):
            results = results + (divide(sums[n], SPEC.WORLD_SIZE),)
    else:
        tl.static_assert(SPEC.OP == "sum", "unknown operation")
        results = sums
    return results


@triton.jit
def _take(tensors, chunk, SPEC: tl.constexpr):
    x_ptr, y_ptr, numel, half = tensors
    WORLD_SIZE: tl.constexpr = SPEC.WORLD_SIZE
    shard = shared_shard(chunk.count, SPEC)
    for first in range(chunk.own, shard, chunk.stride):
        for step in tl.static_range(1, WORLD_SIZE):
            source = (chunk.me + step) % WORLD_SIZE
            there = source * shard
            words = _words(chunk, there, shard)
            plane = plane_of(words - first, SPEC)
            buffer = simple_buffer(chunk, table_of(chunk.group), source, SPEC)
            codes, scales = get_codes((buffer + half + first // SPEC.TILE * SPEC.ROOM,), plane, 1, SPEC)
            limit = end_of(chunk.base + there + words, numel, SPEC.PACK)
            store_values(y_ptr, chunk.base + there + first, dequantize(codes[0], scales[0], SPEC), plane, limit, SPEC)
