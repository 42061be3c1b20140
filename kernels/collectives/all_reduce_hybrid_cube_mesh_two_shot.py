"""All-reduce over a hybrid cube mesh, two shots, simple: reduce-scatter in the quad, relay, all-gather in the quad.

    quad 0 1 2 3, shards a b c d        relays                      quad
    rank 0 gets a0 a1 a2 a3 = A    ─▶   0-4: A + A' on both    ─▶   A + A' to 1, 2, 3
    rank 1 gets b0 b1 b2 b3 = B    ─▶   1-5: B + B' on both    ─▶   B + B' to 0, 2, 3     y = all four, everywhere
    rank 2 gets c0 c1 c2 c3 = C    ─▶   2-6: C + C' on both    ─▶   C + C' to 0, 1, 3
    rank 3 gets d0 d1 d2 d3 = D    ─▶   3-7: D + D' on both    ─▶   D + D' to 0, 1, 2

Bytes     per rank 3/4 n to its quad, 1/4 n to its relay, 3/4 n to its quad: 1.75 n, what a ring moves. For types
          narrower than 32 bits the sum crosses in accumulators: 2.0 n for 16 bits, 2.5 n for 8 (not for bitwise
          operations and bool). A shard is rounded up to 16 bytes. Nothing is sent between ranks without a link.
Hops      3 one-way pushes, each followed by a barrier along its links.
Waits     headers, release to acquire at `.sys`: of the quad, the shards are here; of the relay, the other quad's sum
          is; of the quad once more, the other shards' results are.
Reuse     two mailboxes, by the epoch's parity; see `device/mesh.py`, headers. Half of each buffer for each of the first
          and last phase; the own sum waits in the second half of the relay's buffers, which writes the first half only.
Order     as in `all_reduce_hybrid_cube_mesh`: the same bits. A shard belongs to a position, so that both ends of a
          relay link own the same one.
Source    the two-shot form of `all_reduce_hybrid_cube_mesh`; not known to be published.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tricomm.kernels.device import mesh
from tricomm.kernels.device.chunks import run_chunks
from tricomm.kernels.device.mailbox import buffer_words, simple_buffer
from tricomm.kernels.device.packing import end_of, load_tile, shard_words, store_tile, store_words
from tricomm.kernels.device.plain_data import copy_part, push_part
from tricomm.kernels.group import peer, table_of
from tricomm.kernels.reduction import accumulate, combine, finish


@triton.jit(do_not_specialize=["numel", "call"])
def all_reduce_hybrid_cube_mesh_two_shot(x_ptr, y_ptr, group, numel: tl.int64, call: tl.int64, SPEC: tl.constexpr):
    tl.static_assert(SPEC.WORLD_SIZE == mesh.RANKS, "a hybrid cube mesh has eight ranks")
    quad_rank, position = tl.load(table_of(group) + mesh.QUAD_RANK), tl.load(table_of(group) + mesh.POSITION)
    half = buffer_words(group, 2, SPEC)
    run_chunks(_simple, (x_ptr, y_ptr, numel, quad_rank, position, half), group, call, 4 * half, SPEC)


@triton.jit
def _simple(tensors, chunk, SPEC: tl.constexpr):
    PARTS: tl.constexpr = SPEC.PARTS
    x_ptr, y_ptr, numel, quad_rank, position, half = tensors
    group, base, count = chunk.group, chunk.base, chunk.count
    shard = shard_words(count, 4)
    ours = tl.minimum(count - position * shard, shard)
    here = base + position * shard
    mesh.open_epoch(chunk, False, SPEC)
    for step in range(4):  # 0 is the own buffer: that spares the sum a special case
        theirs = tl.minimum(count - (position ^ step) * shard, shard)
        buffer = simple_buffer(chunk, peer(group, mesh.in_quad(group, step)), quad_rank, SPEC)
        push_part(x_ptr, numel, base + (position ^ step) * shard, theirs, buffer, chunk, SPEC)
    mesh.send_headers(chunk, 0, True, False, SPEC)
    status = mesh.wait_headers(chunk, 0, True, False, SPEC)
    if status == 0:
        for first in range(chunk.own, ours, chunk.stride):
            parts = ()
            for n in tl.static_range(4):
                parts = parts + (load_tile(simple_buffer(chunk, table_of(group), n, SPEC), first, ours, SPEC.BLOCK),)
            sums = accumulate(parts, 4, SPEC)
            for n in tl.static_range(PARTS):
                kept = simple_buffer(chunk, table_of(group), mesh.RELAYED + n, SPEC) + half
                store_tile(kept, first, sums[n], ours, SPEC.BLOCK)
                buffer = simple_buffer(chunk, peer(group, mesh.relay(group)), mesh.RELAYED + n, SPEC)
                store_tile(buffer, first, sums[n], ours, SPEC.BLOCK)
        mesh.send_headers(chunk, 0, False, True, SPEC)
        status = mesh.wait_headers(chunk, 0, False, True, SPEC)
    if status == 0:
        limit = end_of(here + ours, numel, 64 // x_ptr.dtype.element_ty.primitive_bitwidth)
        for first in range(chunk.own, ours, chunk.stride):
            some, others = (), ()
            for n in tl.static_range(PARTS):
                buffer = simple_buffer(chunk, table_of(group), mesh.RELAYED + n, SPEC)
                some = some + (load_tile(buffer + half, first, ours, SPEC.BLOCK),)
                others = others + (load_tile(buffer, first, ours, SPEC.BLOCK),)
            total = finish(combine(some, others, SPEC), SPEC)
            store_words(y_ptr, here + first, total, limit, SPEC.BLOCK, SPEC.ALIGNED)
            for step in range(1, 4):
                buffer = simple_buffer(chunk, peer(group, mesh.in_quad(group, step)), position, SPEC) + half
                store_tile(buffer, first, total, ours, SPEC.BLOCK)
        mesh.send_headers(chunk, 1, True, False, SPEC)
        status = mesh.wait_headers(chunk, 1, True, False, SPEC)
    if status == 0:
        for step in range(1, 4):
            theirs = tl.minimum(count - (position ^ step) * shard, shard)
            buffer = simple_buffer(chunk, table_of(group), position ^ step, SPEC) + half
            copy_part(y_ptr, numel, base + (position ^ step) * shard, theirs, buffer, chunk, SPEC)
    return status
