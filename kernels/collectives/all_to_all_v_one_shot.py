"""All-to-all with uneven parts, one shot, by every protocol: any number of rows to each rank, also none.

    rank 0: [a0 a0 a0 | b0 | c0 c0 | ]  sends (3, 1, 2, 0)      rank 0 gets [a0 a0 a0 | a1 | | a3 a3]  = (3, 1, 0, 2)
    rank 1: [a1 | | | d1]               sends (1, 0, 0, 1)      rank 1 gets [b0 | | b2 b2 | ]          = (1, 0, 2, 0)
    ...

Lengths   `send_counts` and `recv_counts`, in rows of `numel` elements, are parameters of the launch (see
          `device/counts.py`): every call has its own, without memory, a copy or another compiled kernel; a captured
          call keeps the lengths of its capture. A part begins at the sum of those before it.
Bytes     the parts for other ranks, written to peers; under `ll` twice that, under `ll128` 4/3.
Hops      1; under `simple` with a barrier after it, one per chunk.
Waits     as in `device/push.py`, and in the first chunk for two more headers of each peer, because lengths are known to
          one rank alone and no part of the fingerprint. The first has the length of the peer's longest part: the
          longest of all decides the number of chunks. The second has the length of the peer's part for this rank: if it
          is not the expected one, the call fails, because the ranks would wait for words that never come.
Load      under LL the first words to push, of the next rank's part, are loaded together with the epoch.
Chunks    under `simple` overlap as in `run_pushed`, from the second one on: the first barrier brings their number.
Reuse     see `device/push.py`; the further headers rotate with the epoch's parity as the first one does.
Order     nothing is summed.
Source    MPI_Alltoallv, by push.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tricomm.kernels.device.chunks import nth, whole_call
from tricomm.kernels.device.counts import part, publish_counts, receive_counts
from tricomm.kernels.device.dependent_launch import wait_for_launches
from tricomm.kernels.device.mailbox import buffer_words, ll_buffer
from tricomm.kernels.device.planes import load_planes_if, put_planes, store_planes_if
from tricomm.kernels.device.push import open_epoch, push_tile, receive, synchronize
from tricomm.kernels.group import peer_addresses
from tricomm.kernels.primitives import enter, leave


@triton.jit(do_not_specialize=["numel", "call"])
def all_to_all_v_one_shot(
    x_ptr, y_ptr, group, numel: tl.int64, call: tl.int64, send_counts, recv_counts, SPEC: tl.constexpr
):
    # Not `run_pushed`: the number of chunks is known only when the peers' counts have arrived, in the first chunk.
    buffer = buffer_words(group, 1, SPEC)
    number = tl.zeros([], tl.int64)
    wait_for_launches(SPEC)
    if SPEC.LL:  # in flight together with the epoch
        unnumbered = whole_call((x_ptr, y_ptr, numel), group, call, number, SPEC)
        tile = _tile_for(x_ptr, numel, send_counts, buffer, unnumbered, 1, unnumbered.own, SPEC)
    start = enter(group, call)
    whole = whole_call((x_ptr, y_ptr, numel), group, call, start, SPEC)
    chunks = tl.zeros([], tl.int64) + 1
    status = 0
    if SPEC.LL:
        more = number < chunks
        while more:
            chunk = nth(whole, number, buffer)
            _push_words(x_ptr, numel, send_counts, buffer, chunk, tile, SPEC)
            chunks, status = _meet(x_ptr, numel, send_counts, recv_counts, buffer, chunks, chunk, SPEC)
            status = _take(y_ptr, numel, recv_counts, buffer, chunk, status, SPEC)
            number += 1
            more = (number < chunks) & (status == 0)
            if more:
                tile = _tile_for(x_ptr, numel, send_counts, buffer, nth(whole, number, buffer), 1, chunk.own, SPEC)
    else:
        while (number <= chunks) & (status == 0):
            ahead = nth(whole, number, buffer)
            if number < chunks:
                _push(x_ptr, numel, send_counts, buffer, ahead, SPEC)
            if number > 0:
                status = _take(y_ptr, numel, recv_counts, buffer, nth(whole, number - 1, buffer), status, SPEC)
            if number < chunks:
                chunks, status = _meet(x_ptr, numel, send_counts, recv_counts, buffer, chunks, ahead, SPEC)
            number += 1
    leave(group, start, call, chunks, status)


@triton.jit
def _open(numel, send_counts, chunk, SPEC: tl.constexpr):
    open_epoch(chunk, 1, SPEC)
    if chunk.base == 0:
        publish_counts(chunk.group, send_counts, numel, chunk.epoch, SPEC)


@triton.jit
def _run_for(x_ptr, numel, send_counts, buffer, chunk, step, SPEC: tl.constexpr):
    """(rank, first element, elements, words of the chunk, aligned) of the part for rank (me + `step`) % WORLD_SIZE."""
    PACK: tl.constexpr = 64 // x_ptr.dtype.element_ty.primitive_bitwidth
    to = (chunk.me + step) % SPEC.WORLD_SIZE
    row, length = part(send_counts, to, numel, SPEC.WORLD_SIZE)
    count = tl.minimum(tl.cdiv(length, PACK) - chunk.base, buffer)
    return to, row, length, count, SPEC.ALIGNED & (row % (2 * PACK) == 0)


@triton.jit
def _tile_for(x_ptr, numel, send_counts, buffer, chunk, step, first, SPEC: tl.constexpr):
    """The tile at word `first` of that part; nothing is read past its end."""
    _, row, length, count, aligned = _run_for(x_ptr, numel, send_counts, buffer, chunk, step, SPEC)
    return load_planes_if(x_ptr + row, chunk.base + first, count - first, length, aligned, SPEC)


@triton.jit
def _push_words(x_ptr, numel, send_counts, buffer, chunk, tile, SPEC: tl.constexpr):
    """LL: push this block's tiles of the chunk, the next rank's part first; `tile` is the first of them."""
    _open(numel, send_counts, chunk, SPEC)
    step, first = 1, chunk.own
    while step <= SPEC.WORLD_SIZE:
        to, _, _, count, _ = _run_for(x_ptr, numel, send_counts, buffer, chunk, step, SPEC)
        if first < count:
            head = peer_addresses(chunk.group, to, first < count, SPEC.WORLD_SIZE, SPEC.PTX)
            head = tl.multiple_of(head.to(tl.pointer_type(tl.int64)), 16)
            put_planes(ll_buffer(chunk, head, chunk.me, first, SPEC), tile, chunk.epoch, count - first, SPEC)
        first += chunk.stride
        if first >= count:
            first = chunk.own
            step += 1
        if step <= SPEC.WORLD_SIZE:
            tile = _tile_for(x_ptr, numel, send_counts, buffer, chunk, step, first, SPEC)


@triton.jit
def _push(x_ptr, numel, send_counts, buffer, chunk, SPEC: tl.constexpr):
    """Simple: push this block's tiles of the chunk. No tile was loaded in advance."""
    _open(numel, send_counts, chunk, SPEC)
    for step in range(SPEC.WORLD_SIZE):
        to, row, length, count, aligned = _run_for(x_ptr, numel, send_counts, buffer, chunk, step, SPEC)
        for first in range(chunk.own, count, chunk.stride):
            tile = load_planes_if(x_ptr + row, chunk.base + first, count - first, length, aligned, SPEC)
            push_tile(chunk, to, first, tile, count, SPEC)


