"""Tiles through the switch: from the ranks' buffers of one number, reduced, and to the ranks' buffers of one number.

Flight    UNROLLED tiles of a block's run are in flight at once, as in `plain_data`; the end of a run, and misaligned
          tensors, are moved one tile after another. Between multicast pointers (`pass_reduced`) no tensor is
          misaligned, and every access has a mask, so the end of a run of two tiles or more is in flight at once as
          well.
Fences    memory that a rank accesses here by the multicast address is accessed elsewhere by a plain one. So the
          barriers between chunks (SWITCH) have an alias fence, which orders accesses by both kinds of address. Before
          and after a launch the driver orders them, so a call over handles has no such fence.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tricomm.kernels.device.mailbox import simple_buffer
from tricomm.kernels.device.packing import end_of, load_words, store_words, whole_tile
from tricomm.kernels.device.plain_data import FEW, FULL, runs
from tricomm.kernels.multimem import load_reduced, store_to_all


@triton.jit
def buffer_at_all(chunk, heads, number, OFFSET, SPEC: tl.constexpr):
    """Word OFFSET of buffer `number` of the simple mailbox of all ranks: a multicast pointer, as `heads` is one."""
    pointers = ()
    for n in tl.static_range(1 if SPEC.PTX else SPEC.WORLD_SIZE):
        pointers = pointers + (simple_buffer(chunk, heads[n], number, SPEC) + OFFSET,)
    return pointers


@triton.jit
def spread(x_ptr, numel, buffers, chunk, SPEC: tl.constexpr):
    """this block's tiles of the chunk's words of x_ptr[0:numel] to `buffers`, a multicast pointer."""
    UNROLLED: tl.constexpr = FEW if SPEC.COMPACT else FULL
    limit = end_of(chunk.base + chunk.count, numel, 64 // x_ptr.dtype.element_ty.primitive_bitwidth)
    sources = runs(x_ptr.to(tl.pointer_type(tl.int64)) + chunk.base, chunk.stride, UNROLLED)
    ahead = (UNROLLED - 1) * chunk.stride
    first = chunk.own
    while whole_tile(first + ahead, chunk.count, chunk.base, limit, x_ptr, SPEC.BLOCK, SPEC.ALIGNED):
        tiles = ()
        for n in tl.static_range(UNROLLED):
            tiles = tiles + (tl.load(tl.multiple_of(sources[n] + first, 16) + tl.arange(0, SPEC.BLOCK)),)
        for n in tl.static_range(UNROLLED):
            store_to_all(buffers, first + n * chunk.stride, tiles[n], chunk.count, SPEC)
        first += UNROLLED * chunk.stride
    while first < chunk.count:
        words = load_words(x_ptr, chunk.base + first, limit, SPEC.BLOCK, SPEC.ALIGNED)
        store_to_all(buffers, first, words, chunk.count, SPEC)
        first += chunk.stride


@triton.jit
def pass_reduced(given, results, first, end, SPEC: tl.constexpr):
    """this block's tiles of the words from `first` to before `end` of the multicast pointer `given`, reduced, to the
    same words of the multicast pointer `results`, which may be the same. Both bounds are even."""
    UNROLLED: tl.constexpr = FEW if SPEC.COMPACT else FULL
    stride = tl.num_programs(0).to(tl.int64) * SPEC.BLOCK
    at = first + tl.program_id(0).to(tl.int64) * SPEC.BLOCK
    while at + stride < end:
        tiles = ()
        for n in tl.static_range(UNROLLED):
            tiles = tiles + (load_reduced(given, at + n * stride, end, SPEC),)
        for n in tl.static_range(UNROLLED):
            store_to_all(results, at + n * stride, tiles[n], end, SPEC)
        at += UNROLLED * stride
    if at < end:
        store_to_all(results, at, load_reduced(given, at, end, SPEC), end, SPEC)


@triton.jit
def gather_reduced(buffers, results, y_ptr, start, count, numel, chunk, AGAIN: tl.constexpr, SPEC: tl.constexpr):
    """this block's tiles of `count` words at the multicast pointer `buffers`, reduced, into y_ptr[0:numel] from word
    `start` on; AGAIN: and to the multicast pointer `results`. `start` is even."""
    UNROLLED: tl.constexpr = FEW if SPEC.COMPACT else FULL
    limit = end_of(start + count, numel, 64 // y_ptr.dtype.element_ty.primitive_bitwidth)
    targets = runs(y_ptr.to(tl.pointer_type(tl.int64)) + start, chunk.stride, UNROLLED)
    ahead = (UNROLLED - 1) * chunk.stride
    first = chunk.own
    while whole_tile(first + ahead, count, start, limit, y_ptr, SPEC.BLOCK, SPEC.ALIGNED):
        tiles = ()
        for n in tl.static_range(UNROLLED):
            tiles = tiles + (load_reduced(buffers, first + n * chunk.stride, count, SPEC),)
        for n in tl.static_range(UNROLLED):
            if AGAIN:
                store_to_all(results, first + n * chunk.stride, tiles[n], count, SPEC)
            tl.store(tl.multiple_of(targets[n] + first, 16) + tl.arange(0, SPEC.BLOCK), tiles[n])
        first += UNROLLED * chunk.stride
    while first < count:
        words = load_reduced(buffers, first, count, SPEC)
        if AGAIN:
            store_to_all(results, first, words, count, SPEC)
        store_words(y_ptr, start + first, words, limit, SPEC.BLOCK, SPEC.ALIGNED)
        first += chunk.stride
