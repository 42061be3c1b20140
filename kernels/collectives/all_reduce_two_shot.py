"""All-reduce, two shots: push shard p to rank p, reduce this rank's shard, push the result to all ranks.

Each element is reduced by one rank, in the order rank 0 .. N-1, and copied: every rank has the same bits, equal to one
shot's.

    shards         a b c d         reduce-scatter            all-gather
    rank 0:  [a0 b0 c0 d0]  ─▶  0 gets a0 a1 a2 a3 = A  ─▶  A to all
    rank 1:  [a1 b1 c1 d1]  ─▶  1 gets b0 b1 b2 b3 = B  ─▶  B to all      y = [A B C D] on every rank
    rank 2:  [a2 b2 c2 d2]  ─▶  2 gets c0 c1 c2 c3 = C  ─▶  C to all
    rank 3:  [a3 b3 c3 d3]  ─▶  3 gets d0 d1 d2 d3 = D  ─▶  D to all

A shard is rounded up to 16 bytes. A rank also pushes its own shard, into its own buffer, so that the reduction needs no
special case.

LL, words of either width: no barrier.

Bytes     4 (N-1)/N n written to peers per rank under `ll` (half of them flags), under `ll128` 8/3 (N-1)/N n (a quarter
          of them); nothing is read from a peer. All shards are pushed at one length, the last with padding.
Hops      2.
Waits     header, polled with the words of the first hop: the peer made the same call and has left the epoch before
          the last. The second hop's words of all ranks are polled at once.
          word:   its flag is this epoch; flag and payload are one access. Each of the two phases has a half of each
          buffer, so a word of the second is never taken for one of the first.
          A block without words waits for headers alone (`push.meet_ahead`).
Reuse     as in one shot: a peer writes e + 2 only after it has seen this block's header of e + 1, sent after this
          block has polled both halves of e.
Source    reduce-scatter plus all-gather; the barrier-free form is MSCCL++'s two-shot packet all-reduce.

simple: chunks overlap. While shards of chunk k + 1 are on their way, chunk k is reduced and its results follow, and the
results of chunk k - 1 are copied out; one barrier a chunk publishes all of that (`run_two_hops` in `device/chunks.py`).

Bytes     2 (N-1)/N n written to peers per rank, the least that any algorithm without in-network reduction can do;
          nothing is read from a peer.
Hops      2 one-way pushes, each followed by a barrier; of C chunks C + 1 barriers.
Waits     header of phase 0 of chunk k, release to acquire at `.sys`: the shards of chunk k that block b of each peer
          pushed here are visible, and the results of chunk k - 1. Header of phase 1 of the last chunk: so are its
          results.
Reuse     two mailboxes, by the epoch's parity, half of each buffer for shards and half for results. A peer pushes
          shards of e + 2 after it has seen this block's header of e + 1, released after this block has reduced e;
          results of e + 2 after the header of e + 2, released after this block has copied those of e. The last chunk's
          results are copied after the last barrier; the next call writes there only in its second epoch, after a header
          that this block sends when it has left this call.
Copies    the results are copied out of the mailbox, because only its own rank knows where an output is. The zero-copy
          form, of symmetric memory, writes them to their place.
Source    reduce-scatter plus all-gather (Rabenseifner); vLLM's two-stage custom all-reduce, here by push.

Zero copy, in place in symmetric memory: barrier, reduce one's own shard out of every rank's memory, write it back to
all, barrier.

    rank 0:  [a0 b0 c0 d0]    0 reads a0 a1 a2 a3, writes their sum A into a of all
    rank 1:  [a1 b1 c1 d1]    1 reads b0 b1 b2 b3, writes their sum B into b of all      w = [A B C D] on every rank
    rank 2:  [a2 b2 c2 d2]    2 reads c0 c1 c2 c3, writes their sum C into c of all
    rank 3:  [a3 b3 c3 d3]    3 reads d0 d1 d2 d3, writes their sum D into d of all

Bytes     (N-1)/N n read from peers and (N-1)/N n written to them per rank; nothing is staged.
Hops      a barrier, a round trip, a one-way push, a barrier.
Waits     header of phase 0, release to acquire at `.sys`: data written to the peers' memory before this call is
          visible. Header of phase 1: the results are visible, and no rank reads or writes this rank's memory any more.
Reuse     there is no mailbox: the rotation protects nothing here, the second barrier does. A shard is read and written
          by its owner alone, so the results need no third barrier before they are written.
Source    the two-stage kernels of vLLM and of PyTorch's symmetric memory, which write back as this one does.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tricomm.kernels.device.arrival import poll_planes
from tricomm.kernels.device.chunks import packed_words, run_ll, run_two_hops
from tricomm.kernels.device.dependent_launch import wait_for_launches
from tricomm.kernels.device.mailbox import buffer_words, clear_idle, ll_buffer, simple_buffer
from tricomm.kernels.device.packing import (
    end_of,
    load_tiles,
    load_words,
    members,
    shard_words,
    store_everywhere,
    store_tiles,
    store_words,
)
from tricomm.kernels.device.plain_data import FEW, pass_on_in_turn, push_shards, reduce_in_turn, take_shards
from tricomm.kernels.device.planes import (
    load_planes,
    load_whole,
    put_planes,
    reduce_planes,
    store_planes,
    store_whole,
    whole_planes,
)
from tricomm.kernels.device.push import meet_ahead
from tricomm.kernels.group import peer_ahead, rank_of, table_of
from tricomm.kernels.primitives import barrier, enter, leave
from tricomm.kernels.reduction import reduce_words


@triton.jit(do_not_specialize=["numel", "call"])
def all_reduce_two_shot(x_ptr, y_ptr, group, numel: tl.int64, call: tl.int64, SPEC: tl.constexpr):
    half = buffer_words(group, 2, SPEC)
    tensors = (x_ptr, y_ptr, numel, half)
    if SPEC.LL:
        run_ll(_load_ll, _push_ll, _take_ll, tensors, group, call, half * SPEC.WORLD_SIZE, 2, SPEC)
    else:
        run_two_hops(_push, _reduce, _take, tensors, group, call, half * SPEC.WORLD_SIZE, SPEC)


@triton.jit
def _shards(tensors, chunk, first, SPEC: tl.constexpr):
    """The tile at word `first` of every rank's shard of the chunk, starting with this rank's."""
    shard = shard_words(chunk.count, SPEC.WORLD_SIZE)
    if _all_whole(tensors, tensors[0], chunk, first, SPEC):
        tiles = ()
        for step in tl.static_range(SPEC.WORLD_SIZE):
            there = (chunk.me + step) % SPEC.WORLD_SIZE * shard
            tiles = tiles + (load_whole(tensors[0], chunk.base + there + first, shard - first, SPEC),)
    else:
        tiles = ()
        for step in tl.static_range(SPEC.WORLD_SIZE):
            there = (chunk.me + step) % SPEC.WORLD_SIZE * shard
            limit = _end(tensors, chunk, there + shard, SPEC)
            tiles = tiles + (load_planes(tensors[0], chunk.base + there + first, shard - first, limit, SPEC),)
    return tiles


@triton.jit
def _all_whole(tensors, like, chunk, first, SPEC: tl.constexpr):
    """True if `whole_planes` is true of the tile at word `first` of every shard of `like`. It is if it is true of the
    last shard, so one branch decides for all."""
    shard = shard_words(chunk.count, SPEC.WORLD_SIZE)
    last = (SPEC.WORLD_SIZE - 1) * shard
    limit = _end(tensors, chunk, last + shard, SPEC)
    return whole_planes(chunk.base + last + first, shard - first, limit, like, SPEC.ALIGNED, SPEC)


@triton.jit
def _end(tensors, chunk, words, SPEC: tl.constexpr):
    """Elements up to word `words` of the chunk, where a shard ends, or up to the chunk's end if that comes first. Tiles
    of three planes never cross the end of a shard, so for them it is always the chunk's end."""
    PACK: tl.constexpr = 64 // tensors[0].dtype.element_ty.primitive_bitwidth
    if SPEC.WIDE:
        words = chunk.count
    return end_of(chunk.base + tl.minimum(words, chunk.count), tensors[2], PACK)


