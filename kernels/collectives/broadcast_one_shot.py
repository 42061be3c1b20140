"""Broadcast, one shot, by every protocol: the root pushes its data to every peer's mailbox, each peer copies it out.

    root 1: [x] ──▶ mailboxes of 0, 2, 3      y = x on every rank

Bytes     (N-1) n written to peers by the root; under `ll` twice that, under `ll128` 4/3; nothing by the others.
Hops      1; under `simple` with a barrier after it, one per chunk; chunks overlap.
Waits     see `device/push.py`. The root waits for every peer's header of every chunk, so it is one chunk ahead at most.
Reuse     see `device/push.py`.
Order     nothing is summed.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tricomm.kernels.device.chunks import run_one_shot
from tricomm.kernels.device.mailbox import simple_buffer
from tricomm.kernels.device.packing import load_words, store_tile
from tricomm.kernels.device.planes import no_tile
from tricomm.kernels.device.push import first_tile, push_to_others, receive_row
from tricomm.kernels.group import peer


@triton.jit(do_not_specialize=["numel", "call", "root"])
def broadcast_one_shot(x_ptr, y_ptr, group, numel: tl.int64, call: tl.int64, root: tl.int64, SPEC: tl.constexpr):
    run_one_shot(_first_tile, _push_ll, _push, _take, (x_ptr, y_ptr, numel, root), group, call, SPEC)


@triton.jit
def _first_tile(tensors, chunk, SPEC: tl.constexpr):
    tile = no_tile(SPEC)
    if chunk.me == tensors[3]:
        tile = first_tile(tensors, chunk, SPEC)
    return tile


@triton.jit
def _push_ll(tensors, chunk, tile, SPEC: tl.constexpr):
    if chunk.me == tensors[3]:
        push_to_others(tensors, chunk, tile, SPEC)


@triton.jit
def _push(tensors, chunk, SPEC: tl.constexpr):
    x_ptr, y_ptr, numel, root = tensors
    me = chunk.me
    if me == root:
        for first in range(chunk.own, chunk.count, chunk.stride):
            words = load_words(x_ptr, chunk.base + first, numel, SPEC.BLOCK, SPEC.ALIGNED)
            for step in range(1, SPEC.WORLD_SIZE):
                buffer = simple_buffer(chunk, peer(chunk.group, (me + step) % SPEC.WORLD_SIZE), me, SPEC)
                store_tile(buffer, first, words, chunk.count, SPEC.BLOCK)


@triton.jit
def _take(tensors, chunk, status, SPEC: tl.constexpr):
    x_ptr, y_ptr, numel, root = tensors
    return receive_row(y_ptr, numel, root, chunk, chunk.me != root, status, SPEC)
