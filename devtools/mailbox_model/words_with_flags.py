"""Words that contain flags (protocols `ll` and `ll128`). Each word is polled. There are `n` ranks.

A word is the unit of one access, 32 or 96 bits of payload and a flag. The model ignores its width and relies only on
its atomicity. The two widths have separate mailboxes and share the headers, so their calls may take turns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from devtools.mailbox_model.explore import (
    LOSES,
    SAFE,
    Case,
    Launch,
    Op,
    Ranks,
    barrier,
    calls,
    others,
    poll,
    push,
    together,
)

Words = list[list[str]]  # of each chunk and block; a letter is a word
A: Words = [["a"]]


def exchange(rank: int, n: int, epoch: int, chunks: Words = A, header: bool = True, root: int | None = None) -> Launch:
    """In chunk c each block pushes its words and its header, then polls its peers' words and headers.

    `chunks[c][b]` are the words of block b. With a `root`, no other rank has words; headers go both ways.
    """
    blocks: Launch = [[] for _ in chunks[0]]
    for b, ops in enumerate(blocks):
        for e, chunk in enumerate(chunks, epoch):
            words = {p: [*chunk[b]] * (root in (None, p)) + [f"h0{b}"] * header for p in range(n)}
            ops += push(rank, others(rank, n), e, words[rank])
            ops += [op for p in others(rank, n) for op in poll(rank, [p], e, words[p])]
    return blocks


def merged(rank: int, n: int, epoch: int, chunks: Words = A, header: bool = True, blank: bool = True) -> Launch:
    """As `exchange`, but the header is first, and each word has one poll. The first poll also waits for all headers.

    A block without words polls only headers, unless `blank` is False.
    """
    blocks: Launch = [[] for _ in chunks[0]]
    for b, ops in enumerate(blocks):
        for e, chunk in enumerate(chunks, epoch):
            head = [f"h0{b}"] * header
            ops += push(rank, others(rank, n), e, [*head, *chunk[b]])
            rounds = [[w] for w in chunk[b]] or [[]] * blank
            for number, words in enumerate(rounds):
                ops += together(rank, others(rank, n), e, words + head * (number == 0))
    return blocks


def header_first(rank: int, n: int, epoch: int) -> Launch:
    """As `exchange` of one word, but the header is first, and all headers are polled before any word."""
    return [[op for f in (push, poll) for w in ("h00", "a") for op in f(rank, others(rank, n), epoch, [w])]]


def two_hops(rank: int, n: int, epoch: int, halves: bool = True) -> Launch:
    """A reduce-scatter word, and then an all-gather word, which is pushed only after the first has arrived from all
    peers."""
    value, word = (epoch, "A") if halves else (-epoch, "a")
    second = push(rank, others(rank, n), epoch, word, value) + poll(rank, others(rank, n), epoch, word, value)
    return [header_first(rank, n, epoch)[0] + second]


def two_hops_merged(rank: int, n: int, epoch: int) -> Launch:
    """One poll for the first hop's words and headers, results, one poll for all of the second hop's words."""
    peers = others(rank, n)
    first = push(rank, peers, epoch, ["h00", "a"]) + together(rank, peers, epoch, ["h00", "a"])
    return [first + push(rank, peers, epoch, "A") + together(rank, peers, epoch, "A")]


def cube(rank: int, n: int, epoch: int) -> Launch:
    """Cube mesh: quads {0, 1} and {2, 3}, relay i <-> i ^ 2; two phases in one launch, words and headers in both."""
    return [[op for p in (rank ^ 1, rank ^ 2) for f in (push, poll) for op in f(rank, [p], epoch, ["a", "h00"])]]


def pushed_ahead(rank: int, n: int, epoch: int, chunks: int) -> Launch:
    """Chunk c + 1 is pushed before chunk c is polled."""
    peers = others(rank, n)
    ops = push(rank, peers, epoch, "a")
    for e in range(epoch, epoch + chunks):
        ops += push(rank, peers, e + 1, "a") * (e + 1 < epoch + chunks) + poll(rank, peers, e, "a")
    return [ops]


def uneven(rank: int, n: int, epoch: int, header: bool) -> Launch:
    """Rank 0 has words, rank 1 has none: a shard of a short message."""
    words = poll(rank, [0], epoch, "a") if rank else push(rank, [1], epoch, "a")
    return [barrier(rank, others(rank, n), epoch) * header + words]


def clearing(rank: int, n: int, epoch: int, before: bool) -> Launch:
    """Headers alone (blocks without words); the first epoch clears the idle mailbox `before` its header, or after."""
    ops = barrier(rank, others(rank, n), epoch)
    idle = tuple((rank, (epoch + 1) % 2, p, "h00") for p in others(rank, n))
    ops[1 - before : 1 - before] = [Op("write", idle, 0)] * (epoch == 1)
    return [ops]


def cases() -> Iterator[Case]:
    none, narrow, wide = [[""]], [["ab"]], [["a", "b"]]
    partial_chunk = [["a", "b"], ["a", "b"], ["a", ""]]

    def then_narrow(f: Callable[..., Launch], header: bool = True, **more: bool) -> Ranks:
        first, last = partial(f, chunks=partial_chunk, header=header, **more), partial(f, chunks=narrow, header=header)
        return [[first(rank, 2, 1), last(rank, 2, 4)] for rank in range(2)]

    for header, want in ((True, SAFE), (False, LOSES)):
        rule = "" if header else "; no headers"
        for f in (exchange, merged):
            yield Case(f"{f.__name__}: last chunk partial, then another grid{rule}", want, then_narrow(f, header))
        empty = [partial(exchange, chunks=words, header=header) for words in (A, none, A)]
        yield Case(f"uneven splits with an empty one between{rule}", want, calls(2, *empty))
        yield Case(f"one rank has nothing to poll{rule}", want, calls(2, *[partial(uneven, header=header)] * 3))
        root = partial(exchange, header=header, root=0)
        yield Case(f"three broadcasts from one root, 3 ranks{rule}", want, calls(3, root, root, root))
    yield Case("merged: no poll in a block without words", LOSES, then_narrow(merged, blank=False))
    grids = [partial(exchange, chunks=words) for words in (wide, narrow, wide, narrow)]
    yield Case("grid changes in every call", SAFE, calls(2, *grids))
    roots = [partial(exchange, root=root) for root in (1, 2, 0)]
    yield Case("broadcasts from changing roots, 3 ranks", SAFE, calls(3, *roots))
    yield Case("merged, 3 ranks", SAFE, calls(3, merged, merged, merged))
    turn = [
        partial(f, chunks=words) for f, words in zip((merged, exchange) * 2, (narrow, wide, wide, narrow), strict=True)
    ]
    yield Case("merged and exchange in turn, grids that change", SAFE, calls(2, *turn))
    yield Case("cube mesh three times, 4 ranks", SAFE, calls(4, cube, cube, cube))
    widths = [partial(merged, chunks=[[word]]) for word in ("n", "w", "w", "n", "n")]  # each width has its own slot
    yield Case("words of two widths in turn, in mailboxes of their own", SAFE, calls(2, *widths))
    headers = partial(exchange, chunks=none)
    yield Case("cube mesh and headers alone in turn, 4 ranks", SAFE, calls(4, cube, headers, cube, headers))
    yield Case("two hops four times", SAFE, calls(2, *[two_hops] * 4))
    yield Case("two hops twice, 3 ranks", SAFE, calls(3, two_hops, two_hops))
    yield Case("one hop and two hops in turn", SAFE, calls(2, header_first, two_hops, header_first, two_hops))
    yield Case("two hops; one half for both", LOSES, calls(3, partial(two_hops, halves=False)))
    yield Case("two hops merged, 3 ranks", SAFE, calls(3, two_hops_merged, two_hops_merged))
    one_hop = [partial(merged, chunks=words) for words in (narrow, wide)]
    in_turn = calls(2, two_hops_merged, one_hop[0], two_hops_merged, one_hop[1])
    yield Case("two hops and one hop in turn, merged", SAFE, in_turn)
    for before, want in ((True, SAFE), (False, LOSES)):
        name = f"the idle mailbox is cleared {'before' if before else 'after'} the header"
        yield Case(name, want, calls(2, *[partial(clearing, before=before)] * 3))
    yield Case("pushed ahead of the poll", LOSES, calls(2, partial(pushed_ahead, chunks=4)))
