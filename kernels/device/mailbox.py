"""The place of a word in a mailbox, and the clearing of the idle mailbox before an epoch number can recur.

There are two mailboxes for each protocol, used in turn by the epoch's parity. Each has one buffer per source rank.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tricomm.kernels import layout
from tricomm.kernels.group import ll_base, ll_bytes, simple_base, simple_bytes, table_of, wide_base, wide_bytes
from tricomm.kernels.primitives import put_ll, signal
from tricomm.kernels.wide_words import COMPILES, clear_wide

HEADERS = tl.constexpr(layout.HEADERS)
MAX_BLOCKS = tl.constexpr(layout.MAX_BLOCKS)
CLEAR_EVERY = tl.constexpr(layout.CLEAR_EVERY)
PHASES = tl.constexpr(layout.PHASES)


@triton.jit
def buffer_words(group, PARTS: tl.constexpr, SPEC: tl.constexpr):
    """64-bit payload words in one of the PARTS equal parts of a source's buffer."""
    if SPEC.WIDE:
        words = (wide_bytes(group).to(tl.uint64) // (32 * PARTS)).to(tl.int64) * 3
    elif SPEC.LL:
        words = (ll_bytes(group).to(tl.uint64) // (16 * PARTS)).to(tl.int64)
    else:
        words = (simple_bytes(group).to(tl.uint64) // (8 * PARTS)).to(tl.int64)
    return words


@triton.jit
def ll_buffer(chunk, head, source, first, SPEC: tl.constexpr):
    """Pointer (int64*, 16-byte aligned) to the tile at payload word `first` in `source`'s buffer of words with flags.

    `head` is the head of the arena that holds the mailbox: a peer's arena to write, `table_of(group)` to read.
    """
    return tl.multiple_of(head + ll_place(chunk, source, first, SPEC), 16)


@triton.jit
def ll_place(chunk, source, first, SPEC: tl.constexpr):
    """int64: the place to which `ll_buffer` points, in 64-bit words from the head of the arena."""
    group = chunk.group
    buffer = (chunk.epoch & 1) * SPEC.WORLD_SIZE + source
    if SPEC.WIDE:
        offset = wide_base(group) + buffer * wide_bytes(group)
        place = first // 3 * 4  # a tile begins at a multiple of 3 words
    else:
        offset = ll_base(group) + buffer * ll_bytes(group)
        place = 2 * first
    return (offset >> 3) + place


@triton.jit
def flagged_bytes(group, SPEC: tl.constexpr):
    """int64: bytes of a source's buffer in a mailbox of words with flags."""
    if SPEC.WIDE:
        nbytes = wide_bytes(group)
    else:
        nbytes = ll_bytes(group)
    return nbytes


@triton.jit
def simple_buffer(chunk, head, source, SPEC: tl.constexpr):
    """Pointer (int64*, 16-byte aligned) to `source`'s buffer of the simple mailbox in the arena at `head`."""
    group = chunk.group
    buffer = (chunk.epoch & 1) * SPEC.WORLD_SIZE + source
    offset = simple_base(group) + buffer * simple_bytes(group)
    return tl.multiple_of(head + offset // 8, 16)


@triton.jit
def clears(epoch):
    """True for two epochs in every 2^30; each clears one of the two mailboxes. Not for epoch 1, because memory starts
    zeroed."""
    return ((epoch & (CLEAR_EVERY - 1)) <= 1) & (epoch > 1)


@triton.jit
def clear_idle(group, epoch, PARTS: tl.constexpr, SPEC: tl.constexpr):
    """In an epoch that clears, before the header is sent: zero this block's share of the mailboxes that this epoch does
    not use.

    Otherwise a word that no message has overwritten would look new when its epoch number recurs after 2^32 epochs. The
    share is the part that this block owns in the next epoch of this launch: each buffer has PARTS runs of tiles, of
    which the blocks in turn own OWNED each. The same block of a peer writes there only after it has seen the header
    that follows the clearing. In a mailbox that this launch does not use, any division into shares is right. The zeros
    are stored as the LL or wide words that they replace, by strong stores, so that old and new words have one order.
    """
    if clears(epoch):
        table = table_of(group)
        grid = tl.num_programs(0)
        block = tl.program_id(0)
        idle = (epoch & 1) ^ 1
        ll_runs: tl.constexpr = SPEC.WORLD_SIZE * PARTS if SPEC.LL and not SPEC.WIDE else 1
        clear_runs(table + ll_base(group) // 8, SPEC.WORLD_SIZE * ll_bytes(group) // 8, idle, ll_runs, False, SPEC)
        if COMPILES or not SPEC.PTX:  # else no kernel uses wide words
            wide_runs: tl.constexpr = SPEC.WORLD_SIZE * PARTS if SPEC.WIDE else 1
            start, words = table + wide_base(group) // 8, SPEC.WORLD_SIZE * wide_bytes(group) // 8
            clear_runs(start, words, idle, wide_runs, True, SPEC)
        lane = tl.arange(0, SPEC.LANES)
        for row in range(PHASES * SPEC.WORLD_SIZE):
            phase, source = row // SPEC.WORLD_SIZE, row % SPEC.WORLD_SIZE
            headers = table + HEADERS // 8 + ((phase * 2 + idle) * SPEC.WORLD_SIZE + source) * MAX_BLOCKS
            for first in range(block, MAX_BLOCKS, grid * SPEC.LANES):
                at = first + grid * lane
                signal(headers + at, tl.zeros([SPEC.LANES], tl.int64), at < MAX_BLOCKS, False, SPEC.PTX)
        tl.debug_barrier()


@triton.jit
def clear_runs(mailboxes, words, idle, RUNS: tl.constexpr, WIDE: tl.constexpr, SPEC: tl.constexpr):
    """Clear this block's tiles in each of RUNS equal runs of mailbox `idle`, which has `words` words of 64 bits. A tile
    takes 2 BLOCK of them, under `ll` and under `ll128`; a tile of codes takes ROOM."""
    STEP: tl.constexpr = 2 * SPEC.BLOCK
    CODES: tl.constexpr = SPEC.LL and SPEC.CODED > 1
    OWNED: tl.constexpr = SPEC.ROOM if CODES else SPEC.OWNED * STEP
    run = words // RUNS
    for part in range(RUNS):
        start = mailboxes + idle * words + part * run
        for own in range(tl.program_id(0).to(tl.int64) * OWNED, run, tl.num_programs(0).to(tl.int64) * OWNED):
            for first in range(own, tl.minimum(own + OWNED, run), STEP):
                until = tl.minimum(own + OWNED, run) if CODES else run  # others are whole STEPs in any case
                if WIDE:
                    clear_wide(start + first, (until - first) // 2, SPEC.BLOCK)
                else:
                    zeros = tl.zeros([SPEC.BLOCK], tl.int64)
                    put_ll(start + first, zeros, 0, (until - first) // 2, SPEC.BLOCK, SPEC.PTX)
