"""Late stores of a group that was given up, when its survivors already use a smaller group, or a group with a new rank.

In a call of three ranks, rank 1 ended or stopped. Its stores may arrive at any time, because a stopped rank may
continue. A survivor's kernel has ended before the survivor makes the new group, so its own stores have arrived. In the
new group, rank 2 is rank 1. The old call's words have their epoch as header and another payload, so a poll that takes
one of them for a new word reads a wrong word.

A group with a new rank 1 has new memory at the old addresses, because captured graphs use these. The lost rank has
mapped the old memory, so its stores do not reach the new memory. Stores of a survivor's own kernel do if it still runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
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

Place = Callable[[int], int]  # the owner of slots, from a rank of the new group


def fresh(rank: int) -> int:
    """A place in memory other than the old ranks' memory."""
    return rank + 10


def old_stores(rank: int, where: Place = int) -> list[Op]:
    """The stores of `rank` in the last call of the old group, of epoch 2."""
    return _at([*push(rank, others(rank, 3), 2, "a", -2), *push(rank, others(rank, 3), 2, ["h00"])], where)


def new_call(rank: int, n: int, epoch: int, where: Place, first: int) -> list[Block]:
    """Call `epoch` of the new group: data, a barrier, the read of the peers' data."""
    peers, at = others(rank, n), first + epoch
    return [_at(push(rank, peers, at, "a") + barrier(rank, peers, at) + read(rank, peers, at, "a"), where)]


def _at(ops: list[Op], where: Place) -> list[Op]:
    return [op._replace(slots=tuple((where(owner), *rest) for owner, *rest in op.slots)) for op in ops]  # type: ignore


def shrunk(where: Place, first: int, drained: bool = True) -> Ranks:
    """The survivors' launches, and the late stores, which arrive independently."""
    new = calls(2, *[partial(new_call, where=where, first=first)] * (3 if drained else 1))
    late = old_stores(1)
    for rank, was in enumerate((0, 2)):
        if drained:
            new[rank].insert(0, [old_stores(was)])
        else:
            late += old_stores(was)
    return [*new, *([[[store]]] for store in late)]


def replaced(where: Place, first: int, drained: bool = True) -> Ranks:
    """As `shrunk`, with a new rank 1. The survivors' old kernels store to the addresses that the new memory gets."""
    new = calls(3, *[partial(new_call, where=where, first=first)] * 2)
    if drained:  # a kernel that has ended before has no store in flight
        return [*new, *([[[store]]] for store in old_stores(1))]
    late = [store for rank in (0, 2) for store in old_stores(rank, where)]
    return [*new, *([[[store]]] for store in late)]


def cases() -> Iterator[Case]:
    yield Case("shrink to fresh memory", SAFE, shrunk(fresh, first=0))
    yield Case("shrink to fresh memory before the old kernels have left", SAFE, shrunk(fresh, 0, drained=False))
    # In the old memory, the new rank 1 owns the slots that it had as the old rank 2.
    yield Case("shrink in the old memory, epochs from 1", WRONG, shrunk(lambda rank: 2 * rank, first=0))
    yield Case("shrink in the old memory, epochs that go on", LOSES, shrunk(lambda rank: 2 * rank, first=2))
    yield Case("replace with fresh memory", SAFE, replaced(fresh, first=0))
    yield Case("replace with fresh memory before the old kernels have left", WRONG, replaced(fresh, 0, drained=False))
    yield Case("replace in the old memory", WRONG, replaced(int, first=0))