@triton.jit
def _load_ll(tensors, chunk, SPEC: tl.constexpr):
    return _shards(tensors, chunk, chunk.own, SPEC)


@triton.jit
def _push_ll(tensors, chunk, tiles, SPEC: tl.constexpr):
    shard = shard_words(chunk.count, SPEC.WORLD_SIZE)
    first = chunk.own
    while first < shard:
        for step in tl.static_range(SPEC.WORLD_SIZE):
            buffer = ll_buffer(chunk, peer_ahead(chunk.group, step, SPEC.WORLD_SIZE), chunk.me, first, SPEC)
            put_planes(buffer, tiles[step], chunk.epoch, shard - first, SPEC)
        first += chunk.stride
        if first < shard:
            tiles = _shards(tensors, chunk, first, SPEC)


@triton.jit
def _take_ll(tensors, chunk, status, SPEC: tl.constexpr):
    x_ptr, y_ptr, numel, half = tensors
    group, me = chunk.group, chunk.me
    shard = shard_words(chunk.count, SPEC.WORLD_SIZE)
    first = chunk.own
    status = meet_ahead(chunk, first >= shard, status, SPEC)
    more = (status == 0) & (first < shard)
    while more:
        pointers, lefts = (), ()
        at = tl.where(first < shard, first, 0)  # always true, but not for the compiler: see `push.arrived`
        for r in tl.static_range(SPEC.WORLD_SIZE):
            pointers = pointers + (ll_buffer(chunk, table_of(group), r, at, SPEC),)
            lefts = lefts + (shard - first,)
        tiles, status = poll_planes(chunk, pointers, lefts, SPEC.WORLD_SIZE, True, SPEC)
        if status == 0:
            total = reduce_planes(tiles, SPEC)
            for step in tl.static_range(1, SPEC.WORLD_SIZE):
                buffer = ll_buffer(chunk, peer_ahead(group, step, SPEC.WORLD_SIZE), me, half + first, SPEC)
                put_planes(buffer, total, chunk.epoch, shard - first, SPEC)
            limit = _end(tensors, chunk, (me + 1) * shard, SPEC)
            store_planes(y_ptr, chunk.base + me * shard + first, total, shard - first, limit, SPEC)
        first += chunk.stride
        more = (status == 0) & (first < shard)
    first = chunk.own
    while (first < shard) & (status == 0):
        pointers, lefts = (), ()
        for step in tl.static_range(1, SPEC.WORLD_SIZE):
            source = (me + step) % SPEC.WORLD_SIZE
            pointers = pointers + (ll_buffer(chunk, table_of(group), source, half + first, SPEC),)
            lefts = lefts + (shard - first,)
        tiles, status = poll_planes(chunk, pointers, lefts, SPEC.WORLD_SIZE - 1, False, SPEC)
        if (status == 0) & _all_whole(tensors, y_ptr, chunk, first, SPEC):
            for step in tl.static_range(1, SPEC.WORLD_SIZE):
                there = (me + step) % SPEC.WORLD_SIZE * shard
                store_whole(y_ptr, chunk.base + there + first, tiles[step - 1], shard - first, SPEC)
        elif status == 0:
            for step in tl.static_range(1, SPEC.WORLD_SIZE):
                there = (me + step) % SPEC.WORLD_SIZE * shard
                limit = _end(tensors, chunk, there + shard, SPEC)
                store_planes(y_ptr, chunk.base + there + first, tiles[step - 1], shard - first, limit, SPEC)
        first += chunk.stride
    return status


