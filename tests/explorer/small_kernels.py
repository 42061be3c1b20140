"""Kernels of a few lines, each with one property that the explorer must report, or must accept."""

import triton
import triton.language as tl

from tricomm.kernels.primitives import put_ll


@triton.jit
def two_writers(peers, rank, WORLD_SIZE: tl.constexpr):
    """Every rank stores to rank 0's word, and nothing orders them."""
    tl.store(peers[0], rank)


@triton.jit
def sizes(wide, narrow, rank):
    """Two atomics of different size on the same word."""
    if rank == 0:
        tl.atomic_xchg(wide, 1, sem="relaxed", scope="sys")
    else:
        tl.atomic_xchg(narrow, 1, sem="relaxed", scope="sys")


@triton.jit
def narrow_scope(peers, rank, WORLD_SIZE: tl.constexpr):
    """All ranks count in rank 0's word, at a scope that does not leave a GPU."""
    tl.atomic_add(peers[0], 1, sem="relaxed", scope="gpu")


@triton.jit
def wide_scope(peers, out_ptr, WORLD_SIZE: tl.constexpr):
    """The same, and right."""
    tl.store(out_ptr, tl.atomic_add(peers[0], 1, sem="relaxed", scope="sys"))


@triton.jit
def atomic_and_plain(peers, out_ptr, rank, WORLD_SIZE: tl.constexpr):
    if rank == 0:
        tl.atomic_xchg(peers[0], 1, sem="release", scope="sys")
    else:
        tl.store(out_ptr, tl.load(peers[0]))


@triton.jit
def behind_an_atomic(peers, out_ptr, rank, FIRST: tl.constexpr):
    """Rank 1 increments a word that rank 0 increments as well, and that rank 0 has accessed in another way before."""
    if rank == 0:
        if FIRST == "plain store":
            tl.store(peers[1], 1)
        elif FIRST == "plain load":
            tl.store(out_ptr, tl.load(peers[1]))
        elif FIRST == "narrow scope":
            tl.atomic_add(peers[1], 1, sem="relaxed", scope="gpu")
        elif FIRST == "look of narrow scope":
            tl.atomic_add(peers[1], 0, sem="relaxed", scope="gpu")
        elif FIRST == "half of it":
            tl.atomic_xchg(peers[1].to(tl.pointer_type(tl.int32)), 1, sem="relaxed", scope="sys")
        tl.atomic_add(peers[1], 1, sem="relaxed", scope="sys")
        tl.atomic_xchg(peers[1] + 8, 1, sem="relaxed", scope="sys")
    else:
        while tl.atomic_add(peers[1] + 8, 0, sem="relaxed", scope="sys") != 1:
            pass
        tl.atomic_add(peers[1], 1, sem="relaxed", scope="sys")  # the other rank's


@triton.jit
def reads_unwritten(mine, out_ptr):
    tl.store(out_ptr, tl.load(mine))


