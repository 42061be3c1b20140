"""The frame of a collective kernel: a call is divided into chunks that fit into the mailboxes, and a chunk is an epoch.

A kernel defines the work on one chunk. This file defines the order of chunks, the entry, the count of epochs, the stop
at a fault, and the exit.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from tricomm.kernels.device.arrival import announce
from tricomm.kernels.device.dependent_launch import wait_for_launches
from tricomm.kernels.device.mailbox import buffer_words
from tricomm.kernels.device.push import open_epoch, synchronize
from tricomm.kernels.group import RANK, rank_of, table_of
from tricomm.kernels.primitives import advance, enter, finish, leave, read_epoch


class Chunk(NamedTuple):
    """One chunk of a call, as a kernel's functions get it. All numbers are int64.

    group    the kernel's group argument (`group.py`)
    me       this rank
    call     the call's number and fingerprint
    epoch    the chunk's number since the group was created
    base     its first word in the tensor, or in each row if a rank has several
    count    its words
    own      the first word of this block's first tile
    stride   words from one tile of this block to the next
    """

    group: Any
    me: Any
    call: Any
    epoch: Any
    base: Any
    count: Any
    own: Any
    stride: Any


@triton.jit
def packed_words(x_ptr, numel):
    """64-bit words of `numel` elements."""
    return tl.cdiv(numel, 64 // x_ptr.dtype.element_ty.primitive_bitwidth)


@triton.jit
def whole_call(tensors, group, call, start, SPEC: tl.constexpr):
    """A chunk with all words of a call; `start` is the call's first epoch."""
    words = packed_words(tensors[0], tensors[2])
    own = tl.program_id(0).to(tl.int64) * SPEC.TILE
    return Chunk(group, rank_of(group), call, start, words * 0, words, own, tl.num_programs(0) * SPEC.TILE)


@triton.jit
def nth(whole, number, chunk_words):
    """Chunk `number` of the call `whole`."""
    base = number * chunk_words
    count = tl.minimum(whole.count - base, chunk_words)
    epoch = advance(whole.epoch, number)
    return Chunk(whole.group, whole.me, whole.call, epoch, base, count, whole.own, whole.stride)


@triton.jit
def alike(count, room, unit):
    """(chunks, the words of each but the last one): as few chunks of at most `room` words as possible, of equal length
    in whole units (`room` is a multiple of `unit`). Full chunks would leave a last one that is too short to hide the
    copies of the one before."""
    chunks = tl.cdiv(count, room)
    words = room
    if chunks > 1:
        words = tl.cdiv(count, chunks * unit) * unit
    return chunks, words


@triton.jit
def unknown(whole, SPEC: tl.constexpr):
    """The same call; under COMPACT its numbers are read again, so that the compiler cannot compute addresses before the
    loop over chunks and keep them in registers throughout."""
    if SPEC.COMPACT:
        table = table_of(whole.group)
        nothing = tl.load(table + RANK, volatile=True) - whole.me
        again = Chunk(
            table,
            whole.me + nothing,
            whole.call,
            whole.epoch,
            whole.base,
            whole.count,
            whole.own + nothing,
            whole.stride + nothing,
        )
    else:
        again = whole
    return again


@triton.jit
def run_ll(
    LOAD: tl.constexpr,
    PUSH: tl.constexpr,
    TAKE: tl.constexpr,
    tensors,
    group,
    call,
    chunk_words,
    PARTS: tl.constexpr,
    SPEC: tl.constexpr,
):
    """LL: run a whole call. For each chunk: tiles = LOAD(tensors, chunk, SPEC), send the header, PUSH(tensors, chunk,
    tiles, SPEC), TAKE(tensors, chunk, status, SPEC), until a TAKE returns a status that is not zero.

    `tensors` is (x_ptr, y_ptr, numel) and further arguments of these functions; `chunk_words` is the largest size of a
    chunk. LOAD does not use the epoch, so its loads are in flight together with the epoch's, and a call's first push
    waits for memory once.
    """
    wait_for_launches(SPEC)
    start, seen = read_epoch(group, SPEC.LANES)
    unnumbered = whole_call(tensors, group, call, tl.zeros([], tl.int64), SPEC)
    chunks = tl.full([], 1, tl.int64)
    if (unnumbered.count > chunk_words) | (unnumbered.count == 0):  # only then: the division takes long
        chunks = tl.cdiv(unnumbered.count, chunk_words)
    status = 0
    number = tl.zeros([], tl.int64)
    while (number < chunks) & (status == 0):
        tiles = LOAD(tensors, nth(unnumbered, number, chunk_words), SPEC)
        chunk = nth(whole_call(tensors, group, call, start, SPEC), number, chunk_words)
        open_epoch(chunk, PARTS, SPEC)
        PUSH(tensors, chunk, tiles, SPEC)
        if number == 0:
            announce(group, start, seen, call, SPEC.LANES, SPEC.PTX)
        number += 1
        status = TAKE(tensors, chunk, status, SPEC)
    finish(group, start, chunks, status)


@triton.jit
def run_loaded(LOAD: tl.constexpr, BODY: tl.constexpr, tensors, group, call, chunk_words, SPEC: tl.constexpr):
    """As `run_chunks`, with BODY(tensors, chunk, tile, SPEC), where `tile` is the result of LOAD(tensors, chunk, SPEC).
    The first LOAD is in flight together with the load of the epoch."""
    wait_for_launches(SPEC)
    nought = tl.zeros([], tl.int64)
    tile = LOAD(tensors, nth(whole_call(tensors, group, call, nought, SPEC), nought, chunk_words), SPEC)
    start = enter(group, call)
    whole = whole_call(tensors, group, call, start, SPEC)
    chunks = tl.cdiv(whole.count, chunk_words)
    status = 0
    number = tl.zeros([], tl.int64)
    more = number < chunks
    while more:
        status = BODY(tensors, nth(whole, number, chunk_words), tile, SPEC)
        number += 1
        more = (number < chunks) & (status == 0)
        if more:
            tile = LOAD(tensors, nth(whole, number, chunk_words), SPEC)
    leave(group, start, call, chunks, status)


