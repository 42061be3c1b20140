"""Communication between kernels: group table, LL words, headers, signal and wait. Public API for users' kernels.

`group` is the pointer to this rank's group table (`layout.py`), int64*, as `Communicator.group_table` gives it; in the
shipped kernels it is a tuple of their parameters (`group.py`).

Each access that crosses GPUs has two variants, chosen by the constexpr `PTX`: pure `tl` for Triton's interpreter, and
inline PTX with relaxed, release and acquire at `.sys` scope. A release on a peer's word is a store, never an exchange,
because PCIe has no native atomics between GPUs.

Uniformity: threads that poll independently may see a word arrive at different times, and a loop that only some warps
leave breaks the block's barriers. So every poll reads a tile that spans all threads (`LANES` on a GPU is the number of
threads) and leaves by one reduction over the block.

Bound: every wait also reads the control page's abort and status words every few rounds, and ends with a non-zero status
if one is set. The host sets the abort word when a time limit passes or a peer is gone.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import cuda

from tricomm.kernels import layout
from tricomm.kernels.group import control_of, peer_addresses, rank_of, table_of
from tricomm.kernels.group import peer as peer

RANK = tl.constexpr(layout.RANK)
EPOCHS = tl.constexpr(layout.EPOCHS)
HEADERS = tl.constexpr(layout.HEADERS)
STATUS = tl.constexpr(layout.STATUS)
STARTED = tl.constexpr(layout.STARTED)
ENDED = tl.constexpr(layout.ENDED)
MISMATCH = tl.constexpr(layout.MISMATCH)
OVERLAP = tl.constexpr(layout.OVERLAP)
MAX_BLOCKS = tl.constexpr(layout.MAX_BLOCKS)
SOURCES = tl.constexpr(layout.MAX_WORLD_SIZE)
LOW = tl.constexpr(0xFFFFFFFF)
LIMIT = tl.constexpr(layout.EPOCH_LIMIT)
RUNS = tl.constexpr(1 << 31)  # above the number of any call
HAS_ATOMIC_STORE = tl.constexpr(hasattr(tl, "atomic_store"))

_PUT = tl.constexpr(
    "{ .reg .pred p; .reg .b32 x, y; .reg .b64 a, b; setp.ne.b32 p, $4, 0; mov.b64 {x, y}, $2; mov.b64 a, {x, $3}; "
    "mov.b64 b, {y, $3}; @p st.relaxed.sys.global.v2.b64 [$1], {a, b}; mov.u32 $0, 0; }"
)
_RELEASE = tl.constexpr("{ .reg .pred p; setp.ne.b32 p, $3, 0; @p st.release.sys.global.b64 [$1], $2; mov.u32 $0, 0; }")
_RELAXED = tl.constexpr("{ .reg .pred p; setp.ne.b32 p, $3, 0; @p st.relaxed.sys.global.b64 [$1], $2; mov.u32 $0, 0; }")
_ACQUIRE = tl.constexpr("ld.acquire.sys.global.b64 $0, [$1];")
_FENCE_ALIASES = tl.constexpr("{ .reg .pred p; setp.ne.b32 p, $1, 0; @p fence.proxy.alias; mov.u32 $0, 0; }")


@triton.jit
def pause(spins):
    """Called once per round of a poll. Does nothing on a GPU; the interpreter lets other ranks run here."""


@triton.jit
def put_ll(pointer, words, flag, count, BLOCK: tl.constexpr, PTX: tl.constexpr):
    """Push the first `count` of `words` (int64 [BLOCK], 8 bytes of payload each) as LL words from `pointer` on.

    `pointer` is int64*, 16-byte aligned; a payload word takes 16 bytes of the mailbox. Each half of a word is stored
    with `flag` in one aligned 64-bit store, so it arrives whole without a fence. Pairs with `get_ll`.
    """
    lane = tl.arange(0, BLOCK)
    store_ll(pointer + 2 * lane, words, flag, lane < count, PTX)


@triton.jit
def store_ll(pointers, words, flag, mask, PTX: tl.constexpr):
    """Store each of `words` (int64 tile) with `flag` as the LL words at `pointers` (int64*, multiples of 16)."""
    if PTX:
        same = (words * 0 + flag).to(tl.int32)  # for a `flag` of any type
        tl.inline_asm_elementwise(
            _PUT, "=r,l,l,r,r", [pointers, words, same, mask.to(tl.int32)], dtype=tl.int32, is_pure=False, pack=1
        )
    else:
        low = (words & LOW) | (flag << 32)
        high = ((words >> 32) & LOW) | (flag << 32)
        tl.store(pointers, low, mask=mask)
        tl.store(pointers + 1, high, mask=mask)


@triton.jit
def get_ll(group, pointer, room, flag, count, SOURCES: tl.constexpr, BLOCK: tl.constexpr, PTX: tl.constexpr):
    """Poll SOURCES places in this rank's mailbox at once until the first `count` payload words of each carry `flag`.

    `pointer` (int64*, 16-byte aligned) is the first place, `room` the distance to the next one in 64-bit words. Returns
    (a tuple of SOURCES int64 [BLOCK] tiles, status). Pairs with `put_ll`. A word with the awaited flag is complete,
    because payload and flag are one access: a volatile load, relaxed at `.sys` scope. It must be `tl.load`: before 3.9
    the compiler duplicated inline assembly when it converted layouts, and took flags and payload from two loads. All
    loads of a round are in flight together, and one reduction ends it.
    """
    lane = tl.arange(0, 2 * BLOCK)
    expected = lane < 2 * count
    words = ()
    for _ in tl.static_range(SOURCES):
        words = words + (tl.zeros([BLOCK], tl.int64),)
    missing = 1
    spins = 0
    while missing == 1:
        late = expected & False
        payload = ()
        for source in tl.static_range(SOURCES):
            # Without a mask, which would narrow the access: there is room for a tile, extra words are ignored.
            seen = tl.load(tl.multiple_of(pointer + source * room, 16) + lane, volatile=True)
            late |= expected & (((seen >> 32) & LOW) != flag)
            low, high = tl.split(tl.reshape(seen, [BLOCK, 2]))
            payload = payload + ((low & LOW) | (high << 32),)
        words = payload
        missing = tl.max(late.to(tl.int32) | look(group, spins, late, PTX), axis=0)
        spins += 1
        pause(spins)
    return words, missing & 2


@triton.jit
def look(group, spins, late, PTX: tl.constexpr):
    """2 in every lane if the host or another block of this rank has aborted, else 0. Reads them only in some rounds."""
    gone = late.to(tl.int32) * 0
    every: tl.constexpr = 256 if PTX else 4
    if (spins & (every - 1)) == every - 1:  # not %: `spins` overflows and becomes negative in the end
        control = control_of(group)
        # A tile of pointers to the same two words: every thread reads them, and a reduction by the caller decides.
        words = control + tl.zeros(late.shape, tl.int32)
        gone = ((tl.load(words, volatile=True) | tl.load(words + STATUS, volatile=True)) != 0).to(tl.int32) * 2
    return gone


@triton.jit
def signal(pointer, value, mask, RELEASE: tl.constexpr, PTX: tl.constexpr):
    """Store `value` (int64) in the peers' words at `pointer` (int64* tile), release or relaxed, at `.sys` scope.

    Release publishes accesses of this thread; after a `tl.debug_barrier()`, of the block. Pairs with `acquire`.
    """
    if PTX:
        asm: tl.constexpr = _RELEASE if RELEASE else _RELAXED
        tl.inline_asm_elementwise(
            asm, "=r,l,l,r", [pointer, value, mask.to(tl.int32)], dtype=tl.int32, is_pure=False, pack=1
        )
    elif HAS_ATOMIC_STORE:
        if RELEASE:
            tl.atomic_store(pointer, value, mask=mask, sem="release", scope="sys")
        else:
            tl.atomic_store(pointer, value, mask=mask, sem="relaxed", scope="sys")
    elif RELEASE:
        tl.atomic_xchg(pointer, value, mask=mask, sem="release", scope="sys")
    else:
        tl.atomic_xchg(pointer, value, mask=mask, sem="relaxed", scope="sys")


@triton.jit
def acquire(pointer, mask, PTX: tl.constexpr):
    """Load this rank's words at `pointer` (int64* tile) with acquire at `.sys` scope. Masked lanes are undefined."""
    if PTX:
        seen = tl.inline_asm_elementwise(_ACQUIRE, "=l,l", [pointer], dtype=tl.int64, is_pure=False, pack=1)
    else:
        seen = tl.atomic_add(pointer, tl.zeros(pointer.shape, tl.int64), mask=mask, sem="acquire", scope="sys")
    return seen


