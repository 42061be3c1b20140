"""A kernel as a user would write it, over symmetric memory."""

import triton
import triton.language as tl

from tricomm.kernels.primitives import RANK, wait_sequence


@triton.jit
def rotate(peers, out_ptr, rank, WORLD_SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Copy the next rank's 15 elements."""
    at = tl.arange(0, BLOCK)
    for r in tl.static_range(WORLD_SIZE):
        if r == (rank + 1) % WORLD_SIZE:
            tl.store(out_ptr + at, tl.load(peers[r] + at, mask=at < 15), mask=at < 15)


@triton.jit
def waits_for_ever(group, table):
    """Waits for a sequence number that nobody sends, in memory that is this rank's own."""
    mine = tl.load(table + tl.load(group + RANK)).to(tl.pointer_type(tl.int64))
    lane = tl.arange(0, 16)
    wait_sequence(group, mine + lane * 0, 77, lane < 1, False)