@triton.jit
def _meet(x_ptr, numel, send_counts, recv_counts, buffer, chunks, chunk, SPEC: tl.constexpr):
    """Synchronize, and in the first chunk compute the number of chunks. Returns (number of chunks, status)."""
    PACK: tl.constexpr = 64 // x_ptr.dtype.element_ty.primitive_bitwidth
    status = synchronize(chunk, 0, SPEC)
    if (chunk.base == 0) & (status == 0):
        most, status = receive_counts(chunk.group, send_counts, recv_counts, numel, chunk.epoch, SPEC)
        chunks = tl.maximum(tl.cdiv(tl.cdiv(most, PACK), buffer), 1)
    return chunks, status


@triton.jit
def _take(y_ptr, numel, recv_counts, buffer, chunk, status, SPEC: tl.constexpr):
    PACK: tl.constexpr = 64 // y_ptr.dtype.element_ty.primitive_bitwidth
    for step in range(SPEC.WORLD_SIZE):
        source = (chunk.me + step) % SPEC.WORLD_SIZE
        row, length = part(recv_counts, source, numel, SPEC.WORLD_SIZE)
        count = tl.minimum(tl.cdiv(length, PACK) - chunk.base, buffer)
        aligned = SPEC.ALIGNED & (row % (2 * PACK) == 0)
        first = chunk.own
        while (first < count) & (status == 0):
            tiles, status = receive(chunk, source, first, count, 1, SPEC)
            if status == 0:
                store_planes_if(y_ptr + row, chunk.base + first, tiles[0], count - first, length, aligned, SPEC)
            first += chunk.stride
    return status
