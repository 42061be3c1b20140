"""Which kernels are resident on a GPU. Dependent launches must not keep a peer's kernel from becoming resident.

There are two ranks. Each has streams of kernels, and room for a number of blocks. A block of a group's kernel ends when
the same block of the same call runs on the peer. A block of another library's kernel ends at any time. In a dependent
launch, both end only after the previous kernel of the stream. A kernel that signals does so when all its blocks are
resident: on the hardware, a dependent launch begins when each block of the previous kernel has signalled. If no block
can begin or end, the ranks wait for ever, until the timeout of the kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

from devtools.every_order import SAFE, search

STUCK = "waits for room for ever"
Counts = tuple[tuple[int, int], ...]  # of a rank, by kernel: blocks that have begun, and that have ended
State = tuple[Counts, Counts]


class Kernel(NamedTuple):
    """`call`: the group's name and the number of the call; empty for another library's kernel. `after`: a call of the
    same group on another stream, for which the host makes this stream wait."""

    call: str
    blocks: int
    stream: int
    dependent: bool = True
    signals: bool = True
    after: str = ""


Rank = tuple[Kernel, ...]


def explore(ranks: tuple[Rank, Rank], room: int, early: bool, want: str = SAFE) -> tuple[str, int]:
    """As `every_order.search`. `early`: a kernel signals when its first block is resident, not its last one."""
    start = tuple(tuple((0, 0) for _ in rank) for rank in ranks)
    return search(start, partial(_moves, ranks, room, early), want)


def _moves(ranks: tuple[Rank, Rank], room: int, early: bool, state: State) -> Iterator[State | str]:
    moved = False
    for r, (rank, counts) in enumerate(zip(ranks, state, strict=True)):
        theirs = {kernel.call: begun for kernel, (begun, _) in zip(ranks[1 - r], state[1 - r], strict=True)}
        full = sum(begun - ended for begun, ended in counts) == room
        for n, (kernel, (begun, ended)) in enumerate(zip(rank, counts, strict=True)):
            before = next((m for m in reversed(range(n)) if rank[m].stream == kernel.stream), None)
            over = before is None or counts[before][1] == rank[before].blocks
            if begun < kernel.blocks and not full and (over or _may_begin(rank, counts, n, before, early)):
                if all(counts[m][1] == k.blocks for m, k in enumerate(rank) if k.call and k.call == kernel.after):
                    moved = True
                    yield _with(state, r, n, (begun + 1, ended))
            if ended < begun and over and (not kernel.call or ended < theirs[kernel.call]):
                moved = True
                yield _with(state, r, n, (begun, ended + 1))
    ends = (ended for counts in state for _, ended in counts)
    if not moved and any(end < kernel.blocks for end, kernel in zip(ends, (*ranks[0], *ranks[1]), strict=True)):
        yield STUCK


def _may_begin(rank: Rank, counts: Counts, n: int, before: int | None, early: bool) -> bool:
    """True if dependent launch `n` may begin while the previous kernel runs."""
    if before is None or not rank[n].dependent or not rank[before].signals:
        return False
    return counts[before][0] >= (1 if early else rank[before].blocks)


def _with(state: State, r: int, n: int, counts: tuple[int, int]) -> State:
    mine = (*state[r][:n], counts, *state[r][n + 1 :])
    return (mine, state[1]) if r == 0 else (state[0], mine)


def cases() -> Iterator[tuple[str, str, Callable[[str], tuple[str, int]]]]:
    """Names, expected verdicts, and explorations, for `every_order.compare`. A group may have 2 blocks."""

    def case(name: str, want: str, *ranks: Rank, room: int = 4, early: bool = False):  # type: ignore[no-untyped-def]
        return f"room: {name}", want, partial(explore, (ranks[0], ranks[-1]), room, early)

    def calls(group: str, stream: int, blocks: int = 1, signals: bool = True, count: int = 3) -> Rank:
        return tuple(Kernel(f"{group}{n}", blocks, stream, signals, signals) for n in range(count))

    def filling(room: int, stream: int, dependent: bool = True) -> Rank:
        return (Kernel("", room, stream, dependent, False),)

    long = Kernel("A9", 2, 0, False, False)
    yield case("one group, a library's dependent launch after it", SAFE, calls("A", 0, 2, count=1) + filling(4, 0))
    yield case("the same; signalled by the first block", STUCK, calls("A", 0, 2, count=1) + filling(4, 0), early=True)
    yield case("one group on two streams", SAFE, calls("A", 0) + filling(4, 0) + (Kernel("A3", 2, 1, after="A2"),))
    crossed = Kernel("A0", 1, 0), Kernel("B0", 1, 1), Kernel("B1", 1, 0, after="B0"), Kernel("A1", 1, 1, after="A0")
    yield case("two groups, each on both streams", SAFE, (*crossed, *filling(4, 0)))
    yield case("two groups on one stream", SAFE, calls("A", 0) + filling(4, 0) + calls("B", 0) + filling(4, 0))
    a, b = calls("A", 0), calls("B", 1)
    yield case("two groups on two streams", SAFE, a + b)
    yield case("two groups on two streams, with long calls between", SAFE, (*a[:2], long, a[2], *b))
    a, b = calls("A", 0, 2), calls("B", 1, 2)
    yield case("two groups on two streams; dependent launches with all blocks of a group", STUCK, a + b)
    for blocks, dependent, want in ((1, False, SAFE), (1, True, STUCK)):
        a, b = calls("A", 0, blocks, count=1), calls("B", 1, blocks, count=1)
        both = a + filling(4, 0, dependent) + b + filling(4, 1, dependent)
        kind = "dependent launch" if dependent else "kernel"
        yield case(f"two groups on two streams, a library's {kind} that fills the GPU after each", want, both)
    a = calls("A", 0, signals=False, count=1)
    both = a + filling(4, 0) + calls("B", 1, count=1) + filling(4, 1)
    yield case("the same; one of the groups has no dependent launches", SAFE, both)
