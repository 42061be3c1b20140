"""Messages through two slots between two ranks (send and receive): only an ack frees a slot."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from devtools.mailbox_model.explore import LOSES, SAFE, Block, Case, poll, push


def send_pieces(rank: int, count: int, acked: bool = True) -> Block:
    """Pieces 0, 1, ... to the peer."""
    ops: Block = []
    for k in range(count):
        ops += poll(rank, [1 - rank], k, ["ack"], k - 1) * (acked and k > 1)
        ops += push(rank, [1 - rank], k, ["piece"], k + 1)
    return ops


def take_pieces(rank: int, order: Iterable[int]) -> Block:
    ops: Block = []
    for k in order:
        ops += poll(rank, [1 - rank], k, ["piece"], k + 1) + push(rank, [1 - rank], k, ["ack"], k + 1)
    return ops


def cases() -> Iterator[Case]:
    for order in ((0, 1, 2, 3, 4, 5), (1, 0, 2, 3, 5, 4), (1, 0, 3, 2, 5, 4)):
        for acked, want in ((True, SAFE), (False, LOSES)):
            ranks = [[[send_pieces(0, 6, acked)]], [[take_pieces(1, order)]]]
            yield Case(f"pieces taken as {order}{'' if acked else '; no acks'}", want, ranks)
    ranks = [[[send_pieces(0, 3)]], [[take_pieces(1, (2, 0, 1))]]]
    yield Case("a piece behind more than the slots taken first", LOSES, ranks)
    there, back = ([send_pieces(rank, 3), take_pieces(rank, range(3))] for rank in range(2))
    yield Case("both send more than the slots, then take", LOSES, [[[sum(there, [])]], [[sum(back, [])]]])
    yield Case("both ways, one sends first", SAFE, [[[sum(there, [])]], [[sum(back[::-1], [])]]])
