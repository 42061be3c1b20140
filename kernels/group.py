"""A kernel's group: the rank's number, the control page, the places of mailboxes, and the peers' arenas.

`group` has two forms, and every function here takes both:

    parameters   in shipped kernels: a tuple of 64-bit words (`layout.group_argument`), constants of the communicator
                 that are parameters of the launch, so that no push waits for a load of them
    pointer      in users' kernels: int64*, to this rank's group table, `Communicator.group_table`

Words that kernels change (epochs, arrivals) or that few kernels need are only in the table.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tricomm.kernels import layout

RANK = tl.constexpr(layout.RANK)
CONTROL = tl.constexpr(layout.CONTROL)
LL_BASE = tl.constexpr(layout.LL_BASE)
LL_BUFFER = tl.constexpr(layout.LL_BUFFER)
WIDE_BASE = tl.constexpr(layout.WIDE_BASE)
WIDE_BUFFER = tl.constexpr(layout.WIDE_BUFFER)
SIMPLE_BASE = tl.constexpr(layout.SIMPLE_BASE)
SIMPLE_BUFFER = tl.constexpr(layout.SIMPLE_BUFFER)
PEERS = tl.constexpr(layout.PEERS)
_PEERS = tl.constexpr(layout.PARAMETER_PEERS)


@triton.jit
def table_of(group):
    """Pointer (int64*) to this rank's group table, which is the head of its arena."""
    if isinstance(group, tl.tensor):
        table = group
    else:
        table = group[0]
    return table


@triton.jit
def word_of(group, WORD: tl.constexpr):
    """int64: word WORD of the group table, which is less than `layout.CONSTANTS`. The parameters are the table's
    address and then these words."""
    if isinstance(group, tl.tensor):
        word = tl.load(group + WORD)
    else:
        word = group[WORD + 1].to(tl.int64)  # the interpreter makes a small number an int32
    return word


@triton.jit
def rank_of(group):
    """int64: this rank."""
    return word_of(group, RANK)


@triton.jit
def control_of(group):
    """Pointer (int64*) to the words of the control page that the host shares."""
    return word_of(group, CONTROL).to(tl.pointer_type(tl.int64))


@triton.jit
def ll_base(group):
    """int64: the offset in bytes of the `ll` mailboxes in an arena."""
    return word_of(group, LL_BASE)


@triton.jit
def ll_bytes(group):
    """int64: bytes of a source's buffer in an `ll` mailbox."""
    return word_of(group, LL_BUFFER)


@triton.jit
def wide_base(group):
    """int64: the offset in bytes of the `ll128` mailboxes in an arena."""
    return word_of(group, WIDE_BASE)


@triton.jit
def wide_bytes(group):
    """int64: bytes of a source's buffer in an `ll128` mailbox."""
    return word_of(group, WIDE_BUFFER)


@triton.jit
def simple_base(group):
    """int64: the offset in bytes of the `simple` mailboxes in an arena."""
    return word_of(group, SIMPLE_BASE)


@triton.jit
def simple_bytes(group):
    """int64: bytes of a source's buffer in a `simple` mailbox."""
    return word_of(group, SIMPLE_BUFFER)


@triton.jit
def peer(group, rank):
    """Pointer (int64*, 16-byte aligned) to the head of `rank`'s arena; loaded, because `rank` is known at run time."""
    return tl.multiple_of(tl.load(table_of(group) + PEERS + rank).to(tl.pointer_type(tl.int64)), 16)


@triton.jit
def peer_ahead(group, STEP: tl.constexpr, WORLD_SIZE: tl.constexpr):
    """`peer` of rank (me + STEP) % WORLD_SIZE."""
    if isinstance(group, tl.tensor):
        head = peer(group, (rank_of(group) + STEP) % WORLD_SIZE)
    else:
        head = tl.multiple_of(group[_PEERS + STEP].to(tl.pointer_type(tl.int64)), 16)
    return head


@triton.jit
def peer_of(group, RANK: tl.constexpr, WORLD_SIZE: tl.constexpr):
    """`peer` of the constexpr RANK."""
    if isinstance(group, tl.tensor):
        head = peer(group, RANK)
    else:
        head = tl.multiple_of(group[_PEERS + WORLD_SIZE + RANK].to(tl.pointer_type(tl.int64)), 16)
    return head


@triton.jit
def peer_addresses(group, rank, mask, WORLD_SIZE: tl.constexpr, PTX: tl.constexpr):
    """int64 tile: the addresses of the arenas of `rank`, a tile of ranks; undefined outside of `mask`."""
    if isinstance(group, tl.tensor) or not PTX:
        addresses = tl.load(table_of(group) + PEERS + rank, mask=mask, other=0)
    else:  # a parameter cannot be indexed at run time, so select between all of them
        addresses = tl.zeros(rank.shape, tl.int64)
        for r in tl.static_range(WORLD_SIZE):
            addresses = tl.where(rank == r, group[_PEERS + WORLD_SIZE + r], addresses)
    return addresses
