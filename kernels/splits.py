"""What ranks tell each other before uneven rows are exchanged: how long the longest is, and how long each one's.

Control, not payload: two headers a peer, in the first chunk of a call. `splits` is int64 [4, WORLD_SIZE] as
`plan.table` makes it: where each row begins and how long it is, of the input and of the output, in elements.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tricomm.kernels import layout
from tricomm.kernels.primitives import CONTROL, LOW, RANK, SOURCES, STATUS, send_headers_to, wait_words

SPLITS = tl.constexpr(layout.SPLITS)


@triton.jit
def tell(group, splits, epoch, WORLD_SIZE: tl.constexpr, LANES: tl.constexpr, PTX: tl.constexpr):
    """Send every peer this rank's longest row (phase 1) and the length of the row for it (phase 2), in elements."""
    lane = tl.arange(0, LANES)
    mask = (lane < WORLD_SIZE) & (lane != tl.load(group + RANK))
    lengths = tl.load(splits + WORLD_SIZE + lane, mask=lane < WORLD_SIZE, other=0)
    send_headers_to(group, mask, epoch, tl.max(lengths, axis=0), 1, False, WORLD_SIZE, LANES, PTX)
    send_headers_to(group, mask, epoch, lengths, 2, False, WORLD_SIZE, LANES, PTX)


@triton.jit
def hear(group, splits, epoch, WORLD_SIZE: tl.constexpr, LANES: tl.constexpr, PTX: tl.constexpr):
    """(longest row of any rank in elements, status). A row of another length than expected is in the status word."""
    source = tl.arange(0, LANES) % SOURCES
    mask = (source < WORLD_SIZE) & (source != tl.load(group + RANK))
    longest, status = wait_words(group, mask, epoch, 1, WORLD_SIZE, LANES, PTX)
    own = tl.load(splits + WORLD_SIZE + source, mask=source < WORLD_SIZE, other=0)
    most = tl.max(tl.maximum(own, tl.where(mask, longest & LOW, 0)), axis=0)
    if status == 0:
        rows, status = wait_words(group, mask, epoch, 2, WORLD_SIZE, LANES, PTX)
        expected = tl.load(splits + 3 * WORLD_SIZE + source, mask=mask, other=0)
        wrong = mask & ((rows & LOW) != expected)
        culprit = tl.max(tl.where(wrong, source + 1, 0), axis=0)
        if (culprit != 0) & (status == 0):
            got = tl.max(tl.where(source == culprit - 1, rows & LOW, 0), axis=0)
            control = tl.load(group + CONTROL).to(tl.pointer_type(tl.int64))
            tl.store(control + STATUS, (got << 32) + ((culprit - 1).to(tl.int64) << 8) + SPLITS)
            status = 2
    return most, status
