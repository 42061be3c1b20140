"""All-reduce over a hybrid cube mesh: push to the quad, push the quad's sum to the relay.

    quad 0 1 2 3                         relay 0-4
    rank 0: [x0] ──▶ buffers of 1, 2, 3  rank 0: A = x0+x1+x2+x3 ──▶ rank 4     y = A + B   on every rank
    rank 1: [x1] ──▶ buffers of 0, 2, 3  rank 4: B = x4+x5+x6+x7 ──▶ rank 0
    ...

Order     each quad in ascending rank order, in accumulators (fp32 for 16-bit floats); then the two sums, whose addition
          is commutative; rounded once. So all eight ranks hold the same bits, under both protocols.
Source    see `device/mesh.py`; a push form of it is not known to be published.

LL: no barrier, words of either width.

Bytes     per rank under `ll` 6 n written to its quad, 2 n to its relay (half of them flags); for types narrower than 32
          bits the sum crosses in accumulators: 4 n for 16 bits, 8 n for 8 (not for bitwise operations and bool). Under
          `ll128` 2/3 of that. Nothing is sent between ranks without a link.
Hops      2, both one way.
Waits     header, along links: the peer made the same call. Of the quad before its sum is passed on, of the relay
          before the other sum is used. word: its flag is this epoch; flag and payload are one access.
Reuse     see `device/mesh.py`, headers: a rank that writes epoch e + 2 knows that all eight ranks have left e.

simple: a barrier with the quad, and one with the relay.

Bytes     per rank 3 n written to its quad and n to its relay; for types narrower than 32 bits the sum crosses in
          accumulators: 2 n for 16 bits, 4 n for 8 (not for bitwise operations and bool). Nothing is sent between ranks
          without a link.
Hops      2 one-way pushes, each followed by a barrier along its links.
Waits     header of the quad, release to acquire at `.sys`: what block b of each pushed here is visible. Header of the
          relay: so is its quad's sum.
Reuse     two mailboxes, by the epoch's parity; see `device/mesh.py`, headers. The own sum waits in the second half of
          the buffers of the relay, which writes the first half only.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tricomm.kernels.device import mesh
from tricomm.kernels.device.chunks import run_chunks, run_loaded
from tricomm.kernels.device.mailbox import buffer_words, ll_buffer, simple_buffer
from tricomm.kernels.device.packing import load_tile, load_words, store_tile, store_words
from tricomm.kernels.device.planes import accumulate_planes, across, put_planes, store_planes
from tricomm.kernels.device.push import first_tile, nth_tile, receive
from tricomm.kernels.group import peer, table_of
from tricomm.kernels.reduction import accumulate, combine, finish


@triton.jit(do_not_specialize=["numel", "call"])
def all_reduce_hybrid_cube_mesh(x_ptr, y_ptr, group, numel: tl.int64, call: tl.int64, SPEC: tl.constexpr):
    tl.static_assert(SPEC.WORLD_SIZE == mesh.RANKS, "a hybrid cube mesh has eight ranks")
    quad_rank = tl.load(table_of(group) + mesh.QUAD_RANK)
    if SPEC.LL:
        tensors = (x_ptr, y_ptr, numel, quad_rank)
        run_loaded(first_tile, _ll, tensors, group, call, buffer_words(group, 1, SPEC), SPEC)
    else:
        half = buffer_words(group, 2, SPEC)
        run_chunks(_simple, (x_ptr, y_ptr, numel, quad_rank, half), group, call, half, SPEC)


@triton.jit
def _ll(tensors, chunk, tile, SPEC: tl.constexpr):
    PARTS: tl.constexpr = SPEC.PARTS
    x_ptr, y_ptr, numel, quad_rank = tensors
    group, epoch, count = chunk.group, chunk.epoch, chunk.count
    mesh.open_epoch(chunk, False, SPEC)
    first = chunk.own
    more = first < count
    while more:
        if SPEC.COMPACT:  # one after another: the partners' addresses take registers
            for step in range(4):
                to = peer(group, mesh.in_quad(group, step))
                put_planes(ll_buffer(chunk, to, quad_rank, first, SPEC), tile, epoch, count - first, SPEC)
        else:
            for step in tl.static_range(4):  # 0 is the own buffer: that spares the sum a special case
                buffer = ll_buffer(chunk, mesh.partner_head(group, step), quad_rank, first, SPEC)
                put_planes(buffer, tile, epoch, count - first, SPEC)
        first += chunk.stride
        more = first < count
        if more:
            tile = nth_tile(tensors, chunk, first, SPEC)
    status = mesh.wait_headers(chunk, 0, True, False, SPEC)
    if status == 0:
        mesh.send_headers(chunk, 0, False, True, SPEC)
    first = chunk.own
    while (first < count) & (status == 0):
        tiles, status = receive(chunk, 0, first, count, 4, SPEC)
        if status == 0:
            sums = accumulate_planes(tiles, 4, SPEC)
            for n in tl.static_range(PARTS):
                buffer = ll_buffer(chunk, mesh.partner_head(group, mesh.RELAY), mesh.RELAYED + n, first, SPEC)
                put_planes(buffer, across(sums, n, SPEC.PLANES), epoch, count - first, SPEC)
        first += chunk.stride
    if status == 0:
        status = mesh.wait_headers(chunk, 0, False, True, SPEC)
    first = chunk.own
    while (first < count) & (status == 0):
        theirs, status = receive(chunk, mesh.RELAYED, first, count, PARTS, SPEC)
        if status == 0:
            # The quad's words once more, from one's own memory: so no tile waits for the one before it.
            tiles, status = receive(chunk, 0, first, count, 4, SPEC)
            sums = accumulate_planes(tiles, 4, SPEC)
            total = ()
            for k in tl.static_range(SPEC.PLANES):
                total = total + (finish(combine(sums[k], across(theirs, k, PARTS), SPEC), SPEC),)
            store_planes(y_ptr, chunk.base + first, total, count - first, numel, SPEC)
        first += chunk.stride
    return status


@triton.jit
def _simple(tensors, chunk, SPEC: tl.constexpr):
    PARTS: tl.constexpr = SPEC.PARTS
    x_ptr, y_ptr, numel, quad_rank, half = tensors
    group, count = chunk.group, chunk.count
    mesh.open_epoch(chunk, False, SPEC)
    for first in range(chunk.own, count, chunk.stride):
        mine = load_words(x_ptr, chunk.base + first, numel, SPEC.BLOCK, SPEC.ALIGNED)
        for step in range(4):  # 0 is the own buffer: that spares the sum a special case
            buffer = simple_buffer(chunk, peer(group, mesh.in_quad(group, step)), quad_rank, SPEC)
            store_tile(buffer, first, mine, count, SPEC.BLOCK)
    mesh.send_headers(chunk, 0, True, False, SPEC)
    status = mesh.wait_headers(chunk, 0, True, False, SPEC)
    if status == 0:
        for first in range(chunk.own, count, chunk.stride):
            parts = ()
            for n in tl.static_range(4):
                parts = parts + (load_tile(simple_buffer(chunk, table_of(group), n, SPEC), first, count, SPEC.BLOCK),)
            sums = accumulate(parts, 4, SPEC)
            for n in tl.static_range(PARTS):
                kept = simple_buffer(chunk, table_of(group), mesh.RELAYED + n, SPEC) + half
                store_tile(kept, first, sums[n], count, SPEC.BLOCK)
                buffer = simple_buffer(chunk, peer(group, mesh.relay(group)), mesh.RELAYED + n, SPEC)
                store_tile(buffer, first, sums[n], count, SPEC.BLOCK)
        mesh.send_headers(chunk, 0, False, True, SPEC)
        status = mesh.wait_headers(chunk, 0, False, True, SPEC)
    if status == 0:
        for first in range(chunk.own, count, chunk.stride):
            some, others = (), ()
            for n in tl.static_range(PARTS):
                buffer = simple_buffer(chunk, table_of(group), mesh.RELAYED + n, SPEC)
                some = some + (load_tile(buffer + half, first, count, SPEC.BLOCK),)
                others = others + (load_tile(buffer, first, count, SPEC.BLOCK),)
            total = finish(combine(some, others, SPEC), SPEC)
            store_words(y_ptr, chunk.base + first, total, numel, SPEC.BLOCK, SPEC.ALIGNED)
    return status
