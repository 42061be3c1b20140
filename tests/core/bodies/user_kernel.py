"""A kernel as a user would write it, over symmetric memory."""

import triton
import triton.language as tl

from tricomm.kernels.primitives import RANK, set_flag, signal, wait_flag, wait_sequence


@triton.jit
def rotate(peers, out_ptr, rank, WORLD_SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Copy the next rank's 15 elements."""
    at = tl.arange(0, BLOCK)
    for r in tl.static_range(WORLD_SIZE):
        if r == (rank + 1) % WORLD_SIZE:
            tl.store(out_ptr + at, tl.load(peers[r] + at, mask=at < 15), mask=at < 15)


@triton.jit
def waits_for_ever(group, table):
    """Waits in this rank's memory for a sequence number that no rank sends."""
    mine = tl.load(table + tl.load(group + RANK)).to(tl.pointer_type(tl.int64))
    lane = tl.arange(0, 16)
    wait_sequence(group, mine + lane * 0, 77, lane < 1, False)


@triton.jit
def polls(word, HOW: tl.constexpr):
    """Waits for a 1 that no rank stores, by plain accesses."""
    if HOW == "load":
        while tl.load(word) != 1:
            pass
    elif HOW == "volatile load":
        while tl.load(word, volatile=True) != 1:
            pass
    elif HOW == "atomic":
        while tl.atomic_add(word, 0, sem="acquire", scope="sys") != 1:
            pass
    elif HOW == "cas":
        while tl.atomic_cas(word, 1, 2) != 1:
            pass
    elif HOW == "stores":
        for _ in range(1 << 40):
            tl.store(word, 0)
    else:  # no access at all
        number = tl.load(word)
        while number != 1:
            number = number * 2


@triton.jit
def exchanges(group, peers, out_ptr, number, RANK: tl.constexpr, OTHER: tl.constexpr):
    """Word 0 is data, word 1 the number of the data, word 2 the number of the data that has been read."""
    status = wait_flag(group, peers[RANK] + 2, number - 1)
    if status == 0:
        tl.store(peers[OTHER], 10 * number + RANK)
        set_flag(peers[OTHER] + 1, number)
        status = wait_flag(group, peers[RANK] + 1, number)
    if status == 0:
        tl.store(out_ptr, tl.load(peers[RANK]))
        set_flag(peers[OTHER] + 2, number)
    tl.store(out_ptr + 1, status)


@triton.jit
def weaker_flag(
    group, peers, out_ptr, RANK: tl.constexpr, OTHER: tl.constexpr, BARRIER: tl.constexpr, RELEASE: tl.constexpr
):
    """One round of `exchanges`, written with the primitives that `set_flag` uses."""
    lane = tl.arange(0, 1)
    tl.store(peers[OTHER], 5)
    if BARRIER:
        tl.debug_barrier()
    signal(peers[OTHER] + 1 + lane, lane.to(tl.int64) + 1, lane == 0, RELEASE, False)
    if wait_flag(group, peers[RANK] + 1, 1) == 0:
        tl.store(out_ptr, tl.load(peers[RANK]))
