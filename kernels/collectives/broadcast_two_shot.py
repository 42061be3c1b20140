"""Broadcast, two shots, simple: scatter the root's data, then every rank passes its shard on to all others.

    root 0: [a b c d]      a ──▶ 1, 2, 3           every rank but the root copies a, its own shard,
                           b ──▶ 1 ──▶ 2, 3        and what the others have passed on
                           c ──▶ 2 ──▶ 1, 3
                           d ──▶ 3 ──▶ 1, 2

Bytes     2 (N-1)/N n written to peers by the root (its own shard to all), (N-2)/N n by the others; one shot has the
          root write (N-1) n. A shard is rounded up to 16 bytes.
          The root also pushes its own shard, into its own buffer, so that the shard needs no special case.
Hops      2 one-way pushes, each followed by a barrier; of C overlapping chunks C + 1 barriers (`run_two_hops` in
          `device/chunks.py`).
Waits     header of phase 0 of chunk k, release to acquire at `.sys`: the root's shard of chunk k for this rank is
          visible, and the others' of chunk k - 1. Header of phase 1 of the last chunk: so are the others' of it.
Reuse     as in `all_reduce_two_shot`.
Order     nothing is summed.
Source    van de Geijn's broadcast (scatter and all-gather), with direct exchanges for both.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tricomm.kernels.device.chunks import run_two_hops
from tricomm.kernels.device.mailbox import buffer_words, simple_buffer
from tricomm.kernels.device.packing import end_of, load_tile, shard_words, store_tile, store_words
from tricomm.kernels.device.plain_data import pass_on_in_turn, push_shards, take_shards
from tricomm.kernels.group import peer_ahead, table_of


@triton.jit(do_not_specialize=["numel", "call", "root"])
def broadcast_two_shot(x_ptr, y_ptr, group, numel: tl.int64, call: tl.int64, root: tl.int64, SPEC: tl.constexpr):
    half = buffer_words(group, 2, SPEC)
    tensors = (x_ptr, y_ptr, numel, root, half)
    run_two_hops(_push, _pass_on, _take, tensors, group, call, half * SPEC.WORLD_SIZE, SPEC)


@triton.jit
def _push(tensors, chunk, SPEC: tl.constexpr):
    x_ptr, y_ptr, numel, root, half = tensors
    if chunk.me == root:
        push_shards(x_ptr, numel, chunk, False, SPEC)


@triton.jit
def _pass_on(tensors, chunk, SPEC: tl.constexpr):
    x_ptr, y_ptr, numel, root, half = tensors
    group, me = chunk.group, chunk.me
    shard = shard_words(chunk.count, SPEC.WORLD_SIZE)
    ours = tl.minimum(chunk.count - me * shard, shard)
    here = chunk.base + me * shard
    limit = end_of(here + ours, numel, 64 // y_ptr.dtype.element_ty.primitive_bitwidth)
    given = simple_buffer(chunk, table_of(group), root, SPEC)
    for first in range(chunk.own, ours, chunk.stride):
        part = load_tile(given, first, ours, SPEC.BLOCK)
        if SPEC.COMPACT:
            pass_on_in_turn(root, first, part, ours, half, chunk, SPEC)
        else:
            for step in tl.static_range(1, SPEC.WORLD_SIZE):
                if (me + step) % SPEC.WORLD_SIZE != root:
                    theirs = simple_buffer(chunk, peer_ahead(group, step, SPEC.WORLD_SIZE), me, SPEC) + half
                    store_tile(theirs, first, part, ours, SPEC.BLOCK)
        if me != root:
            store_words(y_ptr, here + first, part, limit, SPEC.BLOCK, SPEC.ALIGNED)


@triton.jit
def _take(tensors, chunk, SPEC: tl.constexpr):
    x_ptr, y_ptr, numel, root, half = tensors
    if chunk.me != root:
        take_shards(y_ptr, numel, half, chunk, SPEC)
