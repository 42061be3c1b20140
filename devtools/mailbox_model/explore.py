"""The operations of a protocol, and their effects."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Literal, NamedTuple

from devtools.every_order import SAFE as SAFE
from devtools.every_order import search

Slot = tuple[int, int, int, str]  # owner, parity, source, word


class Op(NamedTuple):
    kind: Literal["write", "poll", "read", "dependent", "signal", "wait"]
    slots: tuple[Slot, ...]
    epoch: int


Block = list[Op]
Launch = list[Block]
Ranks = list[list[Launch]]
Kernel = Callable[[int, int, int], Launch]  # of rank, number of ranks and epoch
Place = tuple[tuple[int, ...], ...]  # a rank's next operations, by launch and block
State = tuple[tuple[Place, ...], tuple[int, ...]]  # the places, and the epoch in each slot
LOSES, WRONG = "loses a word", "reads a wrong word"


def explore(ranks: Ranks, want: str = SAFE, limit: int = 1_000_000) -> tuple[str, int]:
    """As `every_order.search`."""
    ops = [op for launches in ranks for launch in launches for block in launch for op in block]
    numbers = {slot: n for n, slot in enumerate(dict.fromkeys(slot for op in ops for slot in op.slots))}
    start: State = tuple(tuple((0,) * len(launch) for launch in launches) for launches in ranks), (0,) * len(numbers)
    return search(start, partial(_moves, ranks, numbers), want, limit)


def _moves(ranks: Ranks, numbers: dict[Slot, int], state: State) -> Iterator[State | str]:
    places, memory = state
    moved, ended = False, True
    for rank, launch, block, op in _next_ops(ranks, places):
        ended = False
        held = all(memory[numbers[slot]] == op.epoch for slot in op.slots)
        if op.kind == "poll" and not held:
            continue
        if op.kind == "wait" and launch and not _ended(ranks[rank], places[rank], launch - 1):
            continue
        moved = True
        if op.kind == "read" and not held:
            yield WRONG
            continue
        after = memory
        if op.kind == "write":
            written = {numbers[slot] for slot in op.slots}
            after = tuple(op.epoch if n in written else epoch for n, epoch in enumerate(memory))
        place = [list(counts) for counts in places[rank]]
        place[launch][block] += 1
        yield (*places[:rank], tuple(map(tuple, place)), *places[rank + 1 :]), after
    if not ended and not moved:
        yield LOSES


def _next_ops(ranks: Ranks, places: tuple[Place, ...]) -> Iterator[tuple[int, int, int, Op]]:
    for rank, (launches, place) in enumerate(zip(ranks, places, strict=True)):
        for launch, counts in enumerate(place):
            for block, count in enumerate(counts):
                if count < len(launches[launch][block]):
                    yield rank, launch, block, launches[launch][block][count]
            if not _followed(launches, place, launch):
                break


def _followed(launches: list[Launch], place: Place, launch: int) -> bool:
    """True if the launch after number `launch` of the stream may begin: number `launch` has ended; or the next one is a
    dependent launch, and each block of number `launch` has signalled or ended."""
    if _ended(launches, place, launch):
        return True
    after = launches[launch + 1 : launch + 2]
    if not any(op.kind == "dependent" for blocks in after for ops in blocks for op in ops):
        return False
    blocks = zip(launches[launch], place[launch], strict=True)
    return all(count == len(ops) or any(op.kind == "signal" for op in ops[:count]) for ops, count in blocks)


def _ended(launches: list[Launch], place: Place, launch: int) -> bool:
    return all(count == len(ops) for ops, count in zip(launches[launch], place[launch], strict=True))


class Case(NamedTuple):
    """The launches of all ranks, and the expected verdict: SAFE for all orders, or the fault of some order."""

    name: str
    want: str
    ranks: Ranks


def calls(n: int, *kernels: Kernel) -> Ranks:
    """One launch of each kernel, with an epoch each."""
    return [[kernel(rank, n, epoch) for epoch, kernel in enumerate(kernels, 1)] for rank in range(n)]


# Operations on `words` of each peer. `value`: what is in the slot, by default the epoch. `mailboxes`: number in
# rotation.


def others(rank: int, n: int) -> list[int]:
    return [p for p in range(n) if p != rank]


def push(
    rank: int, peers: Iterable[int], epoch: int, words: Sequence[str], value: int = 0, mailboxes: int = 2
) -> Block:
    """Write to slots of the peers. A write to its own slots is a stage."""
    return [Op("write", ((p, epoch % mailboxes, rank, w),), value or epoch) for p in peers for w in words]


def poll(rank: int, peers: Iterable[int], epoch: int, words: Sequence[str], value: int = 0) -> Block:
    return [Op("poll", ((rank, epoch % 2, p, w),), value or epoch) for p in peers for w in words]


def together(rank: int, peers: Iterable[int], epoch: int, words: Sequence[str]) -> Block:
    """One loop that polls several words. Its last round reads all of them at once."""
    slots = [op.slots[0] for op in poll(rank, peers, epoch, words)]
    return [Op("poll", tuple(slots), epoch)]


def read(
    rank: int, peers: Iterable[int], epoch: int, words: Sequence[str], value: int = 0, mailboxes: int = 2
) -> Block:
    return [Op("read", ((rank, epoch % mailboxes, p, w),), value or epoch) for p in peers for w in words]


def fetch(peers: Iterable[int], epoch: int, words: Sequence[str]) -> Block:
    """Read the stages of the peers, which each peer has written itself."""
    return [Op("read", ((p, epoch % 2, p, w),), epoch) for p in peers for w in words]


def barrier(rank: int, peers: list[int], epoch: int, block: int = 0, phase: int = 0) -> Block:
    """Send a header to every peer, and wait for one from each. Each phase and block has its own slot."""
    header = [f"h{phase}{block}"]
    return push(rank, peers, epoch, header) + poll(rank, peers, epoch, header)
