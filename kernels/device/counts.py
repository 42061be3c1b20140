"""Parts of uneven length: where each part begins, and how ranks exchange the lengths before the data.

`send_counts` and `recv_counts` are tuples of WORLD_SIZE int64: the numbers of rows, of `numel` elements each, to and
from each rank, in rank order. They are parameters of the launch, which the driver copies: every call, on any stream or
in a graph, has its own, and no memory has to outlive the kernel that reads it. A parameter cannot be indexed at run
time, so WORLD_SIZE selects between constant parameters pick a rank's count, without a memory access.

Lengths are exchanged in two headers per peer in the first chunk of a call, not as payload.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tricomm.kernels import layout
from tricomm.kernels.group import control_of, rank_of
from tricomm.kernels.primitives import LOW, SOURCES, STATUS, send_headers_to, wait_words

SPLITS = tl.constexpr(layout.SPLITS)


@triton.jit
def part(counts, rank, numel, WORLD_SIZE: tl.constexpr):
    """(first element, elements) of `rank`'s part of a tensor that is divided by `counts`."""
    before = tl.zeros([], tl.int64)
    length = tl.zeros([], tl.int64)
    for r in tl.static_range(WORLD_SIZE):
        before += tl.where(r < rank, counts[r], 0)
        length += tl.where(r == rank, counts[r], 0)
    return before * numel, length * numel


@triton.jit
def longest(counts, numel, WORLD_SIZE: tl.constexpr):
    """Elements of the longest part."""
    most = tl.zeros([], tl.int64)
    for r in tl.static_range(WORLD_SIZE):
        most = tl.maximum(most, counts[r])
    return most * numel


@triton.jit
def lengths(counts, lane, numel, WORLD_SIZE: tl.constexpr):
    """Elements of the part of rank `lane` (a tile of ranks); 0 for a rank that does not exist."""
    rows = tl.zeros(lane.shape, tl.int64)
    for r in tl.static_range(WORLD_SIZE):
        rows = tl.where(lane == r, counts[r], rows)
    return rows * numel


@triton.jit
def publish_counts(group, send_counts, numel, epoch, SPEC: tl.constexpr):
    """Send every peer the length of this rank's longest part (phase 1) and of the part for that peer (phase 2), in
    elements."""
    lane = tl.arange(0, SPEC.LANES)
    mask = (lane < SPEC.WORLD_SIZE) & (lane != rank_of(group))
    most = longest(send_counts, numel, SPEC.WORLD_SIZE)
    send_headers_to(group, mask, epoch, most, 1, False, SPEC.WORLD_SIZE, SPEC.LANES, SPEC.PTX)
    each = lengths(send_counts, lane, numel, SPEC.WORLD_SIZE)
    send_headers_to(group, mask, epoch, each, 2, False, SPEC.WORLD_SIZE, SPEC.LANES, SPEC.PTX)


@triton.jit
def receive_counts(group, send_counts, recv_counts, numel, epoch, SPEC: tl.constexpr):
    """(longest part of any rank in elements, status). A wrong length is reported in the status word."""
    source = tl.arange(0, SPEC.LANES) % SOURCES
    mask = (source < SPEC.WORLD_SIZE) & (source != rank_of(group))
    theirs, status = wait_words(group, mask, epoch, 1, SPEC.WORLD_SIZE, SPEC.LANES, SPEC.PTX)
    ours = longest(send_counts, numel, SPEC.WORLD_SIZE)
    most = tl.maximum(ours, tl.max(tl.where(mask, theirs & LOW, 0), axis=0))
    if status == 0:
        theirs, status = wait_words(group, mask, epoch, 2, SPEC.WORLD_SIZE, SPEC.LANES, SPEC.PTX)
        wrong = mask & ((theirs & LOW) != lengths(recv_counts, source, numel, SPEC.WORLD_SIZE))
        culprit = tl.max(tl.where(wrong, source + 1, 0), axis=0)
        if (culprit != 0) & (status == 0):
            got = tl.max(tl.where(source == culprit - 1, theirs & LOW, 0), axis=0)
            control = control_of(group)
            tl.store(control + STATUS, (got << 32) + ((culprit - 1).to(tl.int64) << 8) + SPLITS)
            status = 2
    return most, status