@triton.jit
def set_flag(pointer, value):
    """Store `value` into the int64 word at `pointer`, on any rank, after all earlier accesses of this block. Pairs with
    `wait_flag` on the word's rank. A word has one writer, whose values increase.
    """
    store_flag(pointer, value, cuda.num_threads(), True)


@triton.jit
def wait_flag(group, pointer, value):
    """Wait until this rank's own int64 word at `pointer` is `value` or more. Returns the status. 0: all later accesses
    of this block are ordered after the accesses before the `set_flag`. Not 0: a peer is gone or the time is up; the
    kernel must return, and the host raises the error. `group` is `Communicator.group_table`.
    """
    return await_flag(group, pointer, value, cuda.num_threads(), True)


@triton.jit
def store_flag(pointer, value, LANES: tl.constexpr, PTX: tl.constexpr):
    """`set_flag` of a block of LANES threads."""
    tl.static_assert(pointer.dtype.element_ty == tl.int64, "a flag is an int64 word")
    lane = tl.arange(0, LANES)
    tl.debug_barrier()
    signal(pointer + lane * 0, tl.zeros([LANES], tl.int64) + value, lane == 0, True, PTX)


@triton.jit
def await_flag(group, pointer, value, LANES: tl.constexpr, PTX: tl.constexpr):
    """`wait_flag` of a block of LANES threads."""
    tl.static_assert(pointer.dtype.element_ty == tl.int64, "a flag is an int64 word")
    lane = tl.arange(0, LANES)
    missing = 1
    spins = 0
    while missing == 1:
        late = (lane == 0) & (acquire(pointer + lane * 0, lane == 0, PTX) < value)
        missing = tl.max(late.to(tl.int32) | look(group, spins, late, PTX), axis=0)
        spins += 1
        pause(spins)
    tl.debug_barrier()
    return missing & 2