@triton.jit
def run_chunks(BODY: tl.constexpr, tensors, group, call, chunk_words, SPEC: tl.constexpr):
    """Run a whole call: BODY(tensors, chunk, SPEC) for each chunk, until one returns a status that is not zero.

    `tensors` is (x_ptr, y_ptr, numel) and further arguments of BODY; `chunk_words` is the largest size of a chunk.
    """
    wait_for_launches(SPEC)
    start = enter(group, call)
    whole = whole_call(tensors, group, call, start, SPEC)
    chunks, chunk_words = alike(whole.count, chunk_words, SPEC.TILE)
    status = 0
    number = tl.zeros([], tl.int64)
    while (number < chunks) & (status == 0):
        status = BODY(tensors, nth(whole, number, chunk_words), SPEC)
        number += 1
    leave(group, start, call, chunks, status)


@triton.jit
def run_one_shot(
    LOAD: tl.constexpr,
    PUSH_LL: tl.constexpr,
    PUSH: tl.constexpr,
    TAKE: tl.constexpr,
    tensors,
    group,
    call,
    SPEC: tl.constexpr,
):
    """Run a call of one hop in chunks of a buffer's size: `run_ll` (LOAD, PUSH_LL, TAKE) or `run_pushed` (PUSH,
    TAKE)."""
    words = buffer_words(group, 1, SPEC)
    if SPEC.LL:
        run_ll(LOAD, PUSH_LL, TAKE, tensors, group, call, words, 1, SPEC)
    else:
        run_pushed(PUSH, TAKE, tensors, group, call, words, SPEC)


@triton.jit
def run_pushed(PUSH: tl.constexpr, TAKE: tl.constexpr, tensors, group, call, chunk_words, SPEC: tl.constexpr):
    """Simple: run a call of one hop: PUSH(tensors, chunk, SPEC), synchronize, TAKE(tensors, chunk, status, SPEC).

    A chunk is pushed before the previous one is taken, so the links carry one chunk while the other is copied, with one
    barrier per chunk. PUSH(k) overwrites chunk k - 2, which no peer reads after barrier k - 1, so it needs no other
    barrier.
    """
    wait_for_launches(SPEC)
    start = enter(group, call)
    whole = whole_call(tensors, group, call, start, SPEC)
    chunks, chunk_words = alike(whole.count, chunk_words, SPEC.TILE)
    status = 0
    number = tl.zeros([], tl.int64)
    while (number <= chunks) & (status == 0):
        ahead = nth(whole, number, chunk_words)
        if number < chunks:
            open_epoch(ahead, 1, SPEC)
            PUSH(tensors, ahead, SPEC)
        if number > 0:
            status = TAKE(tensors, nth(whole, number - 1, chunk_words), status, SPEC)
        if number < chunks:
            status = synchronize(ahead, 0, SPEC)
        number += 1
    leave(group, start, call, chunks, status)


@triton.jit
def run_two_hops(
    PUSH: tl.constexpr, PASS_ON: tl.constexpr, TAKE: tl.constexpr, tensors, group, call, chunk_words, SPEC: tl.constexpr
):
    """Simple: run a call of two hops. PUSH, PASS_ON and TAKE get (tensors, chunk, SPEC).

        PUSH(0)          | PASS_ON(0) PUSH(1)         | PASS_ON(1) PUSH(2) TAKE(0) | PASS_ON(2)    TAKE(1) ‖ TAKE(2)

    PUSH writes to the first halves of buffers. PASS_ON reads them and writes to second halves, which TAKE reads. A bar
    (|) is a barrier of phase 0 of the epoch of the chunk just pushed; the last one (‖) is a barrier of phase 1 of the
    last epoch. So C chunks have C + 1 barriers, and each of them publishes the second hop of one chunk and the first
    hop of the next.

    Two mailboxes are enough. PUSH(k) overwrites what the peers' PASS_ON(k - 2) has read before barrier k - 1.
    PASS_ON(k) overwrites what their TAKE(k - 2) has read before barrier k. After barrier C, the last one, only the
    second halves of chunk C - 1 are read. The next call begins with the other mailbox, and writes to this one only
    after its own first barrier or headers.
    """
    wait_for_launches(SPEC)
    start = enter(group, call)
    whole = whole_call(tensors, group, call, start, SPEC)
    chunks, chunk_words = alike(whole.count, chunk_words, SPEC.TILE * SPEC.WORLD_SIZE)
    status = 0
    number = tl.zeros([], tl.int64)
    while (number < chunks + 2) & (status == 0):
        if (number > 0) & (number <= chunks):
            PASS_ON(tensors, nth(unknown(whole, SPEC), number - 1, chunk_words), SPEC)
        again = unknown(whole, SPEC)
        ahead = nth(again, number, chunk_words)
        behind = nth(again, number - 1, chunk_words)
        if number < chunks:
            open_epoch(ahead, 2, SPEC)
            PUSH(tensors, ahead, SPEC)
        if number > 1:
            TAKE(tensors, nth(unknown(whole, SPEC), number - 2, chunk_words), SPEC)
        if number < chunks:
            status = synchronize(ahead, 0, SPEC)
        elif number == chunks:
            status = synchronize(behind, 1, SPEC)
        number += 1
    leave(group, start, call, chunks, status)
