"""The frame of a collective kernel: a call is divided into chunks that fit into the mailboxes, and a chunk is an epoch.

A kernel defines one chunk; entering, counting epochs, stopping at a fault and leaving are done here.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from tricomm.kernels.device.group import rank_of
from tricomm.kernels.primitives import advance, enter, leave


class Chunk(NamedTuple):
    """One chunk of a call, as the body of a kernel sees it. All numbers are int64.

    group    what the kernel knows of its group (`device/group.py`)
    me       this rank
    call     the call's number and fingerprint
    epoch    the chunk's number in the life of the group
    base     its first word in the tensor, or in each row if a rank has several
    count    its words
    own      the first word of this block's first tile
    stride   words from one tile of this block to the next
    """

    group: Any
    me: Any
    call: Any
    epoch: Any
    base: Any
    count: Any
    own: Any
    stride: Any


@triton.jit
def packed_words(x_ptr, numel):
    """64-bit words of `numel` elements."""
    return tl.cdiv(numel, 64 // x_ptr.dtype.element_ty.primitive_bitwidth)


@triton.jit
def run_chunks(BODY: tl.constexpr, tensors, group, call, chunk_words, SPEC: tl.constexpr):
    """Run a whole call: BODY(tensors, chunk, SPEC) for each chunk, until one returns a status that is not zero.

    `tensors` is (x_ptr, y_ptr, numel) and whatever else BODY takes; `chunk_words` the most words of a chunk.
    """
    start, owner = enter(group, call)
    me = rank_of(group)
    words = packed_words(tensors[0], tensors[2])
    chunks = tl.cdiv(words, chunk_words)
    own = tl.program_id(0).to(tl.int64) * SPEC.BLOCK
    stride = tl.num_programs(0) * SPEC.BLOCK
    status = 0
    number = tl.zeros([], tl.int64)
    while (number < chunks) & (status == 0):
        base = number * chunk_words
        count = tl.minimum(words - base, chunk_words)
        chunk = Chunk(group, me, call, advance(start, number), base, count, own, stride)
        status = BODY(tensors, chunk, SPEC)
        number += 1
    leave(group, start, owner, call, chunks, status)
