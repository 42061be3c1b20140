"""All-gather, one shot: every rank gets every rank's data. Nothing is summed: a row is a copy.

LL, words of either width: push to every mailbox, poll this rank's own mailbox, copy it out.

    rank 0: [x0] ──▶ mailboxes of 0, 1, 2, 3      y = [x0 x1 x2 x3]   on every rank
    rank 1: [x1] ──▶ mailboxes of 0, 1, 2, 3
    rank 2: [x2] ──▶ mailboxes of 0, 1, 2, 3      word in a mailbox: 32 or 96 bits of payload | 32 bits of epoch
    rank 3: [x3] ──▶ mailboxes of 0, 1, 2, 3

Bytes     2 (N-1) n written to peers per rank under `ll` (n the bytes of one rank's part; half of them flags), under
          `ll128` 4/3 (N-1) n (a quarter of them).
Hops      1.
Waits     as in `all_reduce_one_shot`: header for the fingerprint, flag in every word.
Reuse     as in `all_reduce_one_shot`: the header of e + 1 is sent after all words of e are polled.
Source    NCCL's symmetric kernel AllGather_LL.

simple: stage the input, barrier, copy every rank's staged input into its row.

    rank 0: [x0] ─▶ staged x0 ◀─ read by 1, 2, 3       y = [x0 x1 x2 x3]   on every rank
    rank 1: [x1] ─▶ staged x1 ◀─ read by 0, 2, 3
    rank 2: [x2] ─▶ staged x2 ◀─ read by 0, 1, 3
    rank 3: [x3] ─▶ staged x3 ◀─ read by 0, 1, 2

Bytes     (N-1) n read from peers per rank (n the bytes of one rank's part); n staged in local memory.
Hops      1 barrier and one round trip.
Waits     header, release to acquire at `.sys`: data that the peer's block b staged before it is visible to block b
          here.
Reuse     as in `all_reduce_one_shot`: headers of e + 1 are released after the reads of e. A chunk is staged while the
          one before is read. The tiles of all ranks are in flight at once.

Zero copy, out of symmetric memory: barrier, copy every rank's input from its place, barrier.

    rank 0: [w0] ◀─ read by 1, 2, 3       y = [w0 w1 w2 w3]   on every rank
    rank 1: [w1] ◀─ read by 0, 2, 3
    rank 2: [w2] ◀─ read by 0, 1, 3
    rank 3: [w3] ◀─ read by 0, 1, 2

In place, out of the output: a rank's input is its own row of the symmetric output, and only that row is read by peers.

    rank 0: [w0 .  .  . ]  reads w1, w2, w3 from their rows at 1, 2, 3       w = [w0 w1 w2 w3]   on every rank
    rank 1: [.  w1 .  . ]  reads w0, w2, w3 from their rows at 0, 2, 3

Bytes     (N-1) n read from peers per rank (n the bytes of one rank's part); nothing is staged.
Hops      a barrier, a round trip, a barrier.
Waits     as in `all_reduce_one_shot_zero_copy`.
Reuse     as in `all_reduce_one_shot_zero_copy`: the second barrier. In place a rank never writes its own row, which the
          others read meanwhile.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tricomm.kernels.device.chunks import packed_words, run_ll, run_pushed
from tricomm.kernels.device.dependent_launch import wait_for_launches
from tricomm.kernels.device.mailbox import buffer_words, clear_idle
from tricomm.kernels.device.packing import load_words, member, store_words
from tricomm.kernels.device.plain_data import copy_rows, stage
from tricomm.kernels.device.push import first_tile, push_to_all, receive_rows
from tricomm.kernels.group import rank_of
from tricomm.kernels.primitives import barrier, enter, leave


@triton.jit(do_not_specialize=["numel", "call"])
def all_gather_one_shot(x_ptr, y_ptr, group, numel: tl.int64, call: tl.int64, SPEC: tl.constexpr):
    words = buffer_words(group, 1, SPEC)
    if SPEC.LL:
        run_ll(first_tile, push_to_all, _take, (x_ptr, y_ptr, numel), group, call, words, 1, SPEC)
    else:  # all buffers of a parity, used as one stage
        run_pushed(_stage, _read, (x_ptr, y_ptr, numel), group, call, words * SPEC.WORLD_SIZE, SPEC)


@triton.jit
def _take(tensors, chunk, status, SPEC: tl.constexpr):
    return receive_rows(tensors[1], tensors[2], chunk, True, status, SPEC)


@triton.jit
def _stage(tensors, chunk, SPEC: tl.constexpr):
    stage(tensors[0], tensors[2], chunk, SPEC)


@triton.jit
def _read(tensors, chunk, status, SPEC: tl.constexpr):
    copy_rows(tensors[1], tensors[2], True, chunk, SPEC)
    return status


@triton.jit(do_not_specialize=["numel", "call"])
def all_gather_one_shot_zero_copy(x_ptr, y_ptr, group, numel: tl.int64, call: tl.int64, table, SPEC: tl.constexpr):
    wait_for_launches(SPEC)
    start = enter(group, call)
    me = rank_of(group)
    clear_idle(group, start, 1, SPEC)
    status = barrier(group, start, call, 0, SPEC.WORLD_SIZE, SPEC.LANES, SPEC.PTX)
    if status == 0:
        words = packed_words(x_ptr, numel)
        in_place = x_ptr.to(tl.int64) == (y_ptr + me * numel).to(tl.int64)
        aligned = SPEC.ALIGNED | ~in_place  # symmetric memory always begins aligned
        for step in range(in_place.to(tl.int32), SPEC.WORLD_SIZE):  # starts at a different rank on each rank
            source = (me + step) % SPEC.WORLD_SIZE
            for first in range(tl.program_id(0).to(tl.int64) * SPEC.BLOCK, words, tl.num_programs(0) * SPEC.BLOCK):
                part = load_words(member(table, source, x_ptr), first, numel, SPEC.BLOCK, aligned)
                store_words(y_ptr + source * numel, first, part, numel, SPEC.BLOCK, SPEC.ALIGNED)
        status = barrier(group, start, call, 1, SPEC.WORLD_SIZE, SPEC.LANES, SPEC.PTX)
    leave(group, start, call, 1, status)
