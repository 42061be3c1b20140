"""All-reduce through the switch, simple: each rank has it reduce one shard of all staged inputs, and multicast the sum.

    shards         a b c d      the switch adds, on its way to       the switch copies, on its way to all
    rank 0:  [a0 b0 c0 d0]      0: a0 + a1 + a2 + a3 = A             A from 0
    rank 1:  [a1 b1 c1 d1]      1: b0 + b1 + b2 + b3 = B             B from 1      y = [A B C D] on every rank
    rank 2:  [a2 b2 c2 d2]      2: c0 + c1 + c2 + c3 = C             C from 2
    rank 3:  [a3 b3 c3 d3]      3: d0 + d1 + d2 + d3 = D             D from 3

A shard is rounded up to 16 bytes. Shard p is staged in the first half of buffer p of a rank's own mailbox, and its sum
is stored into the second half of buffer p of all ranks: the same places as in the two-shot kernels, so that the same
code copies the results out.

Bytes     a GPU sends (1 + 1/N) n, its n for the switch to add and the sum of its shard, and receives as much, 1/N n of
          sums and the n of all results. Counted by accesses, (N-1)/N n of peers' memory is read and as much is written;
          n is staged in local memory.
Hops      a barrier, a round trip, a one-way store, a barrier; of C overlapping chunks C + 1 barriers (`run_two_hops` in
          `device/chunks.py`).
Waits     header of phase 0 of chunk k, release to acquire at `.sys`: the part of chunk k that block b of each peer
          staged may be read through the switch, and its results of chunk k - 1 have arrived. Header of phase 1 of the
          last chunk: so are its results.
Reuse     two mailboxes, by the epoch's parity. A rank stages chunk k + 2 after barrier k + 1, and every peer had read
          chunk k through the switch before it sent that header. Results of chunk k + 2 are stored after barrier k + 2,
          and every rank had copied those of chunk k before it. The last chunk's are copied after the last barrier; a
          peer uses that mailbox again in its second epoch after this call, when it has seen a header that this block
          sends in the next launch.
Order     chosen by the switch (`kernels/multimem.py`), one sum for all ranks: the same bits on every rank, which may
          differ from the other kernels' bits. Not used in a batch-invariant group.
Source    NCCL's NVLS and its symmetric kernel RSxLDMC_AGxSTMC; PyTorch's multimem_all_reduce_.

Zero copy, over symmetric memory with a multicast address: the switch adds the handles `w` of all ranks, and copies the
sums into the handles `v` of all; in place, `v` is `w`. Nothing is staged, nothing is copied out.

    rank 0: w [a0 b0 c0 d0]     0: a0 + a1 + a2 + a3 = A  ─▶  a of all
    rank 1: w [a1 b1 c1 d1]     1: b0 + b1 + b2 + b3 = B  ─▶  b of all        v = [A B C D] on every rank
    rank 2: w [a2 b2 c2 d2]     2: c0 + c1 + c2 + c3 = C  ─▶  c of all
    rank 3: w [a3 b3 c3 d3]     3: d0 + d1 + d2 + d3 = D  ─▶  d of all

Bytes     a GPU sends and receives (1 + 1/N) n. Counted by accesses, (N-1)/N n of peers' memory is read, and as much is
          written. A tail under 16 bytes, which the switch cannot access, is read and written at the ranks' own
          addresses.
Hops      a barrier, a round trip, a one-way store, a barrier.
Waits     header of phase 0, release to acquire at `.sys`: data written to the peers' `w` before this call is visible,
          and no earlier call on a peer reads its `v`. Header of phase 1: the results have arrived, and no rank reads or
          writes this rank's memory any more. Neither barrier has an alias fence: only other launches access the memory
          by another address.
Reuse     there is no mailbox: the second barrier protects the memory. A shard is read and written by its owner alone,
          so in place the results need no third barrier before they are stored.
Order     chosen by the switch, as above; rank order for the tail.
Source    PyTorch's multimem_all_reduce_; NCCL's RSxLDMC_AGxSTMC over registered windows.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tricomm.kernels.device.chunks import run_two_hops
from tricomm.kernels.device.dependent_launch import wait_for_launches
from tricomm.kernels.device.mailbox import buffer_words, clear_idle
from tricomm.kernels.device.multicast import buffer_at_all, gather_reduced, pass_reduced
from tricomm.kernels.device.packing import load_elements, members, shard_words, store_elements
from tricomm.kernels.device.plain_data import push_shards, take_shards
from tricomm.kernels.group import rank_of
from tricomm.kernels.multimem import everywhere, everywhere_in
from tricomm.kernels.primitives import barrier, enter, leave
from tricomm.kernels.reduction import reduce_words


@triton.jit(do_not_specialize=["numel", "call"])
def all_reduce_multicast(x_ptr, y_ptr, group, numel: tl.int64, call: tl.int64, SPEC: tl.constexpr):
    half = buffer_words(group, 2, SPEC)
    tensors = (x_ptr, y_ptr, numel, half, everywhere(group, SPEC.WORLD_SIZE, SPEC.PTX))
    run_two_hops(_stage, _reduce, _take, tensors, group, call, half * SPEC.WORLD_SIZE, SPEC)


@triton.jit
def _stage(tensors, chunk, SPEC: tl.constexpr):
    push_shards(tensors[0], tensors[2], chunk, True, SPEC)


@triton.jit
def _reduce(tensors, chunk, SPEC: tl.constexpr):
    x_ptr, y_ptr, numel, half, heads = tensors
    shard = shard_words(chunk.count, SPEC.WORLD_SIZE)
    ours = tl.minimum(chunk.count - chunk.me * shard, shard)
    given = buffer_at_all(chunk, heads, chunk.me, 0, SPEC)
    results = buffer_at_all(chunk, heads, chunk.me, half, SPEC)
    gather_reduced(given, results, y_ptr, chunk.base + chunk.me * shard, ours, numel, chunk, True, SPEC)


@triton.jit
def _take(tensors, chunk, SPEC: tl.constexpr):
    take_shards(tensors[1], tensors[2], tensors[3], chunk, SPEC)


@triton.jit(do_not_specialize=["numel", "call"])
def all_reduce_multicast_zero_copy(
    x_ptr, y_ptr, group, numel: tl.int64, call: tl.int64, table, into, SPEC: tl.constexpr
):
    WORLD_SIZE: tl.constexpr = SPEC.WORLD_SIZE
    wait_for_launches(SPEC)
    start = enter(group, call)
    me = rank_of(group)
    clear_idle(group, start, 1, SPEC)
    status = barrier(group, start, call, 0, SPEC.WORLD_SIZE, SPEC.LANES, SPEC.PTX)
    if status == 0:
        given = everywhere_in(table, WORLD_SIZE, SPEC.PTX)
        results = everywhere_in(into, WORLD_SIZE, SPEC.PTX)
        words = numel // (128 // x_ptr.dtype.element_ty.primitive_bitwidth) * 2  # in whole pairs
        shard = shard_words(words, WORLD_SIZE)
        pass_reduced(given, results, me * shard, tl.minimum((me + 1) * shard, words), SPEC)
        if (me == WORLD_SIZE - 1) & (tl.program_id(0) == 0):
            _last_piece(table, into, x_ptr, words, numel, SPEC)
        status = barrier(group, start, call, 1, SPEC.WORLD_SIZE, SPEC.LANES, SPEC.PTX)
    leave(group, start, call, 1, status)


@triton.jit
def _last_piece(table, into, x_ptr, words, numel, SPEC: tl.constexpr):
    """The elements from word `words` on, fewer than 16 bytes of them."""
    given = members(table, x_ptr, SPEC.WORLD_SIZE)
    results = members(into, x_ptr, SPEC.WORLD_SIZE)
    parts = ()
    for r in tl.static_range(SPEC.WORLD_SIZE):
        parts = parts + (load_elements(given[r], words, numel, SPEC.BLOCK),)
    total = reduce_words(parts, SPEC)
    for r in tl.static_range(SPEC.WORLD_SIZE):
        store_elements(results[r], words, total, numel, SPEC.BLOCK)