@triton.jit
def outside(mine, out_ptr, past, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(out_ptr + at, tl.load(mine + at + past))


@triton.jit
def waits(mine, expected):
    """Waits for a number that may never be stored."""
    while tl.atomic_add(mine, 0, sem="acquire", scope="sys") != expected:
        pass


@triton.jit
def posts(theirs, value):
    tl.atomic_xchg(theirs, value, sem="release", scope="sys")


@triton.jit
def trusts_the_header(peers, out_ptr, rank):
    """Waits for a relaxed flag, and assumes that the LL words sent before it have arrived."""
    at = tl.arange(0, 2)
    if rank == 0:
        put_ll(peers[1] + 2, at.to(tl.int64) + 41, 1, 2, 2, False)
        tl.atomic_xchg(peers[1], 1, sem="relaxed", scope="sys")
    else:
        while tl.atomic_add(peers[1], 0, sem="relaxed", scope="sys") != 1:
            pass
        tl.store(out_ptr + at, tl.load(peers[1] + 2 + 2 * at, volatile=True) & 0xFFFFFFFF)


@triton.jit
def takes(words, out_ptr):
    """Reads what was sent, to the last word."""
    at = tl.arange(0, 16)
    tl.store(out_ptr + at, tl.load(words + at, volatile=True))


@triton.jit
def trusts_one_word(peers, out_ptr, rank):
    """Waits for the first of two LL words of one tile, and assumes that the second has arrived."""
    at = tl.arange(0, 2)
    if rank == 0:
        put_ll(peers[1] + 2, at.to(tl.int64) + 41, 1, 2, 2, False)
    else:
        while tl.load(peers[1] + 2, volatile=True) >> 32 != 1:
            pass
        tl.store(out_ptr + at, tl.load(peers[1] + 2 + 2 * at, volatile=True) & 0xFFFFFFFF)


@triton.jit
def blocks_race(y_ptr, BLOCK: tl.constexpr):
    """Every block of a launch writes the same words of a tensor that only its rank has."""
    tl.store(y_ptr + tl.arange(0, BLOCK), tl.program_id(0))


@triton.jit
def blocks_apart(y_ptr, BLOCK: tl.constexpr):
    tl.store(y_ptr + tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.program_id(0))


@triton.jit
def lane_release(peers, out_ptr, rank, BEFORE: tl.constexpr, AFTER: tl.constexpr):
    """A tile from rank 0 to rank 1 with a flag; without one of the block barriers other lanes are not ordered by it."""
    at = tl.arange(0, 8)
    if rank == 0:
        tl.store(peers[1] + 8 + at, at)
        if BEFORE:
            tl.debug_barrier()
        tl.atomic_xchg(peers[1], 1, sem="release", scope="sys")
    else:
        while tl.atomic_add(peers[1], 0, sem="acquire", scope="sys") != 1:
            pass
        if AFTER:
            tl.debug_barrier()
        tl.store(out_ptr + at, tl.load(peers[1] + 8 + at))


@triton.jit
def sum_from_own_rank(peers, out_ptr, rank, WORLD_SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Every rank adds the same numbers in another order."""
    at = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for step in tl.static_range(WORLD_SIZE):
        for r in tl.static_range(WORLD_SIZE):
            if r == (rank + step) % WORLD_SIZE:
                total += tl.load(peers[r] + at)
    tl.store(out_ptr + at, total)


@triton.jit
def tickets(peers, out_ptr, WORLD_SIZE: tl.constexpr, TIMES: tl.constexpr):
    """Records the order in which the ranks take their turns."""
    for n in tl.static_range(TIMES):
        tl.store(out_ptr + n, tl.atomic_add(peers[0], 1, sem="relaxed", scope="sys"))


@triton.jit
def flag_again(peers, out, rank, PTX: tl.constexpr):
    """Words are cleared between two uses of flag 1. Rank 1 reads the zeros, and from then on no older words."""
    lane = tl.arange(0, 128)
    seen = tl.zeros([128], tl.int64)
    for turn in range(3):
        flag = tl.zeros([], tl.int64) + (turn + 1) % 2
        if rank == 0:
            put_ll(peers[1] + 2, (tl.arange(0, 64) + 10 * turn) * flag, flag, 64, 64, PTX)
            while tl.atomic_add(peers[0], 0, sem="acquire", scope="sys") != turn + 1:
                pass
        else:
            late = 1
            while late == 1:
                seen = tl.load(peers[1] + 2 + lane, volatile=True)
                late = tl.max(((seen >> 32) != flag).to(tl.int32), axis=0)
            tl.store(out + lane, seen & 0xFFFFFFFF)
            tl.debug_barrier()
            tl.atomic_xchg(peers[0], turn + 1, sem="release", scope="sys")
        tl.debug_barrier()


@triton.jit
def calculate(a_ptr, b_ptr, y_ptr, OPERATION: tl.constexpr):
    """One operation of four elements."""
    lane = tl.arange(0, 4)
    a, b = tl.load(a_ptr + lane), tl.load(b_ptr + lane)
    if OPERATION == "+":
        c = a + b
    elif OPERATION == "-":
        c = a - b
    elif OPERATION == "*":
        c = a * b
    elif OPERATION == "/":
        c = a / b
    elif OPERATION == "min":
        c = tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)
    else:
        c = tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)
    tl.store(y_ptr + lane, c)