@triton.jit
def _push(tensors, chunk, SPEC: tl.constexpr):
    x_ptr, y_ptr, numel, half = tensors
    push_shards(x_ptr, numel, chunk, False, SPEC)


@triton.jit
def _reduce(tensors, chunk, SPEC: tl.constexpr):
    WORLD_SIZE: tl.constexpr = SPEC.WORLD_SIZE
    x_ptr, y_ptr, numel, half = tensors
    group, me = chunk.group, chunk.me
    shard = shard_words(chunk.count, WORLD_SIZE)
    ours = tl.minimum(chunk.count - me * shard, shard)
    here = chunk.base + me * shard
    limit = end_of(here + ours, numel, 64 // x_ptr.dtype.element_ty.primitive_bitwidth)
    results = ()
    for step in tl.static_range(1, WORLD_SIZE):
        results = results + (simple_buffer(chunk, peer_ahead(group, step, WORLD_SIZE), me, SPEC) + half,)
    for first in range(chunk.own, ours, chunk.stride):
        given = ()
        for r in tl.static_range(WORLD_SIZE):
            given = given + (simple_buffer(chunk, table_of(group), r, SPEC),)
        if SPEC.COMPACT:
            total = reduce_in_turn(given, first, ours, FEW, SPEC)
        else:
            total = reduce_words(load_tiles(given, first, ours, WORLD_SIZE, SPEC.BLOCK), SPEC)
        if SPEC.COMPACT:
            pass_on_in_turn(me, first, total, ours, half, chunk, SPEC)
        else:
            store_tiles(results, first, total, ours, WORLD_SIZE - 1, SPEC.BLOCK)
        store_words(y_ptr, here + first, total, limit, SPEC.BLOCK, SPEC.ALIGNED)


@triton.jit
def _take(tensors, chunk, SPEC: tl.constexpr):
    x_ptr, y_ptr, numel, half = tensors
    take_shards(y_ptr, numel, half, chunk, SPEC)


@triton.jit(do_not_specialize=["numel", "call"])
def all_reduce_two_shot_zero_copy(x_ptr, y_ptr, group, numel: tl.int64, call: tl.int64, table, SPEC: tl.constexpr):
    WORLD_SIZE: tl.constexpr = SPEC.WORLD_SIZE
    PACK: tl.constexpr = 64 // x_ptr.dtype.element_ty.primitive_bitwidth
    wait_for_launches(SPEC)
    start = enter(group, call)
    me = rank_of(group)
    words = packed_words(x_ptr, numel)
    clear_idle(group, start, 1, SPEC)
    status = barrier(group, start, call, 0, SPEC.WORLD_SIZE, SPEC.LANES, SPEC.PTX)
    if status == 0:
        shard = shard_words(words, WORLD_SIZE)
        here = me * shard
        ours = tl.minimum(words - here, shard)
        limit = end_of(here + ours, numel, PACK)
        copies = members(table, x_ptr, WORLD_SIZE)
        for first in range(tl.program_id(0).to(tl.int64) * SPEC.BLOCK, ours, tl.num_programs(0) * SPEC.BLOCK):
            parts = ()
            for r in tl.static_range(WORLD_SIZE):
                parts = parts + (load_words(copies[r], here + first, limit, SPEC.BLOCK, SPEC.ALIGNED),)
            total = reduce_words(parts, SPEC)
            store_everywhere(copies, here + first, total, limit, WORLD_SIZE, SPEC.BLOCK, SPEC.ALIGNED)
        status = barrier(group, start, call, 1, SPEC.WORLD_SIZE, SPEC.LANES, SPEC.PTX)
    leave(group, start, call, 1, status)
