"""Channels: how a message from one rank to another is divided, and how a slot is taken, filled and given back.

    sender                                     receiver
    wait for the ack of the slot's last piece
    payload ───────────────────────────────▶   slot [number % 4] of channel [sender][c]
    header (facts, tag) ───────────────────▶   two words beside it
                                               find the first piece of that tag; copy it out
                             ◀──────── ack     the slot is free

An ordered pair of ranks has a number of channels, each a queue of numbered pieces on its own: piece p of a message
with tag t goes through channel (p + t) % channels. The sender's block b serves the message's channels b, b + grid, and
so on, one after another, and so does the receiver's; where that has fewer blocks, each does several blocks' channels
in that order. So it needs as many blocks of the sender at once as it has itself, and messages of different sizes
never share a slot at once.

Number    counts the pieces of a channel, from 4 to 2^32 - 1 and round again: a multiple of 4 of them, so that the slot
          goes on by one. It is the flag of the header, of the ack and, under `ll`, of every word. The counters lie in
          each side's own memory, so a CUDA graph replays them.
Waits     sender, for the ack of the piece four before: its slot has been read. Receiver, for a header: a message is
          there, and it is the one asked for. Under `simple` that is release to acquire at `.sys`, so the payload is
          there too; under `ll` words carry the number themselves.
Reuse     by acknowledgement alone, release to acquire: the receiver's loads before its ack, the sender's stores after.
          Mailboxes, headers and the epoch of the collectives are not touched.
Stale     whatever lies in a slot may look like an LL word: plain data do, and so do words of a number that has come
          round. So where `simple` was there before, and every 2^30 pieces, `ll` clears the slot first, and then its
          header releases: who sees the header sees no word that is older. Else all old words have older numbers.
Order     messages of one pair and one tag arrive as they were sent; another tag may be taken first, as long as no more
          than 4 pieces of a channel wait.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tricomm.kernels import layout
from tricomm.kernels.primitives import CONTROL, LOW, STATUS, acquire, look, pause, put_ll, signal, wait_sequence

LINES = tl.constexpr(layout.LINES)
SLOT_DATA = tl.constexpr(layout.SLOT_DATA)
SLOT_BYTES = tl.constexpr(layout.SLOT_BYTES)
CHANNELS = tl.constexpr(layout.CHANNELS)
SLOTS = tl.constexpr(layout.SLOTS)
LINE_WORDS = tl.constexpr(layout.LINE // 8)
ACKS = tl.constexpr(layout.ACKS)
NUMBERS = tl.constexpr(layout.EPOCH_LIMIT)
CLEAR_EVERY = tl.constexpr(layout.CLEAR_EVERY)
PENDING = tl.constexpr(layout.PENDING)
UNLIKE = tl.constexpr(layout.UNLIKE)
MESSAGE = tl.constexpr(layout.MESSAGE)
MESSAGE_PEER = tl.constexpr(layout.MESSAGE_PEER)
MESSAGE_ENDED = tl.constexpr(layout.MESSAGE_ENDED)
MESSAGE_ARRIVALS = tl.constexpr(layout.MESSAGE_ARRIVALS)


@triton.jit
def later(number, pieces):
    """The number `pieces` after `number`."""
    found = number + pieces
    return tl.where(found >= NUMBERS, found - (NUMBERS - SLOTS), found)


@triton.jit
def before(number):
    """The number of the piece that had the same slot last."""
    return tl.where(number < 2 * SLOTS, number + (NUMBERS - 2 * SLOTS), number - SLOTS)


@triton.jit
def piece_words(group, words, LL: tl.constexpr, BLOCK: tl.constexpr):
    """Payload words of a piece of a message of `words`: as many as a slot has, or fewer, so that every channel has
    some; whole tiles."""
    slot = tl.load(group + SLOT_BYTES) // (16 if LL else 8)
    share = tl.cdiv(words, tl.load(group + CHANNELS))
    return tl.minimum(slot, tl.maximum(tl.cdiv(share, BLOCK), 1) * BLOCK)


@triton.jit
def line(group, head, rank, channel):
    """Pointer (int64*) to what the arena at `head` keeps for its rank's channel to and from `rank`."""
    at = (rank * tl.load(group + CHANNELS) + channel) * LINE_WORDS
    return tl.multiple_of(head + tl.load(group + LINES) // 8 + at, 16)


@triton.jit
def slot_of(group, head, rank, channel, number):
    """Pointer (int64*, 16-byte aligned) to the payload of piece `number` from `rank` in the arena at `head`."""
    place = (rank * tl.load(group + CHANNELS) + channel) * SLOTS + number % SLOTS
    return tl.multiple_of(head + (tl.load(group + SLOT_DATA) + place * tl.load(group + SLOT_BYTES)) // 8, 16)


@triton.jit
def wait_free(group, mine, number, LANES: tl.constexpr, PTX: tl.constexpr):
    """Until the slot of piece `number` has been read; returns the status. Pairs with `give_back`."""
    lanes = tl.arange(0, LANES) * 0
    _, status = wait_sequence(group, mine + ACKS + number % SLOTS + lanes, before(number), lanes == 0, PTX)
    tl.debug_barrier()  # no thread writes before the acquiring ones have seen the ack
    return status


@triton.jit
def clear_stale(group, slot, number, plain, BLOCK: tl.constexpr, PTX: tl.constexpr):
    """LL: zero the slot of piece `number`, which is free, where something in it may look new; True where it did.

    Bit s of `plain` says that slot s has held plain data since it was cleared.
    """
    stale = (number % CLEAR_EVERY < SLOTS) | (((plain >> (number % SLOTS)) & 1) == 1)
    if stale:
        words = tl.load(group + SLOT_BYTES) // 16
        for first in range(0, words, BLOCK):
            put_ll(slot + 2 * first, tl.zeros([BLOCK], tl.int64), 0, words - first, BLOCK, PTX)
        tl.debug_barrier()  # another thread stores the payload there
    return stale


@triton.jit
def show(theirs, number, call, tag, RELEASE, LANES: tl.constexpr, PTX: tl.constexpr):
    """Write the header of piece `number` beside its slot. Pairs with `find`."""
    lane = tl.arange(0, LANES)
    value = (number << 32) | tl.where(lane == 0, call & LOW, tag & LOW)
    place = theirs + 2 * (number % SLOTS) + lane % 2
    if RELEASE:
        tl.debug_barrier()  # all threads' payload lies behind the release
        signal(place, value, lane < 2, True, PTX)
    else:
        signal(place, value, lane < 2, False, PTX)


@triton.jit
def begin(group, call, rank):
    """Say in the control page which message runs, and with whom. Pairs with `end`."""
    if tl.program_id(0) == 0:
        control = tl.load(group + CONTROL).to(tl.pointer_type(tl.int64))
        tl.store(control + MESSAGE_PEER, rank)
        tl.store(control + MESSAGE, call >> 32)


@triton.jit
def end(group, call, status):
    """Say that the message has ended, once all blocks have got here. Nobody waits for it."""
    tl.debug_barrier()
    if status == 0:
        arrived = tl.atomic_add(group + MESSAGE_ARRIVALS, 1, sem="acq_rel", scope="gpu")
        if arrived == tl.num_programs(0) - 1:
            tl.debug_barrier()
            tl.store(group + MESSAGE_ARRIVALS, 0)
            tl.store(tl.load(group + CONTROL).to(tl.pointer_type(tl.int64)) + MESSAGE_ENDED, call >> 32)


@triton.jit
def find(group, mine, rank, following, taken, call, tag, LANES: tl.constexpr, PTX: tl.constexpr):
    """Wait for the first piece with `tag`: (how many numbers after `following` it is, status).

    Bit k of `taken` says that the piece k after `following` was taken before. The status word says what is wrong:
    UNLIKE, the tag is right and size or type is not; PENDING, four pieces are waiting and none has this tag.
    """
    lane = tl.arange(0, LANES) % 2
    control = tl.load(group + CONTROL).to(tl.pointer_type(tl.int64))
    ahead = tl.zeros([], tl.int64)
    found = 0
    status = 0
    while (found == 0) & (status == 0):
        if ahead >= SLOTS:
            tl.store(control + STATUS, (rank << 8) + PENDING)
            status = 2
        elif ((taken >> ahead) & 1) == 0:
            number = later(following, ahead)
            seen, status = wait_sequence(group, mine + 2 * (number % SLOTS) + lane, number, lane >= 0, PTX)
            theirs = tl.max(tl.where(lane == 1, seen & LOW, 0), axis=0)
            facts = tl.max(tl.where(lane == 0, seen & LOW, 0), axis=0)
            if (status == 0) & (theirs == (tag & LOW)):
                found = 1
                if facts != (call & LOW):
                    tl.store(control + STATUS, (rank << 8) + UNLIKE)
                    status = 2
        if found == 0:
            ahead += 1
    tl.debug_barrier()  # no thread reads the payload before the acquiring ones have seen the header
    return ahead, status


@triton.jit
def give_back(theirs, number, LANES: tl.constexpr, PTX: tl.constexpr):
    """Tell the sender that the slot of piece `number` has been read. Pairs with `wait_free`."""
    tl.debug_barrier()
    lane = tl.arange(0, LANES)
    signal(theirs + ACKS + number % SLOTS + lane * 0, (number << 32) + lane * 0, lane == 0, True, PTX)


@triton.jit
def waiting(group, mine, following, taken, tag, LANES: tl.constexpr, PTX: tl.constexpr):
    """1 where a piece with `tag` lies in a slot, else 0. Doesn't wait."""
    lane = tl.arange(0, LANES) % (2 * SLOTS)
    ahead = (lane // 2 - following) % SLOTS
    ahead = tl.where(ahead < 0, ahead + SLOTS, ahead)
    seen = acquire(mine + lane, lane >= 0, PTX)
    here = (((seen >> 32) & LOW) == later(following, ahead)) & ((seen & LOW) == (tag & LOW))
    return tl.max((here & (lane % 2 == 1) & (((taken >> ahead) & 1) == 0)).to(tl.int32), axis=0)


@triton.jit
def look_around(group, spins, LANES: tl.constexpr, PTX: tl.constexpr):
    """One round of a poll over several ranks: 2 where this rank is to leave, else 0."""
    status = tl.max(look(group, spins, tl.arange(0, LANES) < 0, PTX), axis=0)
    pause(spins)
    return status
