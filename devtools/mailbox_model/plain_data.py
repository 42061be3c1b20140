"""Plain data between barriers, with overlapping chunks (protocol simple).

A mailbox has four tiles: "0" and "1" are its first half, "2" and "3" its second one. In a grid of two, block b has the
tiles b and b + 2. In a grid of one, the block has all tiles.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from devtools.mailbox_model.explore import SAFE, WRONG, Case, Launch, Ranks, barrier, calls, fetch, others, push, read
from devtools.mailbox_model.words_with_flags import exchange


def tiles(half: str, grid: int, block: int, last: int = 4) -> str:
    return "".join(w for w in half if int(w) % grid == block and int(w) < last)


def one_shot(rank: int, n: int, epoch: int, chunks: int, grid: int = 1, broken: str = "", last: int = 4) -> Launch:
    """push(0), barrier(0); for c: push(c + 1), take(c), barrier(c + 1). `last`: tiles of the last chunk."""
    peers, blocks, mailboxes = others(rank, n), [], 1 if broken == "one mailbox" else 2
    ahead = broken == "pushed before the barrier"
    for b in range(grid):
        own = [tiles("0123", grid, b)] * (chunks - 1) + [tiles("0123", grid, b, last)]
        pushed = [push(rank, peers, e, words, mailboxes=mailboxes) for e, words in enumerate(own, epoch)] + [[], []]
        ops = pushed[0] + pushed[1] * ahead + barrier(rank, peers, epoch, b) * (broken != "no first barrier")
        for c, words in enumerate(own):
            met = barrier(rank, peers, epoch + c + 1, b) * (c + 1 < chunks and broken != "no barrier")
            taken = read(rank, peers, epoch + c, words, mailboxes=mailboxes)
            ops += pushed[c + 1 + ahead] + (met + taken if broken == "taken after the barrier" else taken + met)
        blocks.append(ops)
    return blocks


def two_shot(rank: int, n: int, epoch: int, chunks: int, grid: int = 1, broken: str = "", last: int = 2) -> Launch:
    """push inputs(0), barrier(0); for k: reduce(k), push results(k), push inputs(k + 1), copy results(k - 1),
    barrier(k + 1), the last one in phase 1 of the last epoch; copy results(C - 1). `last`: tiles of the last shard."""
    peers, blocks, mailboxes = others(rank, n), [], 1 if broken == "one mailbox" else 2
    half, sign = ("01", -1) if broken == "one half" else ("23", 1)
    ahead = broken == "pushed before the barrier"
    for b in range(grid):
        inputs = [tiles("01", grid, b)] * (chunks - 1) + [tiles("01", grid, b, last)]
        results = [tiles(half, grid, b)] * (chunks - 1) + [tiles(half, grid, b, last + int(half[0]))]
        pushed = [push(rank, peers, e, words, mailboxes=mailboxes) for e, words in enumerate(inputs, epoch)] + [[], []]
        copied = [read(rank, peers, e, words, sign * e, mailboxes) for e, words in enumerate(results, epoch)]
        ops = pushed[0] + pushed[1] * ahead + barrier(rank, peers, epoch, b)
        for k, e in enumerate(range(epoch, epoch + chunks)):
            ops += read(rank, peers, e, inputs[k], mailboxes=mailboxes) + push(
                rank, peers, e, results[k], sign * e, mailboxes
            )
            if k + 1 < chunks:
                met = barrier(rank, peers, e + 1, b) * (broken != "no barrier")
            else:
                met = barrier(rank, peers, e, b, int(broken != "one header")) * (broken != "no last barrier")
            taken = copied[k - 1] if k else []
            ops += pushed[k + 1 + ahead] + (met + taken if broken == "copied after the barrier" else taken + met)
        blocks.append(ops + copied[-1])
    return blocks


def staged(rank: int, n: int, epoch: int, chunks: int, grid: int = 1, broken: str = "") -> Launch:
    """stage(0), barrier(0); for c: stage(c + 1), fetch(c) from every peer, barrier(c + 1)."""
    peers, blocks = others(rank, n), []
    for b in range(grid):
        own = tiles("0123", grid, b)
        ops = push(rank, [rank], epoch, own) + barrier(rank, peers, epoch, b)
        for e in range(epoch, epoch + chunks):
            more = e + 1 < epoch + chunks
            met = barrier(rank, peers, e + 1, b) * (more and broken != "no barrier")
            taken = fetch(peers, e, own)
            ops += push(rank, [rank], e + 1, own) * more
            ops += met + taken if broken == "fetched after the barrier" else taken + met
        blocks.append(ops)
    return blocks


def in_chunks(n: int, *turn: tuple[Callable[..., Launch], int, int]) -> Ranks:
    """One launch of each kernel, number of chunks (an epoch each) and grid."""
    first = [1 + sum(chunks for _, chunks, _ in turn[:k]) for k in range(len(turn))]
    return [
        [f(rank, n, e, chunks, grid) for e, (f, chunks, grid) in zip(first, turn, strict=True)] for rank in range(n)
    ]


def cases() -> Iterator[Case]:
    """Each kernel alone, with its rules dropped, and in turn with others and other grids."""
    pushed = ("no barrier", "pushed before the barrier", "one mailbox")
    kernels: dict[Callable[..., Launch], tuple[str, ...]] = {
        one_shot: (*pushed, "no first barrier", "taken after the barrier"),
        two_shot: (*pushed, "copied after the barrier", "one half", "no last barrier", "one header"),
        staged: ("no barrier", "fetched after the barrier"),
    }
    for f, without in kernels.items():
        for times, chunks in ((1, 4), (2, 3), (3, 1)):
            yield Case(f"{f.__name__}, {times} x {chunks} chunks", SAFE, in_chunks(2, *[(f, chunks, 1)] * times))
        for broken in without:
            yield Case(f"{f.__name__}; {broken}", WRONG, calls(2, partial(f, chunks=4, broken=broken)))
        between = [[f(r, 2, 1, 2), exchange(r, 2, 3, [["l"]]), f(r, 2, 4, 2)] for r in range(2)]
        yield Case(f"{f.__name__}, exchange, {f.__name__}", SAFE, between)
        for g in kernels:
            for grids in ((1, 2), (2, 1)):
                turn = ((f, 2, grids[0]), (g, 1, grids[1]), (f, 1, grids[0]))
                yield Case(f"{f.__name__}, {g.__name__}, {f.__name__}; grids {grids}", SAFE, in_chunks(2, *turn))
            four = ((f, 3, 1), (g, 2, 1), (f, 1, 1), (g, 1, 1))
            yield Case(f"{f.__name__} and {g.__name__} in turn", SAFE, in_chunks(2, *four))
    for f in (one_shot, two_shot):
        ranks = [[f(rank, 2, e, 3, last=1) for e in (1, 4)] for rank in range(2)]
        yield Case(f"{f.__name__}, blocks without words in the last chunk", SAFE, ranks)
    yield Case("two_shot, 3 ranks", SAFE, calls(3, partial(two_shot, chunks=2)))
