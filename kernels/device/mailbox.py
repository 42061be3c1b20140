"""Where a word of a mailbox is, and how the idle mailbox is cleared before an epoch can come round again.

There are two mailboxes for each protocol, used in turn by the epoch's parity. Each has one buffer per source rank.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tricomm.kernels import layout
from tricomm.kernels.device.group import ll_base, ll_bytes, simple_base, simple_bytes, table_of
from tricomm.kernels.primitives import put_ll, signal

HEADERS = tl.constexpr(layout.HEADERS)
MAX_BLOCKS = tl.constexpr(layout.MAX_BLOCKS)
CLEAR_EVERY = tl.constexpr(layout.CLEAR_EVERY)
PHASES = tl.constexpr(layout.PHASES)


@triton.jit
def buffer_words(group, PARTS: tl.constexpr, SPEC: tl.constexpr):
    """64-bit payload words of one of the PARTS equal parts of a per-source buffer."""
    if SPEC.LL:
        words = ll_bytes(group) // (16 * PARTS)
    else:
        words = simple_bytes(group) // (8 * PARTS)
    return words


@triton.jit
def ll_buffer(chunk, head, source, first, SPEC: tl.constexpr):
    """Pointer (int64*, 16-byte aligned) to the LL words of payload word `first` and on in `source`'s buffer.

    `head` is the head of the arena that holds the mailbox: a peer's to write, `table_of(group)` to read one's own.
    """
    group = chunk.group
    buffer = (chunk.epoch & 1) * SPEC.WORLD_SIZE + source
    offset = ll_base(group) + buffer * ll_bytes(group)
    return tl.multiple_of(head + offset // 8 + 2 * first, 16)


@triton.jit
def simple_buffer(chunk, head, source, SPEC: tl.constexpr):
    """Pointer (int64*, 16-byte aligned) to `source`'s buffer of the simple mailbox in the arena at `head`."""
    group = chunk.group
    buffer = (chunk.epoch & 1) * SPEC.WORLD_SIZE + source
    offset = simple_base(group) + buffer * simple_bytes(group)
    return tl.multiple_of(head + offset // 8, 16)


@triton.jit
def clears(epoch):
    """True for the two epochs in 2^30 that clear a mailbox each. Not for epoch 1: memory starts zeroed."""
    return ((epoch & (CLEAR_EVERY - 1)) <= 1) & (epoch > 1)


@triton.jit
def clear_idle(group, epoch, PARTS: tl.constexpr, SPEC: tl.constexpr):
    """Every 2^30 epochs, before its header: zero this block's share of the mailbox that this epoch does not use.

    A word that no message has overwritten since would otherwise be taken for new when its epoch comes round after
    2^32. The share is what this block owns in the next epoch of this launch (each buffer in PARTS runs of OWNED words,
    in turn for each block), and a peer's same block writes there only after it has seen the header sent after this.
    The zeros are LL words like those that they replace: strong stores, so that old and new ones have one order.
    """
    if clears(epoch):
        table = table_of(group)
        grid = tl.num_programs(0)
        block = tl.program_id(0)
        idle = (epoch & 1) ^ 1
        run = ll_bytes(group) // (8 * PARTS)
        for part in range(SPEC.WORLD_SIZE * PARTS):
            start = table + ll_base(group) // 8 + idle * SPEC.WORLD_SIZE * PARTS * run + part * run
            for own in range(block.to(tl.int64) * 2 * SPEC.OWNED, run, grid * 2 * SPEC.OWNED):
                for first in range(own, tl.minimum(own + 2 * SPEC.OWNED, run), 2 * SPEC.BLOCK):
                    zeros = tl.zeros([SPEC.BLOCK], tl.int64)
                    put_ll(start + first, zeros, 0, (run - first) // 2, SPEC.BLOCK, SPEC.PTX)
        lane = tl.arange(0, SPEC.LANES)
        for row in range(PHASES * SPEC.WORLD_SIZE):
            phase, source = row // SPEC.WORLD_SIZE, row % SPEC.WORLD_SIZE
            headers = table + HEADERS // 8 + ((phase * 2 + idle) * SPEC.WORLD_SIZE + source) * MAX_BLOCKS
            for first in range(block, MAX_BLOCKS, grid * SPEC.LANES):
                at = first + grid * lane
                signal(headers + at, tl.zeros([SPEC.LANES], tl.int64), at < MAX_BLOCKS, False, SPEC.PTX)
        tl.debug_barrier()
