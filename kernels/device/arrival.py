"""LL: wait until words have arrived, and until they are safe to use; announce the start and the end of a launch.

One loop polls everything at once: the words of a tile, from several ranks; this block's header from every peer; and the
busy word, which shows another launch of this communicator. All loads of a round are in flight together, and one
reduction over the block gives the state:

    0: all has arrived   1: something is late   2: aborted   3: another launch   4: a peer made another call

The larger number wins, so a wrong header ends the wait even if its sender's words never come, and no word is used
before every peer's header of this epoch was seen.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tricomm.kernels import layout
from tricomm.kernels.device.halves import halves, joined
from tricomm.kernels.device.planes import no_tile
from tricomm.kernels.group import control_of, table_of
from tricomm.kernels.primitives import (
    ARRIVALS,
    BUSY,
    ENDED,
    EPOCH,
    LOW,
    STARTED,
    acquire,
    advance,
    look,
    pause,
    report_mismatch,
    report_overlap,
    signal,
)
from tricomm.kernels.wide_words import plane_words, see_wide

HEADERS = tl.constexpr(layout.HEADERS)
MAX_BLOCKS = tl.constexpr(layout.MAX_BLOCKS)
SOURCES = tl.constexpr(layout.MAX_WORLD_SIZE)


@triton.jit
def headers_and_busy(chunk, place, mask, SPEC: tl.constexpr):
    """int64: words of one's own group table and headers, which may be written at the same time; 0 outside of `mask`.

    Acquires: a later call may push plain data over what the peers have read before they sent these headers. So it is
    the last load of a round, which no other one waits for.
    """
    at = table_of(chunk.group) + tl.where(mask, place, BUSY)
    return tl.where(mask, acquire(at, mask, SPEC.PTX), 0)


@triton.jit
def poll_planes(chunk, pointers, lefts, COUNT: tl.constexpr, MEET: tl.constexpr, SPEC: tl.constexpr):
    """Poll the places of COUNT tiles in one's own mailbox at once until all words of each have the epoch.

    `pointers` are int64*, with the caller's hint that they are 16-byte aligned (a hint given here would be lost).
    `lefts` (int64) are the words from each tile's first to the end of its run; words past that end are not awaited.
    MEET: also wait for every peer's header of phase 0, and compare its fingerprint. Returns (a tuple of COUNT tiles,
    status). A status other than 0 and 2 (aborted) has been reported in the status word. A word that was seen is
    complete, because payload and flag are one access: a volatile load, relaxed at `.sys` scope, see `get_ll`; or a
    relaxed one of 128 bits, see `wide_words.py`.
    """
    BLOCK: tl.constexpr = SPEC.PLANE
    # Lanes for the headers, and one for the busy word. A tile on a GPU has no fewer, and then one reduction is enough.
    META: tl.constexpr = BLOCK if BLOCK >= 2 * SOURCES else 2 * SOURCES
    flag, call = chunk.epoch.to(tl.int32), chunk.call
    source = tl.arange(0, META)
    awaited = (source < SPEC.WORLD_SIZE) & (source != chunk.me)
    busy = source == SOURCES
    row = (chunk.epoch & 1) * SPEC.WORLD_SIZE + source
    # One lane a word, not all threads: the reduction brings them together.
    place = tl.where(busy, BUSY, HEADERS // 8 + row * MAX_BLOCKS + tl.program_id(0))
    lane = tl.arange(0, BLOCK)
    words = ()
    for _ in tl.static_range(COUNT):
        words = words + (no_tile(SPEC),)
    said = tl.zeros([META], tl.int64)
    code = 1
    spins = 0
    while code == 1:
        late = lane * 0
        payload = ()
        for n in tl.static_range(COUNT):
            if SPEC.WIDE:
                tile, old = see_wide(pointers[n], flag, BLOCK)
                late |= tl.where(lane < plane_words(lefts[n], BLOCK), old, 0)
                payload = payload + (tile,)
            else:
                # Without a mask, which would narrow the access: a whole tile lies inside its room, whatever is in it.
                at = pointers[n] + tl.arange(0, 2 * BLOCK)
                seen = tl.load(at, volatile=True)
                data, flags = halves(seen, SPEC.PTX)
                low, high = tl.split(tl.reshape(data, [BLOCK, 2]))
                if SPEC.PTX:  # one instruction where a comparison takes two; the explorer reads comparisons
                    old = flags ^ flag
                else:
                    old = (flags != flag).to(tl.int32)
                low_old, high_old = tl.split(tl.reshape(old, [BLOCK, 2]))
                late |= tl.where(lane < lefts[n], low_old | high_old, 0)
                payload = payload + ((joined((low, high), SPEC.PTX),),)
        words = payload
        if MEET:
            said = headers_and_busy(chunk, place, awaited | busy, SPEC)
            unseen = (said >> 32).to(tl.int32) != flag
        if SPEC.PTX:
            late = (late != 0).to(tl.int32)
        outcome = late | look(chunk.group, spins, late, SPEC.PTX)
        if MEET:
            wrong = said.to(tl.int32) != call.to(tl.int32)
            foreign = busy & (((said != 0) & (said != call)) | ((chunk.owner != 0) & (chunk.owner != call)))
            met = tl.where(foreign, 3, tl.where(unseen, awaited.to(tl.int32), tl.where(awaited & wrong, 4, 0)))
            if META == BLOCK:
                code = tl.max(tl.maximum(outcome, met), axis=0)
            else:
                code = tl.maximum(tl.max(outcome, axis=0), tl.max(met, axis=0))
        else:
            code = tl.max(outcome, axis=0)
        spins += 1
        pause(spins)
    if code == 4:
        report_mismatch(chunk.group, source, awaited & (((said >> 32) & LOW) == chunk.epoch), said, call)
    if code == 3:
        report_overlap(chunk.group)
    # The next stores may go where the tile was loaded, with its words in another order. With several warps the
    # reduction contains a barrier; in a single warp with one word a lane, each lane stores where it has loaded.
    if (SPEC.LANES == 32) & (BLOCK > 32):
        tl.debug_barrier()
    return words, tl.minimum(code, 2)


@triton.jit
def announce(group, epoch, call, LANES: tl.constexpr, PTX: tl.constexpr):
    """Announce that this launch runs: to the host, and in the busy word to another launch of this communicator.

    The busy word gets a strong store, because other threads may read it now: only the storing thread's read counts.
    """
    if tl.program_id(0) == 0:
        tl.store(control_of(group) + STARTED, epoch)
    lane = tl.arange(0, LANES)
    signal(table_of(group) + BUSY + lane * 0, call + lane * 0, lane == 0, False, PTX)


@triton.jit
def arrive(group, LANES: tl.constexpr):
    """The first half of `finish`, early: returns how many blocks of this launch have arrived before (int32 [LANES], in
    lane 0), for `depart`. Once a block, after its last read of mailboxes, headers, epoch and busy word.

    It returns a tile, because all threads would wait for a scalar: so the atomic completes while the block continues.
    """
    lane = tl.arange(0, LANES)
    before = tl.zeros([LANES], tl.int64)
    tl.debug_barrier()  # all threads have read before one of them stores
    if tl.num_programs(0) > 1:
        # acq_rel: the last arrival is ordered after the reads of all other blocks.
        at = table_of(group) + ARRIVALS + lane * 0
        before = tl.atomic_add(at, before + 1, mask=lane == 0, sem="acq_rel", scope="gpu")
    return before.to(tl.int32)


@triton.jit
def depart(group, epoch, chunks, before, LANES: tl.constexpr):
    """End of a launch whose blocks have called `arrive`: the one that came last, and only it, advances the epoch."""
    lane = tl.arange(0, LANES)
    tl.debug_barrier()  # one thread has acquired; the barrier orders the stores of all threads after that
    last = (lane == 0) & (before == tl.num_programs(0) - 1)
    table = table_of(group) + lane * 0
    zeros = tl.zeros([LANES], tl.int64)
    tl.store(table + ARRIVALS, zeros, mask=last)
    tl.store(table + BUSY, zeros, mask=last)
    later = zeros + advance(epoch, chunks)
    tl.store(table + EPOCH, later, mask=last)
    tl.store(control_of(group) + ENDED + lane * 0, later, mask=last)
