"""One shot, by push, either protocol: tiles into peers' rooms, a meeting, and tiles out of one's own rooms.

    begin ─▶ push (tiles of the input into this rank's room at some ranks) ─▶ meet ─▶ take (tiles of some rooms)

LL        the words carry flags, so `meet` only compares fingerprints and `take` polls. Hops: 1.
simple    plain data; `meet` is a barrier behind the pushes, and `take` loads what has arrived. Hops: 1, a barrier.

Bytes     what is pushed; under LL twice that, for half of it is flags. Nothing is read from a peer.
Waits     header, in every chunk, from every peer, whatever is sent and to whom: the peer made the same call and has
          left the epoch before the last. Under `simple` it is release to acquire at `.sys`: what the peer's block b
          pushed here is visible. LL words: the flag is this epoch; flag and payload are one access.
Reuse     two mailboxes, by the epoch's parity. A peer writes epoch e + 2 only after it has seen this block's header
          of e + 1, sent after this block has taken all that it takes of e. A rank that takes nothing (of a broadcast
          its root, of a gather all but the root) sends and awaits the same headers: so a root never runs ahead.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tricomm.kernels.device.mailbox import SIMPLE_ROOM, clear_idle, ll_room, ll_slot, simple_room
from tricomm.kernels.device.packing import load_tile, load_words, store_tile
from tricomm.kernels.device.staging import open_epoch
from tricomm.kernels.primitives import RANK, barrier, get_ll, peer, put_ll, wait_headers


@triton.jit
def room_words(group, LL: tl.constexpr):
    """Payload words of one room: of a chunk."""
    if LL:
        words = ll_room(group) // 16
    else:
        words = tl.load(group + SIMPLE_ROOM) // 8
    return words


@triton.jit
def begin(group, epoch, call, LL: tl.constexpr, WORLD_SIZE: tl.constexpr, BLOCK: tl.constexpr, LANES: tl.constexpr,
          PTX: tl.constexpr):  # fmt: skip
    """Enter `epoch`. Pairs with `meet`."""
    if LL:
        open_epoch(group, epoch, call, 1, WORLD_SIZE, BLOCK, LANES, PTX)
    else:
        clear_idle(group, epoch, 1, WORLD_SIZE, BLOCK, LANES, PTX)


@triton.jit
def meet(group, epoch, call, LL: tl.constexpr, WORLD_SIZE: tl.constexpr, LANES: tl.constexpr, PTX: tl.constexpr):
    """Every peer's block has made the same call; under `simple`, what it pushed is here. Returns the status."""
    if LL:
        status = wait_headers(group, epoch, call, 0, WORLD_SIZE, LANES, PTX)
    else:
        status = barrier(group, epoch, call, 0, WORLD_SIZE, LANES, PTX)
    return status


@triton.jit
def push_tile(group, to, epoch, first, words, count, LL: tl.constexpr, WORLD_SIZE: tl.constexpr, BLOCK: tl.constexpr,
              PTX: tl.constexpr):  # fmt: skip
    """The tile at word `first` of a run of `count`, into this rank's room at rank `to`."""
    me = tl.load(group + RANK)
    if LL:
        slot = ll_slot(group, peer(group, to), epoch, me, first, WORLD_SIZE)
        put_ll(slot, words, epoch, count - first, BLOCK, PTX)
    else:
        store_tile(simple_room(group, peer(group, to), epoch, me, WORLD_SIZE), first, words, count, BLOCK)


@triton.jit
def push_row(x_ptr, group, to, epoch, base, count, numel, LL: tl.constexpr, WORLD_SIZE: tl.constexpr,
             BLOCK: tl.constexpr, ALIGNED, PTX: tl.constexpr):  # fmt: skip
    """This block's tiles of words base .. base + count of x_ptr[0:numel], to rank `to`."""
    for first in range(tl.program_id(0).to(tl.int64) * BLOCK, count, tl.num_programs(0) * BLOCK):
        words = load_words(x_ptr, base + first, numel, BLOCK, ALIGNED)
        push_tile(group, to, epoch, first, words, count, LL, WORLD_SIZE, BLOCK, PTX)


@triton.jit
def push_rows(x_ptr, group, epoch, base, count, numel, LL: tl.constexpr, WORLD_SIZE: tl.constexpr,
              BLOCK: tl.constexpr, ALIGNED: tl.constexpr, PTX: tl.constexpr):  # fmt: skip
    """Row r of x_ptr[0 : WORLD_SIZE * numel] to rank r, one's own included.

    Starts at the own rank, so that no two ranks write to the same one at the same time.
    """
    me = tl.load(group + RANK)
    for step in range(WORLD_SIZE):
        to = (me + step) % WORLD_SIZE
        push_row(x_ptr + to * numel, group, to, epoch, base, count, numel, LL, WORLD_SIZE, BLOCK, ALIGNED, PTX)


@triton.jit
def take(group, source, epoch, first, count, SOURCES: tl.constexpr, LL: tl.constexpr, WORLD_SIZE: tl.constexpr,
         BLOCK: tl.constexpr, PTX: tl.constexpr):  # fmt: skip
    """The tile at word `first` of SOURCES rooms of one's own from rank `source` on: (a tuple of tiles, status)."""
    status = 0
    parts = ()
    if LL:
        slot = ll_slot(group, group, epoch, source, first, WORLD_SIZE)
        parts, status = get_ll(group, slot, ll_room(group) // 8, epoch, count - first, SOURCES, BLOCK, PTX)
    else:
        for n in tl.static_range(SOURCES):
            parts = parts + (load_tile(simple_room(group, group, epoch, source + n, WORLD_SIZE), first, count, BLOCK),)
    return parts, status
