"""A hybrid cube mesh: two quads of four ranks, each linked with the other three and with one relay in the other quad.

    0 ─ 1        4 ─ 5       quad {0 1 2 3}, quad {4 5 6 7}, relays 0-4 1-5 2-6 3-7 on a DGX-1V;
    │ ╳ │        │ ╳ │       any other labelling works: the group table has it
    2 ─ 3        6 ─ 7

Nothing is sent between ranks that have no link, headers included. Positions in the quads are chosen so that relay
partners have the same position. In step s (1 to 3) each rank exchanges data with position ^ s of its quad, so each link
carries one pair of ranks, in both directions.

Partners  the ranks of a rank's quad, by step, and its relay: their numbers and addresses are parameters of the launch
          (`layout.group_argument`), so that no push waits for a load of them.
Headers   to the quad first, and to the relay (or again to the quad) only after the quad's headers are seen. So a rank
          that has the relay's header knows that all eight ranks are in this epoch and have left the one before: the
          rule that makes two mailboxes enough also holds for ranks without a link, and between calls of any kernels. So
          the second headers release, after a block barrier, also under LL: they say that other ranks have read, and a
          relaxed header would not be ordered after the headers that this block has acquired.
Buffers   of an all-reduce: one for each sender's quad rank, its index among the quad's ranks in ascending order, so
          that the four buffers of a quad are adjacent in the order of summation; the next ones receive the relay's
          data. Of an all-gather: one for each rank whose data they receive.
Source    pytorch#114001 (hybrid cube mesh all-reduce, since removed); here by push, and summed in rank order, so
          that all ranks hold the same bits.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tricomm.kernels import layout
from tricomm.kernels.device.mailbox import clear_idle, clears
from tricomm.kernels.group import peer, table_of
from tricomm.kernels.primitives import SOURCES, send_headers_to, wait_headers_of

QUAD = tl.constexpr(layout.QUAD)
PEER_QUAD = tl.constexpr(layout.PEER_QUAD)
POSITION = tl.constexpr(layout.POSITION)
QUAD_RANK = tl.constexpr(layout.QUAD_RANK)
RANKS = tl.constexpr(layout.MESH_RANKS)
_PARTNERS, _HEADS = tl.constexpr(layout.PARAMETER_PEERS + 2 * layout.MESH_RANKS), tl.constexpr(layout.PARTNERS)
RELAY = tl.constexpr(4)  # as the step of a partner
RELAYED = tl.constexpr(4)  # the first buffer for the relay's data


@triton.jit
def in_quad(group, step):
    """The rank of this quad with which this rank exchanges data in step 1, 2 or 3; for step 0 this rank."""
    table = table_of(group)
    return tl.load(table + QUAD + (tl.load(table + POSITION) ^ step))


@triton.jit
def relay(group):
    """The rank of the other quad to which this rank has a link."""
    table = table_of(group)
    return tl.load(table + PEER_QUAD + tl.load(table + POSITION))


@triton.jit
def partner(group, STEP: tl.constexpr):
    """int64: `in_quad` of the constexpr STEP, or `relay` if STEP is RELAY."""
    if not isinstance(group, tl.tensor):
        rank = group[_PARTNERS + STEP].to(tl.int64)
    elif STEP == RELAY:
        rank = relay(group)
    else:
        rank = in_quad(group, STEP)
    return rank


@triton.jit
def partner_head(group, STEP: tl.constexpr):
    """`peer` of the rank that `partner` gives."""
    if isinstance(group, tl.tensor):
        head = peer(group, partner(group, STEP))
    else:
        head = tl.multiple_of(group[_PARTNERS + _HEADS + STEP].to(tl.pointer_type(tl.int64)), 16)
    return head


@triton.jit
def linked(group, QUAD_PEERS: tl.constexpr, TO_RELAY: tl.constexpr, SPEC: tl.constexpr):
    """bool [LANES]: the lanes of this rank's quad, of its relay, or of both."""
    source = tl.arange(0, SPEC.LANES) % SOURCES
    mask = source < 0
    if QUAD_PEERS:
        for step in tl.static_range(1, 4):
            mask |= source == partner(group, step)
    if TO_RELAY:
        mask |= source == partner(group, RELAY)
    return mask


@triton.jit
def send_headers(chunk, PHASE: tl.constexpr, TO_QUAD: tl.constexpr, TO_RELAY: tl.constexpr, SPEC: tl.constexpr):
    """Send this block's header along links. It publishes the block's writes, and those that the block has seen."""
    mask = linked(chunk.group, TO_QUAD, TO_RELAY, SPEC) & (tl.arange(0, SPEC.LANES) < SOURCES)
    tl.debug_barrier()
    send_headers_to(chunk.group, mask, chunk.epoch, chunk.call, PHASE, True, RANKS, SPEC.LANES, SPEC.PTX)


@triton.jit
def wait_headers(chunk, PHASE: tl.constexpr, OF_QUAD: tl.constexpr, OF_RELAY: tl.constexpr, SPEC: tl.constexpr):
    """Wait for the headers of linked ranks; returns the status. Under `simple` the writes that they published are
    visible."""
    mask = linked(chunk.group, OF_QUAD, OF_RELAY, SPEC)
    status = wait_headers_of(chunk.group, mask, chunk.epoch, chunk.call, PHASE, RANKS, SPEC.LANES, SPEC.PTX)
    if not SPEC.LL:
        tl.debug_barrier()
    return status


@triton.jit
def open_epoch(chunk, TO_RELAY: tl.constexpr, SPEC: tl.constexpr):
    """Clear the idle mailbox if this epoch does that. Under LL then send headers along links: this block is in this
    epoch.

    That header is relaxed unless it follows a clearing, as in `push.open_epoch`.
    """
    group, epoch, call = chunk.group, chunk.epoch, chunk.call
    clear_idle(group, epoch, 1, SPEC)
    if SPEC.LL:
        mask = linked(group, True, TO_RELAY, SPEC) & (tl.arange(0, SPEC.LANES) < SOURCES)
        if clears(epoch):
            send_headers_to(group, mask, epoch, call, 0, True, RANKS, SPEC.LANES, SPEC.PTX)
        else:
            send_headers_to(group, mask, epoch, call, 0, False, RANKS, SPEC.LANES, SPEC.PTX)
