"""All-reduce, one shot: every rank gets every rank's data and reduces it locally.

The order is rank 0 .. N-1 on every rank, so every rank has the same bits.

LL, words of either width: push to every mailbox, poll one's own.

    rank 0: [x0] ──▶ mailboxes of 0, 1, 2, 3      y = x0 + x1 + x2 + x3   on every rank
    rank 1: [x1] ──▶ mailboxes of 0, 1, 2, 3
    rank 2: [x2] ──▶ mailboxes of 0, 1, 2, 3      word in a mailbox: 32 or 96 bits of payload | 32 bits of epoch
    rank 3: [x3] ──▶ mailboxes of 0, 1, 2, 3

Bytes     2 (N-1) n written to peers per rank under `ll` (half of them flags), under `ll128` 4/3 (N-1) n (a quarter of
          them); nothing is read from a peer. A rank's own copy stays in its own memory and spares the poll a special
          case.
Hops      1.
Waits     one poll (`device/arrival.py`) for both: header: the peer made the same call (its fingerprint) and has left
          the epoch before the last; word: its flag is this epoch, and flag and payload are one access, so a word that
          was seen is complete. Before the first push a rank waits for memory once, for epoch and input together.
Reuse     two mailboxes, by the epoch's parity. A peer writes epoch e + 2 over epoch e only after it has seen this
          block's header of e + 1, which is sent after this block has polled all of e. That header may be relaxed: a
          poll ends only with words that carry its own epoch, so all reads of e are complete before it is sent.
Source    push with flags in the data: NCCL's LL protocol and its symmetric kernel AllReduce_AGxLL_R. The name `ll128`
          is NCCL's, because the aim is the same, fewer flags; its word is another. NCCL's LL128 has one flag of 64 bits
          for a line of 128 bytes that a warp stores and loads together: it needs hardware that keeps such lines whole,
          and lanes that vouch for each other. Here each word of 16 bytes has a flag, and the PTX memory model promises
          that the word arrives whole; the price is 4/3 of the bytes instead of 16/15.

simple: stage the input, barrier, read every peer's staged input.

    rank 0: [x0] ─▶ staged x0 ◀─ read by 1, 2, 3       y = x0 + x1 + x2 + x3   on every rank
    rank 1: [x1] ─▶ staged x1 ◀─ read by 0, 2, 3
    rank 2: [x2] ─▶ staged x2 ◀─ read by 0, 1, 3
    rank 3: [x3] ─▶ staged x3 ◀─ read by 0, 1, 2

Bytes     (N-1) n read from peers per rank; n staged in local memory.
Hops      1 barrier and one round trip.
Waits     header, release to acquire at `.sys`: data that the peer's block b staged before it is visible to block b
          here.
Reuse     two stages, by the epoch's parity. This rank stages epoch e + 2 over e only after it has seen the peers'
          headers of e + 1, and those are released after the peers' reads of e. It does so at once, before it reads
          e + 1: a chunk is staged while the one before is read.
Source    one-shot all-reduce of vLLM's custom all-reduce and of PyTorch's symmetric memory.

Zero copy, out of symmetric memory: barrier, read every rank's input in place, barrier.

    rank 0: [w0] ◀─ read by 1, 2, 3       y = w0 + w1 + w2 + w3   on every rank
    rank 1: [w1] ◀─ read by 0, 2, 3
    rank 2: [w2] ◀─ read by 0, 1, 3
    rank 3: [w3] ◀─ read by 0, 1, 2

Bytes     (N-1) n read from peers per rank; nothing is staged.
Hops      a barrier, a round trip, a barrier.
Waits     header of phase 0, release to acquire at `.sys`: data written to the peers' memory before this call is
          visible. Header of phase 1: no rank reads this rank's memory any more.
Reuse     there is no mailbox: the rotation protects nothing here, the second barrier does.
Source    one-shot all-reduce of PyTorch's symmetric memory.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tricomm.kernels.device.chunks import packed_words, run_ll, run_pushed
from tricomm.kernels.device.dependent_launch import wait_for_launches
from tricomm.kernels.device.mailbox import buffer_words, clear_idle, simple_buffer
from tricomm.kernels.device.packing import load_tiles, load_words, members, store_words
from tricomm.kernels.device.plain_data import FULL, reduce_in_turn, stage
from tricomm.kernels.device.push import first_tile, push_to_all, receive_reduced
from tricomm.kernels.group import peer_of
from tricomm.kernels.primitives import barrier, enter, leave
from tricomm.kernels.reduction import reduce_words


@triton.jit(do_not_specialize=["numel", "call"])
def all_reduce_one_shot(x_ptr, y_ptr, group, numel: tl.int64, call: tl.int64, SPEC: tl.constexpr):
    words = buffer_words(group, 1, SPEC)
    if SPEC.LL:
        run_ll(first_tile, push_to_all, _take, (x_ptr, y_ptr, numel), group, call, words, 1, SPEC)
    else:  # all buffers of a parity, used as one stage
        run_pushed(_stage, _read, (x_ptr, y_ptr, numel), group, call, words * SPEC.WORLD_SIZE, SPEC)


@triton.jit
def _take(tensors, chunk, status, SPEC: tl.constexpr):
    return receive_reduced(tensors[1], tensors[2], chunk, True, status, SPEC)


@triton.jit
def _stage(tensors, chunk, SPEC: tl.constexpr):
    stage(tensors[0], tensors[2], chunk, SPEC)


@triton.jit
def _read(tensors, chunk, status, SPEC: tl.constexpr):
    WORLD_SIZE: tl.constexpr = SPEC.WORLD_SIZE
    x_ptr, y_ptr, numel = tensors
    stages = ()
    for r in tl.static_range(WORLD_SIZE):
        stages = stages + (simple_buffer(chunk, peer_of(chunk.group, r, WORLD_SIZE), 0, SPEC),)
    for first in range(chunk.own, chunk.count, chunk.stride):
        if SPEC.COMPACT:
            total = reduce_in_turn(stages, first, chunk.count, FULL, SPEC)
        else:
            total = reduce_words(load_tiles(stages, first, chunk.count, WORLD_SIZE, SPEC.BLOCK), SPEC)
        store_words(y_ptr, chunk.base + first, total, numel, SPEC.BLOCK, SPEC.ALIGNED)
    return status


@triton.jit(do_not_specialize=["numel", "call"])
def all_reduce_one_shot_zero_copy(x_ptr, y_ptr, group, numel: tl.int64, call: tl.int64, table, SPEC: tl.constexpr):
    WORLD_SIZE: tl.constexpr = SPEC.WORLD_SIZE
    wait_for_launches(SPEC)
    start = enter(group, call)
    clear_idle(group, start, 1, SPEC)
    status = barrier(group, start, call, 0, SPEC.WORLD_SIZE, SPEC.LANES, SPEC.PTX)
    if status == 0:
        words = packed_words(x_ptr, numel)
        inputs = members(table, x_ptr, WORLD_SIZE)
        for first in range(tl.program_id(0).to(tl.int64) * SPEC.BLOCK, words, tl.num_programs(0) * SPEC.BLOCK):
            parts = ()
            for r in tl.static_range(WORLD_SIZE):
                parts = parts + (load_words(inputs[r], first, numel, SPEC.BLOCK, True),)
            store_words(y_ptr, first, reduce_words(parts, SPEC), numel, SPEC.BLOCK, SPEC.ALIGNED)
        status = barrier(group, start, call, 1, SPEC.WORLD_SIZE, SPEC.LANES, SPEC.PTX)
    leave(group, start, call, 1, status)
