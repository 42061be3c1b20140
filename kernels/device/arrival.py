"""LL: wait until words have arrived, and until they are safe to use; announce the start of a launch.

One loop polls everything at once: the words of a tile from several ranks; this block's header from every peer; and the
block's epoch word, which shows whether another launch of this communicator runs. All loads of a round are in flight
together, and one reduction over the block gives the state:

    0: all has arrived   1: something is late   2: aborted   3: another launch   4: a peer made another call

The larger number wins, so a wrong header ends the wait even if its sender's words never come, and no word is used
before every peer's header of this epoch was seen.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tricomm.kernels import layout
from tricomm.kernels.device.halves import halves, joined
from tricomm.kernels.device.planes import no_scales, no_tile, see_scales
from tricomm.kernels.group import control_of, table_of
from tricomm.kernels.primitives import (
    EPOCHS,
    LOW,
    RUNS,
    STARTED,
    acquire,
    kept_words,
    look,
    pause,
    report_mismatch,
    report_overlap,
    running,
    signal,
)
from tricomm.kernels.wide_words import plane_words, see_wide

HEADERS = tl.constexpr(layout.HEADERS)
MAX_BLOCKS = tl.constexpr(layout.MAX_BLOCKS)
SOURCES = tl.constexpr(layout.MAX_WORLD_SIZE)


@triton.jit
def headers_and_epoch(chunk, place, mask, SPEC: tl.constexpr):
    """int64: words of this rank's group table and headers, which may be written at the same time; 0 outside of `mask`.
    There the address is that of this block's epoch word, because another block may store to its word while this one
    polls.

    The loads acquire, because a later call may overwrite data that the peers read before they sent these headers. So
    they come last in a round, and no other load waits for them.
    """
    at = table_of(chunk.group) + tl.where(mask, place, EPOCHS + tl.program_id(0))
    return tl.where(mask, acquire(at, mask, SPEC.PTX), 0)


@triton.jit
def poll_planes(chunk, pointers, lefts, COUNT: tl.constexpr, MEET: tl.constexpr, SPEC: tl.constexpr):
    """Poll the places of COUNT tiles in this rank's mailbox at once until all words of each have the epoch.

    `pointers` are int64*; the caller hints that they are 16-byte aligned, because a hint given here would be lost.
    `lefts` (int64) are the words from each tile's first to the end of its run; words past that end are not awaited.
    Of a tile of codes the scales are awaited, too, and follow its planes in the tuple.
    MEET: also wait for every peer's header of phase 0, and compare its fingerprint. Returns (a tuple of COUNT tiles,
    status). A status other than 0 and 2 (aborted) has been reported in the status word. A word with the awaited flag is
    complete, because payload and flag are one access: a volatile load, relaxed at `.sys` scope (see `get_ll`), or a
    relaxed load of 128 bits (see `wide_words.py`).
    """
    BLOCK: tl.constexpr = SPEC.PLANE
    # Lanes for the headers, and one for the epoch word. A tile on a GPU has no fewer, and then one reduction is enough.
    META: tl.constexpr = BLOCK if BLOCK >= 2 * SOURCES else 2 * SOURCES
    flag, call = chunk.epoch.to(tl.int32), chunk.call
    source = tl.arange(0, META)
    awaited = (source < SPEC.WORLD_SIZE) & (source != chunk.me)
    own = source == SOURCES
    runs = ((call >> 32) | RUNS).to(tl.int32)
    row = (chunk.epoch & 1) * SPEC.WORLD_SIZE + source
    # One lane a word, not all threads: the reduction combines their states.
    place = tl.where(own, EPOCHS, HEADERS // 8 + row * MAX_BLOCKS) + tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    words = ()
    for _ in tl.static_range(COUNT):
        words = words + (no_tile(SPEC) + no_scales(SPEC),)
    said = tl.zeros([META], tl.int64)
    code = 1
    spins = 0
    while code == 1:
        late = lane * 0
        payload = ()
        for n in tl.static_range(COUNT):
            if SPEC.WIDE:
                tile, old = see_wide(pointers[n], flag, BLOCK)
                if SPEC.CODED > 1:
                    scales, unscaled = see_scales(pointers[n], flag, SPEC)
                    tile, old = tile + scales, old | unscaled
                late |= tl.where(lane < plane_words(lefts[n], BLOCK), old, 0)
                payload = payload + (tile,)
            else:
                # Without a mask, which would narrow the access: there is room for a whole tile, and extra words are
                # ignored.
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
            said = headers_and_epoch(chunk, place, awaited | own, SPEC)
            upper = (said >> 32).to(tl.int32)
            unseen = upper != flag
        if SPEC.PTX:
            late = (late != 0).to(tl.int32)
        outcome = late | look(chunk.group, spins, late, SPEC.PTX)
        if MEET:
            wrong = said.to(tl.int32) != call.to(tl.int32)
            foreign = own & (upper != 0) & (upper != runs)
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
        report_overlap(chunk.group, own)
    # The next stores may overwrite the place that was loaded, with words in another order, so all loads must be done.
    # With several warps the reduction contains a barrier; in a single warp with one word a lane, each lane stores where
    # it has loaded. Scales are an exception: one lane stores what several have loaded.
    if (SPEC.LANES == 32) & ((BLOCK > 32) | (SPEC.CODED > 1)):
        tl.debug_barrier()
    return words, tl.minimum(code, 2)


@triton.jit
def announce(group, epoch, seen, call, LANES: tl.constexpr, PTX: tl.constexpr):
    """Tell the host, and in the epoch words the communicator's other launches, that this launch runs. If another launch
    has announced itself there, report the overlap. `epoch` and `seen` are the results of `read_epoch`.

    The stores are strong, because other threads may read the words at the same time; only the read of the storing
    thread counts.
    """
    if tl.program_id(0) == 0:
        tl.store(control_of(group) + STARTED, epoch)
    lane, kept = kept_words(LANES)
    report_overlap(group, kept & (seen != epoch))
    signal(table_of(group) + EPOCHS + lane, running(epoch, call) + lane * 0, kept, False, PTX)
