"""Rows of uneven length: where each one is, and what ranks tell each other of the lengths before they exchange them.

`sends` and `takes` are tuples of WORLD_SIZE int64: how many rows go to each rank, and how many come from it, one rank
behind the other, each row of `numel` elements. They are parameters of the launch, which the driver copies: every call,
on any stream or in a graph, has its own, and no memory has to outlive the kernel that reads it. A parameter cannot be
indexed at run time, so a rank's is picked by WORLD_SIZE selects on constant operands, no access to memory among them.

What they tell is control, not payload: two headers a peer, in the first chunk of a call.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tricomm.kernels import layout
from tricomm.kernels.primitives import CONTROL, LOW, RANK, SOURCES, STATUS, send_headers_to, wait_words

SPLITS = tl.constexpr(layout.SPLITS)


@triton.jit
def part(rows, rank, numel, WORLD_SIZE: tl.constexpr):
    """(first element, elements) of `rank`'s part of a tensor that is divided by `rows`."""
    before = tl.zeros([], tl.int64)
    length = tl.zeros([], tl.int64)
    for r in tl.static_range(WORLD_SIZE):
        before += tl.where(r < rank, rows[r], 0)
        length += tl.where(r == rank, rows[r], 0)
    return before * numel, length * numel


@triton.jit
def longest(rows, numel, WORLD_SIZE: tl.constexpr):
    """Elements of the longest part."""
    most = tl.zeros([], tl.int64)
    for r in tl.static_range(WORLD_SIZE):
        most = tl.maximum(most, rows[r])
    return most * numel


@triton.jit
def lengths(rows, lane, numel, WORLD_SIZE: tl.constexpr):
    """Elements of the part of the rank that `lane`, a tile, names; 0 where it names none."""
    found = tl.zeros(lane.shape, tl.int64)
    for r in tl.static_range(WORLD_SIZE):
        found = tl.where(lane == r, rows[r], found)
    return found * numel


@triton.jit
def tell(group, sends, numel, epoch, WORLD_SIZE: tl.constexpr, LANES: tl.constexpr, PTX: tl.constexpr):
    """Send every peer this rank's longest part (phase 1) and the length of the part for it (phase 2), in elements."""
    lane = tl.arange(0, LANES)
    mask = (lane < WORLD_SIZE) & (lane != tl.load(group + RANK))
    most = longest(sends, numel, WORLD_SIZE)
    send_headers_to(group, mask, epoch, most, 1, False, WORLD_SIZE, LANES, PTX)
    each = lengths(sends, lane, numel, WORLD_SIZE)
    send_headers_to(group, mask, epoch, each, 2, False, WORLD_SIZE, LANES, PTX)


@triton.jit
def hear(group, sends, takes, numel, epoch, WORLD_SIZE: tl.constexpr, LANES: tl.constexpr, PTX: tl.constexpr):
    """(longest part of any rank in elements, status). One of another length than expected is in the status word."""
    source = tl.arange(0, LANES) % SOURCES
    mask = (source < WORLD_SIZE) & (source != tl.load(group + RANK))
    told, status = wait_words(group, mask, epoch, 1, WORLD_SIZE, LANES, PTX)
    most = tl.maximum(longest(sends, numel, WORLD_SIZE), tl.max(tl.where(mask, told & LOW, 0), axis=0))
    if status == 0:
        told, status = wait_words(group, mask, epoch, 2, WORLD_SIZE, LANES, PTX)
        wrong = mask & ((told & LOW) != lengths(takes, source, numel, WORLD_SIZE))
        culprit = tl.max(tl.where(wrong, source + 1, 0), axis=0)
        if (culprit != 0) & (status == 0):
            got = tl.max(tl.where(source == culprit - 1, told & LOW, 0), axis=0)
            control = tl.load(group + CONTROL).to(tl.pointer_type(tl.int64))
            tl.store(control + STATUS, (got << 32) + ((culprit - 1).to(tl.int64) << 8) + SPLITS)
            status = 2
    return most, status
