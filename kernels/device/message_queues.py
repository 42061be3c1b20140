"""Message queues: how a message from one rank to another is divided, and how a slot is filled, read and acknowledged.

    sender                                     receiver
    wait for the ack of the slot's last piece
    payload ───────────────────────────────▶   slot [number % 4] of queue [sender][c]
    header (fingerprint, tag) ─────────────▶   two words next to it
                                               find the first piece of that tag; copy it out
                             ◀──────── ack     the slot is free

An ordered pair of ranks has several queues, each with its own count of pieces: queue (p + t) % queues carries piece p
of a message with tag t. The sender's block b serves the message's queues b, b + grid, and so on, one after another, and
so does the receiver's; if that has fewer blocks, each serves several blocks' queues in that order. So the receiver
never needs more running blocks of the sender than it has itself, and messages of different sizes never share a slot at
once.

Number    counts the pieces of a queue, from 4 to 2^32 - 1 and then from 4 again. That is a multiple of 4 numbers, so
          each number always has the same slot. It is the flag of the header, of the ack and, under `ll`, of every word.
          Each side has its counters in its own memory, so a CUDA graph replays them.
Waits     sender, for the ack of the piece four before: its slot has been read. Receiver, for a header: a message of
          that tag has arrived, and its size and type are as expected. Under `simple` the header is release to acquire
          at `.sys`, so the payload has arrived as well; under `ll` each word carries the number.
Reuse     by acknowledgement alone, release to acquire: the receiver's loads before its ack, the sender's stores after.
          Mailboxes, headers and the epoch of the collectives are not touched.
Stale     old contents of a slot may look like an LL word: plain data may, and so may words of a number that recurs. So
          `ll` clears a slot that `simple` has used before, and clears it every 2^30 pieces; then its header releases,
          and a rank that sees the header sees no older word. In all other cases old words have older numbers.
Order     messages of one pair and one tag arrive as they were sent; another tag may be received first, as long as no
          more than 4 pieces of a queue wait.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tricomm.kernels import layout
from tricomm.kernels.group import control_of, table_of
from tricomm.kernels.primitives import LOW, STATUS, acquire, look, pause, put_ll, signal, wait_sequence

QUEUE_STATES = tl.constexpr(layout.QUEUE_STATES)
SLOT_DATA = tl.constexpr(layout.SLOT_DATA)
SLOT_BYTES = tl.constexpr(layout.SLOT_BYTES)
QUEUES = tl.constexpr(layout.QUEUES)
SLOTS = tl.constexpr(layout.SLOTS)
STATE_WORDS = tl.constexpr(layout.QUEUE_STATE // 8)
ACKS = tl.constexpr(layout.ACKS)
NUMBERS = tl.constexpr(layout.EPOCH_LIMIT)
CLEAR_EVERY = tl.constexpr(layout.CLEAR_EVERY)
PENDING = tl.constexpr(layout.PENDING)
MESSAGE_MISMATCH = tl.constexpr(layout.MESSAGE_MISMATCH)
MESSAGE = tl.constexpr(layout.MESSAGE)
MESSAGE_PEER = tl.constexpr(layout.MESSAGE_PEER)
MESSAGE_ENDED = tl.constexpr(layout.MESSAGE_ENDED)
MESSAGE_ARRIVALS = tl.constexpr(layout.MESSAGE_ARRIVALS)


@triton.jit
def next_number(number, pieces):
    """The number `pieces` after `number`."""
    following = number + pieces
    return tl.where(following >= NUMBERS, following - (NUMBERS - SLOTS), following)


@triton.jit
def previous_number(number):
    """The number of the piece that had the same slot last."""
    return tl.where(number < 2 * SLOTS, number + (NUMBERS - 2 * SLOTS), number - SLOTS)


@triton.jit
def piece_words(group, words, SPEC: tl.constexpr):
    """Payload words in each piece of a message of `words`, in whole tiles: the size of a slot, or less, so that every
    queue gets a piece."""
    slot = tl.load(table_of(group) + SLOT_BYTES) // (16 if SPEC.LL else 8)
    share = tl.cdiv(words, tl.load(table_of(group) + QUEUES))
    return tl.minimum(slot, tl.maximum(tl.cdiv(share, SPEC.BLOCK), 1) * SPEC.BLOCK)


@triton.jit
def queue_state(group, head, rank, queue):
    """Pointer (int64*) to the state, in the arena at `head`, of its rank's queue number `queue` to and from `rank`."""
    at = (rank * tl.load(table_of(group) + QUEUES) + queue) * STATE_WORDS
    return tl.multiple_of(head + tl.load(table_of(group) + QUEUE_STATES) // 8 + at, 16)


@triton.jit
def slot_of(group, head, rank, queue, number):
    """Pointer (int64*, 16-byte aligned) to the payload of piece `number` from `rank` in the arena at `head`."""
    place = (rank * tl.load(table_of(group) + QUEUES) + queue) * SLOTS + number % SLOTS
    return tl.multiple_of(
        head + (tl.load(table_of(group) + SLOT_DATA) + place * tl.load(table_of(group) + SLOT_BYTES)) // 8, 16
    )


@triton.jit
def wait_free(group, mine, number, SPEC: tl.constexpr):
    """Wait until the slot of piece `number` has been read; returns the status. Pairs with `acknowledge`."""
    lanes = tl.arange(0, SPEC.LANES) * 0
    ack = mine + ACKS + number % SLOTS + lanes
    _, status = wait_sequence(group, ack, previous_number(number), lanes == 0, SPEC.PTX)
    tl.debug_barrier()  # no thread writes before the acquiring ones have seen the ack
    return status


@triton.jit
def clear_stale(group, slot, number, plain, SPEC: tl.constexpr):
    """LL: zero the free slot of piece `number` if its contents may look like new words. True if it was zeroed.

    Bit s of `plain` says that slot s has held plain data since it was cleared.
    """
    stale = (number % CLEAR_EVERY < SLOTS) | (((plain >> (number % SLOTS)) & 1) == 1)
    if stale:
        words = tl.load(table_of(group) + SLOT_BYTES) // 16
        for first in range(0, words, SPEC.BLOCK):
            put_ll(slot + 2 * first, tl.zeros([SPEC.BLOCK], tl.int64), 0, words - first, SPEC.BLOCK, SPEC.PTX)
        tl.debug_barrier()  # another thread stores the payload there
    return stale


@triton.jit
def publish_header(theirs, number, call, tag, RELEASE, SPEC: tl.constexpr):
    """Write the header of piece `number` next to its slot. Pairs with `match_header`."""
    lane = tl.arange(0, SPEC.LANES)
    value = (number << 32) | tl.where(lane == 0, call & LOW, tag & LOW)
    place = theirs + 2 * (number % SLOTS) + lane % 2
    if RELEASE:
        tl.debug_barrier()  # all threads' payload is written before the release
        signal(place, value, lane < 2, True, SPEC.PTX)
    else:
        signal(place, value, lane < 2, False, SPEC.PTX)


@triton.jit
def begin_message(group, call, rank):
    """Write to the control page which message runs, and its peer. Pairs with `end_message`."""
    if tl.program_id(0) == 0:
        control = control_of(group)
        tl.store(control + MESSAGE_PEER, rank)
        tl.store(control + MESSAGE, call >> 32)


@triton.jit
def end_message(group, call, status):
    """Report that the message has ended, when all blocks have got here. Nothing waits for it."""
    tl.debug_barrier()
    if status == 0:
        arrived = tl.atomic_add(table_of(group) + MESSAGE_ARRIVALS, 1, sem="acq_rel", scope="gpu")
        if arrived == tl.num_programs(0) - 1:
            tl.debug_barrier()
            tl.store(table_of(group) + MESSAGE_ARRIVALS, 0)
            tl.store(control_of(group) + MESSAGE_ENDED, call >> 32)


@triton.jit
def match_header(group, mine, rank, following, taken, call, tag, SPEC: tl.constexpr):
    """Wait for the first piece with `tag`. Returns (its number minus `following`, status).

    Bit k of `taken` says that the piece k after `following` was received before. Errors in the status word:
    MESSAGE_MISMATCH: the tag matches, but not size or type; PENDING: four pieces are waiting and none has this tag.
    """
    lane = tl.arange(0, SPEC.LANES) % 2
    control = control_of(group)
    ahead = tl.zeros([], tl.int64)
    matched = 0
    status = 0
    while (matched == 0) & (status == 0):
        if ahead >= SLOTS:
            tl.store(control + STATUS, (rank << 8) + PENDING)
            status = 2
        elif ((taken >> ahead) & 1) == 0:
            number = next_number(following, ahead)
            seen, status = wait_sequence(group, mine + 2 * (number % SLOTS) + lane, number, lane >= 0, SPEC.PTX)
            its_tag = tl.max(tl.where(lane == 1, seen & LOW, 0), axis=0)
            fingerprint = tl.max(tl.where(lane == 0, seen & LOW, 0), axis=0)
            if (status == 0) & (its_tag == (tag & LOW)):
                matched = 1
                if fingerprint != (call & LOW):
                    tl.store(control + STATUS, (rank << 8) + MESSAGE_MISMATCH)
                    status = 2
        if matched == 0:
            ahead += 1
    tl.debug_barrier()  # no thread reads the payload before the acquiring ones have seen the header
    return ahead, status


@triton.jit
def acknowledge(theirs, number, SPEC: tl.constexpr):
    """Tell the sender that the slot of piece `number` has been read. Pairs with `wait_free`."""
    tl.debug_barrier()
    lane = tl.arange(0, SPEC.LANES)
    ack = theirs + ACKS + number % SLOTS + lane * 0
    signal(ack, (number << 32) + lane * 0, lane == 0, True, SPEC.PTX)


@triton.jit
def probe(mine, following, taken, tag, SPEC: tl.constexpr):
    """1 if a piece with `tag` is in a slot, else 0. Does not wait."""
    lane = tl.arange(0, SPEC.LANES) % (2 * SLOTS)
    ahead = (lane // 2 - following) % SLOTS
    ahead = tl.where(ahead < 0, ahead + SLOTS, ahead)
    seen = acquire(mine + lane, lane >= 0, SPEC.PTX)
    here = (((seen >> 32) & LOW) == next_number(following, ahead)) & ((seen & LOW) == (tag & LOW))
    return tl.max((here & (lane % 2 == 1) & (((taken >> ahead) & 1) == 0)).to(tl.int32), axis=0)


@triton.jit
def poll_abort(group, spins, SPEC: tl.constexpr):
    """One round of a poll over several ranks: 2 if the kernel must end, else 0."""
    status = tl.max(look(group, spins, tl.arange(0, SPEC.LANES) < 0, SPEC.PTX), axis=0)
    pause(spins)
    return status
