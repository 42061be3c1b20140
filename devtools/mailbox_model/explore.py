"""The effect of each operation of a protocol, and the operations."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Literal, NamedTuple

from devtools.every_order import SAFE as SAFE
from devtools.every_order import search

Slot = tuple[int, int, int, str]  # owner, parity, source, word


class Op(NamedTuple):
    kind: Literal["write", "poll", "read"]
    slots: tuple[Slot, ...]
    epoch: int


Block = list[Op]
Launch = list[Block]
Ranks = list[list[Launch]]
Kernel = Callable[[int, int, int], Launch]  # of rank, number of ranks and epoch
Place = tuple[int, tuple[int, ...]]  # of a rank: its launch, and the next operation of each of its blocks
State = tuple[tuple[Place, ...], tuple[int, ...]]  # the places, and the epoch in each slot
LOSES, WRONG = "loses a word", "reads a wrong word"


def explore(ranks: Ranks, want: str = SAFE, limit: int = 1_000_000) -> tuple[str, int]:
    """As `every_order.search`."""
    ops = [op for launches in ranks for launch in launches for block in launch for op in block]
    numbers = {slot: n for n, slot in enumerate(dict.fromkeys(slot for op in ops for slot in op.slots))}
    start: State = tuple(_skip_empty(launches, 0) for launches in ranks), (0,) * len(numbers)
    return search(start, partial(_moves, ranks, numbers), want, limit)


def _moves(ranks: Ranks, numbers: dict[Slot, int], state: State) -> Iterator[State | str]:
    places, memory = state
    moved, ended = False, True
    for rank, block, op in _next_ops(ranks, places):
        ended = False
        held = all(memory[numbers[slot]] == op.epoch for slot in op.slots)
        if op.kind == "poll" and not held:
            continue
        moved = True
        if op.kind == "read" and not held:
            yield WRONG
            continue
        after = memory
        if op.kind == "write":
            written = {numbers[slot] for slot in op.slots}
            after = tuple(op.epoch if n in written else epoch for n, epoch in enumerate(memory))
        place = _moved(ranks[rank], places[rank], block)
        yield (*places[:rank], place, *places[rank + 1 :]), after
    if not ended and not moved:
        yield LOSES


def _next_ops(ranks: Ranks, places: tuple[Place, ...]) -> Iterator[tuple[int, int, Op]]:
    for rank, (launch, counts) in enumerate(places):
        for block, count in enumerate(counts):
            if count < len(ranks[rank][launch][block]):
                yield rank, block, ranks[rank][launch][block][count]


def _moved(launches: list[Launch], place: Place, block: int) -> Place:
    launch, counts = place
    counts = tuple(count + (b == block) for b, count in enumerate(counts))
    if any(count < len(ops) for count, ops in zip(counts, launches[launch], strict=True)):
        return launch, counts
    return _skip_empty(launches, launch + 1)


def _skip_empty(launches: list[Launch], launch: int) -> Place:
    while launch < len(launches) and not any(launches[launch]):
        launch += 1
    return launch, (0,) * len(launches[launch]) if launch < len(launches) else ()


class Case(NamedTuple):
    """Launches of all ranks, and the expected verdict: SAFE for all orders, or a fault that some order has."""

    name: str
    want: str
    ranks: Ranks


def calls(n: int, *kernels: Kernel) -> Ranks:
    """One launch of each kernel, an epoch each."""
    return [[kernel(rank, n, epoch) for epoch, kernel in enumerate(kernels, 1)] for rank in range(n)]


# Operations on `words` of each peer. `value`: in the slot, if not the epoch. `mailboxes`: in rotation.


def others(rank: int, n: int) -> list[int]:
    return [p for p in range(n) if p != rank]


def push(
    rank: int, peers: Iterable[int], epoch: int, words: Sequence[str], value: int = 0, mailboxes: int = 2
) -> Block:
    """Write to slots of the peers; a write to its own slots is a stage."""
    return [Op("write", ((p, epoch % mailboxes, rank, w),), value or epoch) for p in peers for w in words]


def poll(rank: int, peers: Iterable[int], epoch: int, words: Sequence[str], value: int = 0) -> Block:
    return [Op("poll", ((rank, epoch % 2, p, w),), value or epoch) for p in peers for w in words]


def together(rank: int, peers: Iterable[int], epoch: int, words: Sequence[str]) -> Block:
    """One loop that polls several words: its last round sees all of them at once."""
    slots = [op.slots[0] for op in poll(rank, peers, epoch, words)]
    return [Op("poll", tuple(slots), epoch)]


def read(
    rank: int, peers: Iterable[int], epoch: int, words: Sequence[str], value: int = 0, mailboxes: int = 2
) -> Block:
    return [Op("read", ((rank, epoch % mailboxes, p, w),), value or epoch) for p in peers for w in words]


def fetch(peers: Iterable[int], epoch: int, words: Sequence[str]) -> Block:
    """Read the stages of the peers, each of which has written its own."""
    return [Op("read", ((p, epoch % 2, p, w),), epoch) for p in peers for w in words]


def barrier(rank: int, peers: list[int], epoch: int, block: int = 0, phase: int = 0) -> Block:
    """A header to every peer, and one from each, with a slot for each phase and block."""
    header = [f"h{phase}{block}"]
    return push(rank, peers, epoch, header) + poll(rank, peers, epoch, header)
