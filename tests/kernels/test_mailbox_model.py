"""Every interleaving of the mailbox rules, for what the kernels do beyond a plain exchange: two phases, and clearing.

A slot is (rank, parity, source, word) and holds the epoch that last wrote it. A rank runs its operations in order:
`push` overwrites a peer's slot, `poll` goes on only at exactly the epoch waited for, `clear` zeroes an own slot. A
word that is overwritten or cleared before it was polled can never be polled again: a lost word is a state in which
nobody can move. `read` does not wait: plain data behind a barrier, lost if the slot has another epoch. Each rule is
also taken away, and then the model must lose a word.
"""

from __future__ import annotations

import pytest

Op = tuple[str, int, int, str, int]  # kind, other rank, parity, word, epoch


def loses_a_word(ranks: list[list[Op]], limit: int = 1_000_000) -> bool:
    """True where some interleaving ends with a rank that waits for ever, or reads another word than it means."""
    start = ((0,) * len(ranks), frozenset())
    seen, stack = {start}, [start]
    while stack:
        places, memory = stack.pop()
        slots, moved = dict(memory), False
        for rank, place in enumerate(places):
            if place == len(ranks[rank]):
                continue
            kind, other, parity, word, epoch = ranks[rank][place]
            if kind == "read" and slots.get((rank, parity, other, word), 0) != epoch:
                return True
            if kind == "poll" and slots.get((rank, parity, other, word), 0) != epoch:
                continue
            after = memory
            if kind == "push":
                after = frozenset({**slots, (other, parity, rank, word): epoch}.items())
            elif kind == "clear":
                after = frozenset((k, v) for k, v in slots.items() if k[0] != rank or k[1] != parity)
            moved = True
            state = (tuple(p + (r == rank) for r, p in enumerate(places)), after)
            if state not in seen:
                seen.add(state)
                stack.append(state)
        if not moved and any(place < len(ops) for place, ops in zip(places, ranks, strict=True)):
            return True
        if len(seen) > limit:
            raise RuntimeError(f"more than {limit} states")
    return False


def others(rank: int, world_size: int) -> list[int]:
    return [r for r in range(world_size) if r != rank]


def one_shot(rank: int, world_size: int, epoch: int, header: bool = True, words: tuple[str, ...] = ("a",)) -> list[Op]:
    parity, peers = epoch & 1, others(rank, world_size)
    ops: list[Op] = [("push", p, parity, "header", epoch) for p in peers if header]
    ops += [("push", p, parity, w, epoch) for p in peers for w in words]
    ops += [("poll", p, parity, "header", epoch) for p in peers if header]
    return ops + [("poll", p, parity, w, epoch) for w in words for p in peers]


def two_shot(rank: int, world_size: int, epoch: int, header: bool = True, halves: bool = True) -> list[Op]:
    """Reduce-scatter word, then all-gather word; the second goes out only after the first has come from everybody."""
    ops = one_shot(rank, world_size, epoch, header, ("first",))
    parity, second, value = epoch & 1, "second" if halves else "first", epoch if halves else -epoch
    ops += [("push", p, parity, second, value) for p in others(rank, world_size)]
    return ops + [("poll", p, parity, second, value) for p in others(rank, world_size)]


def uneven(rank: int, epoch: int, header: bool) -> list[Op]:
    """Rank 0 has words, rank 1 has none: a shard of a short message."""
    parity, ops = epoch & 1, []
    if header:
        ops += [("push", 1 - rank, parity, "header", epoch), ("poll", 1 - rank, parity, "header", epoch)]
    ops += [("push", 1, parity, "a", epoch)] if rank == 0 else [("poll", 0, parity, "a", epoch)]
    return ops


def clearing(rank: int, epoch: int, before_header: bool) -> list[Op]:
    """Two ranks, headers alone (blocks without words); epoch 1 clears the idle mailbox before its header, or after."""
    ops = one_shot(rank, 2, epoch, words=())
    if epoch == 1:
        ops.insert(0 if before_header else 1, ("clear", rank, (epoch & 1) ^ 1, "", 0))
    return ops


def calls(world_size: int, *epochs: object) -> list[list[Op]]:
    return [[op for make in epochs for op in make(rank)] for rank in range(world_size)]  # type: ignore[operator]


def test_two_shots_in_a_row_lose_nothing():
    assert not loses_a_word(calls(2, *(lambda r, e=e: two_shot(r, 2, e) for e in (1, 2, 3, 4))))


def test_two_shots_of_three_ranks_lose_nothing():
    assert not loses_a_word(calls(3, *(lambda r, e=e: two_shot(r, 3, e) for e in (1, 2))))


def test_one_shot_and_two_shot_in_turn_lose_nothing():
    turn = (one_shot, two_shot, one_shot, two_shot)
    assert not loses_a_word(calls(2, *(lambda r, e=e, f=f: f(r, 2, e) for e, f in enumerate(turn, 1))))


@pytest.mark.parametrize(("header", "lost"), [(True, False), (False, True)])
def test_headers_protect_a_rank_that_has_nothing_to_poll(header, lost):
    assert loses_a_word(calls(2, *(lambda r, e=e: uneven(r, e, header) for e in (1, 2, 3)))) is lost


def test_the_phases_need_a_half_each():
    assert loses_a_word(calls(3, lambda r: two_shot(r, 3, 1, halves=False)))