@triton.jit
def wait_sequence(group, pointer, sequence, mask, PTX: tl.constexpr):
    """Wait, with acquire, until the high half of every word at `pointer` is `sequence`; returns (words, status)."""
    seen = tl.zeros(pointer.shape, tl.int64)
    missing = 1
    spins = 0
    while missing == 1:
        seen = acquire(pointer, mask, PTX)
        late = mask & (((seen >> 32) & LOW) != sequence)
        missing = tl.max(late.to(tl.int32) | look(group, spins, late, PTX), axis=0)
        spins += 1
        pause(spins)
    return seen, missing & 2


@triton.jit
def send_headers(
    group, epoch, call, PHASE: tl.constexpr, RELEASE: tl.constexpr, WORLD_SIZE: tl.constexpr, LANES: tl.constexpr,
    PTX: tl.constexpr,
):  # fmt: skip
    """Write `epoch << 32 | fingerprint` to this block's header at every peer, one lane a peer.

    `call` has the fingerprint in its low half. RELEASE if the header is a barrier flag (`simple`); under `ll` it is
    relaxed, because every word of data has a flag. Pairs with `wait_headers` of the same block and phase.
    """
    lane = tl.arange(0, LANES)
    mask = (lane < WORLD_SIZE) & (lane != rank_of(group))
    send_headers_to(group, mask, epoch, call, PHASE, RELEASE, WORLD_SIZE, LANES, PTX)


