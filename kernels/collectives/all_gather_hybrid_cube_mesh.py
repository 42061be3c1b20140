"""All-gather over a hybrid cube mesh: push to the quad and the relay, then forward the relay's data to the quad.

    rank 0: [x0] ──▶ 1, 2, 3 and relay 4        rank 0: x4 ──▶ 1, 2, 3        y = [x0 .. x7]   on every rank
    rank 4: [x4] ──▶ 5, 6, 7 and relay 0        rank 1: x5 ──▶ 0, 2, 3
    ...                                        ...

Order     nothing is summed.
Source    see `device/mesh.py`.

LL: no barrier, words of either width.

Bytes     per rank under `ll` 8 n, then 6 n written over links (half of them flags), under `ll128` 2/3 of that: 7 rows
          reach every rank, as they have to. Nothing is sent between ranks without a link.
Hops      2, both one way.
Waits     header, along links: the peer made the same call; of the quad once more, before its forwarded data is
          used. word: its flag is this epoch; flag and payload are one access.
Reuse     see `device/mesh.py`, headers: the quad's second ones are sent after the relay's are seen, so a rank that has
          them knows that all eight ranks are in this epoch.

simple: a barrier after each push.

Bytes     per rank 4 n, then 3 n written over links: 7 rows reach every rank, as they have to. Nothing is sent between
          ranks without a link.
Hops      2 one-way pushes, each followed by a barrier along links.
Waits     header of the quad and the relay, release to acquire at `.sys`: their rows are here. Header of the quad once
          more: so is the data that it has forwarded.
Reuse     two mailboxes, by the epoch's parity; headers as under LL.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tricomm.kernels.device import mesh
from tricomm.kernels.device.chunks import run_chunks, run_loaded
from tricomm.kernels.device.mailbox import buffer_words, ll_buffer, simple_buffer
from tricomm.kernels.device.packing import load_tile, load_words, store_tile, store_words
from tricomm.kernels.device.planes import put_planes, store_planes
from tricomm.kernels.device.push import first_tile, nth_tile, receive
from tricomm.kernels.group import peer, table_of


@triton.jit(do_not_specialize=["numel", "call"])
def all_gather_hybrid_cube_mesh(x_ptr, y_ptr, group, numel: tl.int64, call: tl.int64, SPEC: tl.constexpr):
    tl.static_assert(SPEC.WORLD_SIZE == mesh.RANKS, "a hybrid cube mesh has eight ranks")
    tensors = (x_ptr, y_ptr, numel, tl.load(table_of(group) + mesh.POSITION))
    if SPEC.LL:
        run_loaded(first_tile, _ll, tensors, group, call, buffer_words(group, 1, SPEC), SPEC)
    else:
        run_chunks(_simple, tensors, group, call, buffer_words(group, 1, SPEC), SPEC)


@triton.jit
def _ll(tensors, chunk, tile, SPEC: tl.constexpr):
    x_ptr, y_ptr, numel, position = tensors
    group, me, epoch, base, count = chunk.group, chunk.me, chunk.epoch, chunk.base, chunk.count
    mesh.open_epoch(chunk, True, SPEC)
    first = chunk.own
    more = first < count
    while more:
        for step in tl.static_range(5):
            buffer = ll_buffer(chunk, mesh.partner_head(group, step), me, first, SPEC)
            put_planes(buffer, tile, epoch, count - first, SPEC)
        first += chunk.stride
        more = first < count
        if more:
            tile = nth_tile(tensors, chunk, first, SPEC)
    status = mesh.wait_headers(chunk, 0, True, True, SPEC)
    if status == 0:
        mesh.send_headers(chunk, 1, True, False, SPEC)
    first = chunk.own
    while (first < count) & (status == 0):
        source = mesh.partner(group, mesh.RELAY)
        tiles, status = receive(chunk, source, first, count, 1, SPEC)
        if status == 0:
            for step in tl.static_range(1, 4):
                buffer = ll_buffer(chunk, mesh.partner_head(group, step), source, first, SPEC)
                put_planes(buffer, tiles[0], epoch, count - first, SPEC)
            store_planes(y_ptr + source * numel, base + first, tiles[0], count - first, numel, SPEC)
        first += chunk.stride
    if status == 0:
        status = mesh.wait_headers(chunk, 1, True, False, SPEC)
    for step in range(7):
        source = _row(group, position, step)
        first = chunk.own
        while (first < count) & (status == 0):
            tiles, status = receive(chunk, source, first, count, 1, SPEC)
            if status == 0:
                store_planes(y_ptr + source * numel, base + first, tiles[0], count - first, numel, SPEC)
            first += chunk.stride
    return status


@triton.jit
def _simple(tensors, chunk, SPEC: tl.constexpr):
    x_ptr, y_ptr, numel, position = tensors
    group, me, base, count = chunk.group, chunk.me, chunk.base, chunk.count
    mesh.open_epoch(chunk, True, SPEC)
    for first in range(chunk.own, count, chunk.stride):
        mine = load_words(x_ptr, base + first, numel, SPEC.BLOCK, SPEC.ALIGNED)
        for step in range(5):
            to = mesh.relay(group) if step == 4 else mesh.in_quad(group, step % 4)
            store_tile(simple_buffer(chunk, peer(group, to), me, SPEC), first, mine, count, SPEC.BLOCK)
    mesh.send_headers(chunk, 0, True, True, SPEC)
    status = mesh.wait_headers(chunk, 0, True, True, SPEC)
    if status == 0:
        source = mesh.relay(group)
        for first in range(chunk.own, count, chunk.stride):
            part = load_tile(simple_buffer(chunk, table_of(group), source, SPEC), first, count, SPEC.BLOCK)
            for step in range(1, 4):
                buffer = simple_buffer(chunk, peer(group, mesh.in_quad(group, step)), source, SPEC)
                store_tile(buffer, first, part, count, SPEC.BLOCK)
            store_words(y_ptr + source * numel, base + first, part, numel, SPEC.BLOCK, SPEC.ALIGNED)
        mesh.send_headers(chunk, 1, True, False, SPEC)
        status = mesh.wait_headers(chunk, 1, True, False, SPEC)
    if status == 0:
        for step in range(7):
            source = _row(group, position, step)
            for first in range(chunk.own, count, chunk.stride):
                part = load_tile(simple_buffer(chunk, table_of(group), source, SPEC), first, count, SPEC.BLOCK)
                store_words(y_ptr + source * numel, base + first, part, numel, SPEC.BLOCK, SPEC.ALIGNED)
    return status


@triton.jit
def _row(group, position, step):
    """The rank whose row is copied in `step`: a rank of this quad in steps 0 to 3, a rank of the other quad, whose row
    a rank of this quad has forwarded, in steps 4 to 6."""
    source = mesh.in_quad(group, step % 4)
    if step > 3:
        source = tl.load(table_of(group) + mesh.PEER_QUAD + (position ^ (step - 3)))
    return source