@pytest.mark.parametrize(("before", "lost"), [(True, False), (False, True)])
def test_the_idle_mailbox_is_cleared_before_the_header(before, lost):
    assert loses_a_word(calls(2, *(lambda r, e=e: clearing(r, e, before) for e in (1, 2, 3)))) is lost


def meet(rank: int, world_size: int, epoch: int, phase: int = 0) -> list[Op]:
    """A barrier: a header to every peer, and one from each."""
    at = [("push", p, epoch & 1, f"header {phase}", epoch) for p in others(rank, world_size)]
    return [*at, *(("poll", *op[1:]) for op in at)]


def moved(kind: str, rank: int, world_size: int, epoch: int, word: str) -> list[Op]:
    return [(kind, p, epoch & 1, word, epoch) for p in others(rank, world_size)]


def one_hop(rank: int, world_size: int, epoch: int, chunks: int = 3, without: str = "") -> list[Op]:
    """`run_pushed` under `simple`: both halves of a buffer are one."""
    ops: list[Op] = []
    for n in range(chunks + 1):
        push = [op for w in ("first", "second") if n < chunks for op in moved("push", rank, world_size, epoch + n, w)]
        take = [op for w in ("first", "second") if n for op in moved("read", rank, world_size, epoch + n - 1, w)]
        barrier = meet(rank, world_size, epoch + n) if n < chunks and (without != "barrier" or n == 0) else []
        ops += push + barrier + take if without == "order" else push + take + barrier
    return ops


def two_hops(rank: int, world_size: int, epoch: int, chunks: int = 3, without: str = "") -> list[Op]:
    """`run_two_hops`: shards in first halves, results in second ones."""
    ops: list[Op] = []
    for n in range(chunks + 2):
        pass_on = [*moved("read", rank, world_size, epoch + n - 1, "first"),
                   *moved("push", rank, world_size, epoch + n - 1, "second")] if 0 < n <= chunks else []  # fmt: skip
        push = moved("push", rank, world_size, epoch + n, "first") if n < chunks else []
        take = moved("read", rank, world_size, epoch + n - 2, "second") if n > 1 else []
        barrier = meet(rank, world_size, epoch + n) if n < chunks and (without != "barrier" or n == 0) else []
        if n == chunks and without != "last barrier":
            barrier = meet(rank, world_size, epoch + n - 1, int(without != "phase"))
        ops += pass_on + push + (barrier + take if without == "order" else take + barrier)
    return ops


@pytest.mark.parametrize("first", [one_hop, two_hops])
@pytest.mark.parametrize("second", [one_hop, two_hops])
def test_overlapping_chunks_of_kernels_in_turn_lose_nothing(first, second):
    turn = ((first, 1, 3), (second, 4, 2), (first, 6, 1), (second, 7, 1))
    assert not loses_a_word(calls(2, *(lambda r, f=f, e=e, c=c: f(r, 2, e, c) for f, e, c in turn)))


def test_overlapping_chunks_of_three_ranks_lose_nothing():
    assert not loses_a_word(calls(3, lambda r: two_hops(r, 3, 1, 2)))


@pytest.mark.parametrize("without", ["barrier", "order", "last barrier", "phase"])
def test_overlapping_chunks_need_each_barrier_and_their_order(without):
    assert loses_a_word(calls(2, lambda r: two_hops(r, 2, 1, 4, without)))
    assert loses_a_word(calls(2, lambda r: one_hop(r, 2, 1, 4, without))) is (without in ("barrier", "order"))


def messages(rank: int, slots: int, taken: tuple[int, ...], acked: bool = True) -> list[Op]:
    """Pieces 0, 1, ... from rank 0 to rank 1, which takes them in the order `taken`; an ack alone frees a slot."""
    if rank == 1:
        polls = [(("poll", 0, n % slots, "piece", n + 1), ("push", 0, n % slots, "ack", n + 1)) for n in taken]
        return [op for pair in polls for op in pair]
    ops: list[Op] = []
    for n in range(len(taken)):
        if acked and n >= slots:
            ops.append(("poll", 1, n % slots, "ack", n - slots + 1))
        ops.append(("push", 1, n % slots, "piece", n + 1))
    return ops


@pytest.mark.parametrize("taken", [(0, 1, 2, 3, 4, 5), (1, 0, 2, 3, 5, 4), (1, 0, 3, 2, 5, 4)])
@pytest.mark.parametrize("acked", [True, False])
def test_acknowledged_slots_lose_nothing_in_any_order_that_leaves_room(taken, acked):
    assert loses_a_word([messages(rank, 2, taken, acked) for rank in range(2)]) is not acked


def test_a_piece_behind_more_than_the_slots_cannot_be_taken_first():
    """Which is why a message whose tag nobody asks for ends the call once it fills the slots."""
    assert loses_a_word([messages(rank, 2, (2, 0, 1)) for rank in range(2)])


def test_both_ways_at_once_lose_nothing():
    ahead, back = messages(0, 2, (0, 1, 2)), messages(1, 2, (0, 1, 2))
    there = [[*ahead, *((k, 1, s, f"back {w}", e) for k, _, s, w, e in back)],
             [*((k, 0, s, f"back {w}", e) for k, _, s, w, e in ahead), *back]]  # fmt: skip
    assert loses_a_word(there)  # both send more than fits before they receive
    assert not loses_a_word([there[0], [*back, *((k, 0, s, f"back {w}", e) for k, _, s, w, e in ahead)]])