@triton.jit
def send_headers_to(
    group, mask, epoch, call, PHASE: tl.constexpr, RELEASE: tl.constexpr, WORLD_SIZE: tl.constexpr, LANES: tl.constexpr,
    PTX: tl.constexpr,
):  # fmt: skip
    """`send_headers` only to peers whose lane of `mask` (bool [LANES], lane r for rank r) is set."""
    lane = tl.arange(0, LANES)
    base = peer_addresses(group, lane, mask, WORLD_SIZE, PTX)
    row = (PHASE * 2 + (epoch & 1)) * WORLD_SIZE + rank_of(group)
    pointer = (base + HEADERS + 8 * (row * MAX_BLOCKS + tl.program_id(0))).to(tl.pointer_type(tl.int64))
    signal(pointer, tl.zeros([LANES], tl.int64) + ((epoch << 32) | (call & LOW)), mask, RELEASE, PTX)


@triton.jit
def wait_headers(
    group, epoch, call, PHASE: tl.constexpr, WORLD_SIZE: tl.constexpr, LANES: tl.constexpr, PTX: tl.constexpr
):
    """Wait for this block's header from every peer; returns the status.

    The right epoch with another fingerprint means that the peer made another call. Then the status word gets the peer
    and its fingerprint, and this kernel returns before it has used any data.
    """
    source = tl.arange(0, LANES) % SOURCES
    me = rank_of(group)
    mask = (source < WORLD_SIZE) & (source != me)
    return wait_headers_of(group, mask, epoch, call, PHASE, WORLD_SIZE, LANES, PTX)


@triton.jit
def wait_headers_of(
    group, mask, epoch, call, PHASE: tl.constexpr, WORLD_SIZE: tl.constexpr, LANES: tl.constexpr, PTX: tl.constexpr
):
    """`wait_headers` only for peers whose lanes of `mask` (bool [LANES], lane n for rank n % SOURCES) are set."""
    source = tl.arange(0, LANES) % SOURCES
    seen, status = wait_words(group, mask, epoch, PHASE, WORLD_SIZE, LANES, PTX)
    if status == 0:
        status = report_mismatch(group, source, mask, seen, call)
    return status


@triton.jit
def report_mismatch(group, source, mask, seen, call):
    """If a header in `seen` has another fingerprint than `call`, report it and its peer in the status word and return
    2.

    Lane n of `seen` is from rank `source[n]`; lanes outside of `mask` are ignored.
    """
    status = 0
    culprit = tl.max(tl.where(mask & ((seen & LOW) != (call & LOW)), source + 1, 0), axis=0)
    if culprit != 0:
        got = tl.max(tl.where(source == culprit - 1, seen & LOW, 0), axis=0)
        tl.store(control_of(group) + STATUS, (got << 32) + ((culprit - 1).to(tl.int64) << 8) + MISMATCH)
        status = 2
    return status


@triton.jit
def report_overlap(group, foreign):
    """If a lane of `foreign` (bool tile) is set, report in the status word that two launches overlap. Not if there is
    an earlier report or an abort, because an aborted launch leaves its words marked as running."""
    control = control_of(group) + tl.zeros(foreign.shape, tl.int32)
    told = tl.load(control, mask=foreign, other=1, volatile=True)
    told |= tl.load(control + STATUS, mask=foreign, other=1, volatile=True)
    tl.store(control + STATUS, OVERLAP, mask=foreign & (told == 0))


@triton.jit
def wait_words(
    group, mask, epoch, PHASE: tl.constexpr, WORLD_SIZE: tl.constexpr, LANES: tl.constexpr, PTX: tl.constexpr
):
    """Wait for this block's headers of this epoch from the peers of `mask`, with any fingerprint: (words, status)."""
    source = tl.arange(0, LANES) % SOURCES
    row = (PHASE * 2 + (epoch & 1)) * WORLD_SIZE + tl.where(mask, source, 0)
    pointer = table_of(group) + HEADERS // 8 + row * MAX_BLOCKS + tl.program_id(0)
    return wait_sequence(group, pointer, epoch, mask, PTX)


