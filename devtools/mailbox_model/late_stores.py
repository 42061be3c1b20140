"""Stores of a group that was given up, while its survivors already use the smaller group.

A call of three ranks is cut: rank 1 ended or stopped in it. Its stores may arrive at any time, because a stopped peer
may wake up. A survivor's kernel has left before the survivor makes the new group, so its own stores are over. In the
new group rank 2 is rank 1. The old call's words have their epoch as header and another payload, so that a poll that
takes one for a new word reads a wrong one.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from devtools.mailbox_model.explore import (
    LOSES,
    SAFE,
    WRONG,
    Block,
    Case,
    Op,
    Ranks,
    barrier,
    calls,
    others,
    push,
    read,
)

_FRESH = 10  # added to the owner's number: other memory


def old_stores(rank: int) -> list[Op]:
    """The stores of `rank` in the last call of the old group, of epoch 2."""
    return [*push(rank, others(rank, 3), 2, "a", -2), *push(rank, others(rank, 3), 2, ["h00"])]


def new_call(rank: int, n: int, epoch: int, fresh: bool, first: int) -> list[Block]:
    """Call `epoch` of the new group: data, a barrier, the read of the peers' data."""
    peers, at = others(rank, n), first + epoch
    ops = push(rank, peers, at, "a") + barrier(rank, peers, at) + read(rank, peers, at, "a")
    return [[op._replace(slots=tuple(_place(slot, fresh) for slot in op.slots)) for op in ops]]


def _place(slot: tuple[int, int, int, str], fresh: bool) -> tuple[int, int, int, str]:
    owner, *rest = slot
    # In the old memory, the new rank 1 owns the slots that it had as the old rank 2.
    return (owner + _FRESH if fresh else 2 * owner, *rest)  # type: ignore[return-value]


def shrunk(fresh: bool, first: int, drained: bool = True) -> Ranks:
    """The survivors' launches, and what arrives late: each store on its own."""
    new = calls(2, *[partial(new_call, fresh=fresh, first=first)] * (3 if drained else 1))
    late = old_stores(1)
    for rank, was in enumerate((0, 2)):
        if drained:
            new[rank].insert(0, [old_stores(was)])
        else:
            late += old_stores(was)
    return [*new, *([[[store]]] for store in late)]


def cases() -> Iterator[Case]:
    yield Case("shrink to fresh memory", SAFE, shrunk(fresh=True, first=0))
    yield Case("shrink to fresh memory before the old kernels have left", SAFE, shrunk(True, 0, drained=False))
    yield Case("shrink in the old memory, epochs from 1", WRONG, shrunk(fresh=False, first=0))
    yield Case("shrink in the old memory, epochs that go on", LOSES, shrunk(fresh=False, first=2))
