"""Where a word of a mailbox is, and how the idle mailbox is cleared before an epoch can come round again."""

from __future__ import annotations

import triton
import triton.language as tl

from tricomm.kernels import layout
from tricomm.kernels.primitives import put_ll, signal

LL_BASE = tl.constexpr(layout.LL_BASE)
LL_ROOM = tl.constexpr(layout.LL_ROOM)
SIMPLE_BASE = tl.constexpr(layout.SIMPLE_BASE)
SIMPLE_ROOM = tl.constexpr(layout.SIMPLE_ROOM)
HEADERS = tl.constexpr(layout.HEADERS)
MAX_BLOCKS = tl.constexpr(layout.MAX_BLOCKS)
CLEAR_EVERY = tl.constexpr(layout.CLEAR_EVERY)
PHASES = tl.constexpr(layout.PHASES)


@triton.jit
def ll_room(group):
    """Bytes of one LL room: one parity, one source."""
    return tl.load(group + LL_ROOM)


@triton.jit
def ll_slot(group, head, epoch, source, first, WORLD_SIZE: tl.constexpr):
    """Pointer (int64*, 16-byte aligned) to the LL words of payload word `first` and on in `source`'s room.

    `head` is the head of the arena that holds the mailbox: `peer(group, p)` to write, `group` to read one's own.
    """
    room = tl.load(group + LL_BASE) + ((epoch & 1) * WORLD_SIZE + source) * tl.load(group + LL_ROOM)
    return tl.multiple_of(head + room // 8 + 2 * first, 16)


@triton.jit
def simple_room(group, head, epoch, source, WORLD_SIZE: tl.constexpr):
    """Pointer (int64*, 16-byte aligned) to `source`'s room of the simple mailbox in the arena at `head`."""
    offset = tl.load(group + SIMPLE_BASE) + ((epoch & 1) * WORLD_SIZE + source) * tl.load(group + SIMPLE_ROOM)
    return tl.multiple_of(head + offset // 8, 16)


@triton.jit
def clears(epoch):
    """True for the two epochs in 2^30 that clear a mailbox each. Not for epoch 1: memory starts zeroed."""
    return ((epoch & (CLEAR_EVERY - 1)) <= 1) & (epoch > 1)


@triton.jit
def clear_idle(group, epoch, RUNS: tl.constexpr, WORLD_SIZE: tl.constexpr, BLOCK: tl.constexpr, LANES: tl.constexpr,
               PTX: tl.constexpr):  # fmt: skip
    """Every 2^30 epochs, before its header: zero this block's share of the mailbox that this epoch does not use.

    A word that no message has overwritten since would otherwise be taken for new when its epoch comes round after
    2^32. The share is what this block owns in the next epoch of this launch (each room in RUNS runs of tiles, tile
    t for block t % grid), and a peer's same block writes there only after it has seen the header sent after this.
    The zeros are LL words like those that they replace: strong stores, so that old and new ones have one order.
    """
    if clears(epoch):
        grid = tl.num_programs(0)
        block = tl.program_id(0)
        idle = (epoch & 1) ^ 1
        run = tl.load(group + LL_ROOM) // (8 * RUNS)
        for part in range(WORLD_SIZE * RUNS):
            room = group + tl.load(group + LL_BASE) // 8 + idle * WORLD_SIZE * RUNS * run + part * run
            for first in range(block.to(tl.int64) * 2 * BLOCK, run, grid * 2 * BLOCK):
                put_ll(room + first, tl.zeros([BLOCK], tl.int64), 0, (run - first) // 2, BLOCK, PTX)
        lane = tl.arange(0, LANES)
        for row in range(PHASES * WORLD_SIZE):
            rows = group + HEADERS // 8 + ((row // WORLD_SIZE * 2 + idle) * WORLD_SIZE + row % WORLD_SIZE) * MAX_BLOCKS
            for first in range(block, MAX_BLOCKS, grid * LANES):
                at = first + grid * lane
                signal(rows + at, tl.zeros([LANES], tl.int64), at < MAX_BLOCKS, False, PTX)
        tl.debug_barrier()