@triton.jit
def barrier(
    group, epoch, call, PHASE: tl.constexpr, WORLD_SIZE: tl.constexpr, LANES: tl.constexpr, PTX: tl.constexpr,
    ALIASES: tl.constexpr = False,
):  # fmt: skip
    """Block b waits for block b of every peer; earlier writes of each are visible to the others. Returns the status.

    The first block barrier orders all threads' accesses before the releasing stores; the second holds all threads back
    until the acquiring lanes have seen the flags. ALIASES: also accesses by other addresses of the same bytes, through
    an alias fence (`multimem`). It waits like a system fence, so the acquiring threads issue it when no store of this
    block is in flight.
    """
    tl.debug_barrier()
    send_headers(group, epoch, call, PHASE, True, WORLD_SIZE, LANES, PTX)
    status = wait_headers(group, epoch, call, PHASE, WORLD_SIZE, LANES, PTX)
    if ALIASES and PTX:
        acquires = (tl.arange(0, LANES) < WORLD_SIZE).to(tl.int32)
        tl.inline_asm_elementwise(_FENCE_ALIASES, "=r,r", [acquires], dtype=tl.int32, is_pure=False, pack=1)
    tl.debug_barrier()
    return status


@triton.jit
def advance(epoch, chunks):
    """The epoch `chunks` after `epoch`. 0 means 'never written', so 2 follows 2^32 - 1; not 1, because the parity,
    which selects the mailbox, must alternate."""
    later = epoch + chunks
    return tl.where(later >= LIMIT, later - (LIMIT - 2), later)


@triton.jit
def kept_words(LANES: tl.constexpr = MAX_BLOCKS):
    """(lane, mask): the epoch words that this block maintains: its own, and in the first block those of blocks that
    this launch does not have. So all words are equal between launches of any grids."""
    lane = tl.arange(0, max(LANES, MAX_BLOCKS))
    block = tl.program_id(0)
    lacks = tl.where(block == 0, tl.num_programs(0), MAX_BLOCKS)
    return lane, (lane == block) | ((lane >= lacks) & (lane < MAX_BLOCKS))


@triton.jit
def read_epoch(group, LANES: tl.constexpr = MAX_BLOCKS):
    """(epoch, seen): the first epoch of a launch, and the words of `kept_words`. Only loads them, without a wait."""
    words = table_of(group) + EPOCHS
    lane, kept = kept_words(LANES)
    seen = tl.load(words + lane, mask=kept, other=0, volatile=True)
    return tl.load(words + tl.program_id(0), volatile=True) & LOW, seen


@triton.jit
def running(epoch, call):
    """int64: an epoch word while `call`, which began with `epoch`, runs. Between launches it is only the epoch."""
    return (((call >> 32) | RUNS) << 32) | epoch


@triton.jit
def enter(group, call):
    """Begin a launch: returns its first epoch. Reports another running launch, because neither may ever end."""
    # Not the lanes of `finish`: the compiler would keep their addresses in registers through the whole kernel.
    epoch, seen = read_epoch(group, 2 * MAX_BLOCKS)
    if tl.program_id(0) == 0:
        tl.store(control_of(group) + STARTED, epoch)
    lane, kept = kept_words(2 * MAX_BLOCKS)
    report_overlap(group, kept & (seen != epoch))
    # Threads load these words independently: none may store to them before all have read them.
    tl.debug_barrier()
    tl.store(table_of(group) + EPOCHS + lane, running(epoch, call) + lane * 0, mask=kept)
    return epoch


@triton.jit
def leave(group, epoch, call, chunks, status):
    """`finish` for a launch that has not read its epoch words since its start: it also reports another launch of this
    communicator that has begun since. Then the output of both is undefined."""
    lane, kept = kept_words()
    seen = tl.load(table_of(group) + EPOCHS + lane, mask=kept, other=0, volatile=True)
    finish(group, epoch, chunks, status)
    if status == 0:
        report_overlap(group, kept & (seen != running(epoch, call)))


@triton.jit
def finish(group, epoch, chunks, status):
    """End a launch for this block: advance its `kept_words`, for the next launch and for the host."""
    tl.debug_barrier()  # the block's other threads have read the words that are stored
    if status == 0:
        lane, kept = kept_words()
        later = advance(epoch, chunks) + lane * 0
        tl.store(table_of(group) + EPOCHS + lane, later, mask=kept)
        tl.store(control_of(group) + ENDED + lane, later, mask=kept)
