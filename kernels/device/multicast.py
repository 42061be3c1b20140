"""Tiles through the switch: load the reduction of a buffer over all ranks, and store to the same buffer of all ranks.

Flight    UNROLLED tiles of a block's run are in flight at once, as in `plain_data`; the end of a run, and misaligned
          tensors, are moved tile by tile. Between multicast pointers (`pass_reduced`) nothing is misaligned, and every
          access has a mask, so the last tiles of a run of two or more are in flight at once as well.
Fences    a rank accesses the same memory here by its multicast address and elsewhere by its plain address. So the
          barriers between chunks (SWITCH) have an alias fence, which orders accesses by the two addresses. Accesses of
          different launches need none, so a call over handles has no such fence.
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
    """Multicast pointer to word OFFSET of buffer `number` of the `simple` mailboxes of all ranks; `heads` is the
    multicast pointer to the ranks' arenas."""
    pointers = ()
    for n in tl.static_range(1 if SPEC.PTX else SPEC.WORLD_SIZE):
        pointers = pointers + (simple_buffer(chunk, heads[n], number, SPEC) + OFFSET,)
    return pointers


@triton.jit
def spread(x_ptr, numel, buffers, chunk, SPEC: tl.constexpr):
    """Store this block's tiles of the chunk of x_ptr[0:numel] to the multicast pointer `buffers`."""
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
    """Reduce words `first` to `end` (exclusive) of the multicast pointer `given`, this block's tiles of them, and store
    the result to the same words of the multicast pointer `results`, which may be `given`. Both bounds are even."""
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
    """Reduce `count` words at the multicast pointer `buffers`, this block's tiles of them, and store the result in
    y_ptr[0:numel] from word `start` on; AGAIN: also to the multicast pointer `results`. `start` is even."""
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
