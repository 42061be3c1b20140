"""The first half of every one-shot kernel: a chunk of this rank's input goes to where the peers will find it."""

from __future__ import annotations

import triton
import triton.language as tl

from tricomm.kernels.device.mailbox import clear_idle, clears, ll_slot, simple_room
from tricomm.kernels.device.packing import load_words, store_tile
from tricomm.kernels.primitives import RANK, peer, put_ll, send_headers


@triton.jit
def open_epoch(group, epoch, call, RUNS: tl.constexpr, WORLD_SIZE: tl.constexpr, BLOCK: tl.constexpr,
               LANES: tl.constexpr, PTX: tl.constexpr):  # fmt: skip
    """LL: clear the idle mailbox where its time has come, then say that this block is in `epoch`.

    The header is relaxed, because the data carry flags of their own; but where it follows a clearing it releases the
    zeros, or one of them could still land on a word that a peer pushed after it had seen the header.
    """
    clear_idle(group, epoch, RUNS, WORLD_SIZE, BLOCK, LANES, PTX)
    if clears(epoch):
        send_headers(group, epoch, call, 0, True, WORLD_SIZE, LANES, PTX)
    else:
        send_headers(group, epoch, call, 0, False, WORLD_SIZE, LANES, PTX)


@triton.jit
def push_to_all(x_ptr, group, epoch, base, count, numel, WORLD_SIZE: tl.constexpr, BLOCK: tl.constexpr,
                ALIGNED: tl.constexpr, PTX: tl.constexpr):  # fmt: skip
    """LL: this block's tiles of words base .. base + count into this rank's room at every rank, own rank included.

    Starts at the own rank, so that no two ranks write to the same one at the same time.
    """
    me = tl.load(group + RANK)
    for first in range(tl.program_id(0).to(tl.int64) * BLOCK, count, tl.num_programs(0) * BLOCK):
        mine = load_words(x_ptr, base + first, numel, BLOCK, ALIGNED)
        for step in range(WORLD_SIZE):
            to = (me + step) % WORLD_SIZE
            slot = ll_slot(group, peer(group, to), epoch, me, first, WORLD_SIZE)
            put_ll(slot, mine, epoch, count - first, BLOCK, PTX)


@triton.jit
def stage(x_ptr, group, epoch, base, count, numel, WORLD_SIZE: tl.constexpr, BLOCK: tl.constexpr,
          ALIGNED: tl.constexpr):  # fmt: skip
    """Simple: this block's tiles of words base .. base + count into the own rank's rooms, used as one stage."""
    room = simple_room(group, group, epoch, 0, WORLD_SIZE)
    for first in range(tl.program_id(0).to(tl.int64) * BLOCK, count, tl.num_programs(0) * BLOCK):
        store_tile(room, first, load_words(x_ptr, base + first, numel, BLOCK, ALIGNED), count, BLOCK)
