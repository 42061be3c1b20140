"""The messages of `tricomm check`: from each rank to the next one, with payload that looks like words with flags."""

from __future__ import annotations

from typing import Any

import torch

from tricomm.explorer.call_inputs import numbers
from tricomm.explorer.world.oracle import difference
from tricomm.kernels import layout

_LOWER = (1 << 32) - 1
_OTHER = {"ll": "simple", "simple": "ll"}


class MessageCalls:
    """The messages of one rank.

    All pairs of ranks have the same messages, so one count of the pieces of each queue holds for both ends. It tells
    which numbers the next pieces in a slot will have. Plain payload carries the next one, in the second half of the
    slot the one after that, where LL words have their flags: an `ll` receiver takes a tile of them for those pieces.
    """

    def __init__(self, comm: Any) -> None:
        self._comm, self._plan = comm, comm._internal.group.layout
        self._next = [max(comm.options._tuning.first_epoch, layout.SLOTS)] * self._plan.queues

    def hand_on(self, protocol: str, number: int, size: int) -> torch.Tensor | None:
        """Two messages from each rank to the next one: a short one, and then `size` words, which are received first.
        Returns the received words; None on rank 0.

        The short one is a word. In every other call it uses the other protocol, which leaves words of another kind in
        its slots; if they are plain, it fills them. Only acknowledgements are sent back, so the first rank runs ahead
        until it has to wait for one. The second message fits into the slots that the first one leaves, because the
        receiver would refuse a longer one. The short one of the third call is received from any rank.
        """
        comm, plan = self._comm, self._plan
        protocols = (_OTHER[protocol] if number % 2 else protocol, protocol)
        short = plan.queues * plan.slot_words("simple") if protocols[0] == "simple" and number % 2 else 1
        sizes = (short, min(size, (layout.SLOTS - 1) * plan.queues * plan.slot_words(protocol)))
        flags = [self._flags(*each) for each in zip((0, 1), sizes, protocols, strict=True)]

        def payload(tag: int, sender: int) -> torch.Tensor:
            words = numbers(number, sender, sizes[tag]) + tag
            return words + flags[tag] if protocols[tag] == "simple" else words

        results: list[torch.Tensor] = []
        for tag in (1, 0) if comm.rank else ():
            got, want = torch.full((sizes[tag],), -1, dtype=torch.int64), payload(tag, comm.rank - 1)
            source = None if (number, tag) == (2, 0) else comm.rank - 1
            comm.recv(got, source, tag, protocol=protocols[tag])
            if not torch.equal(got, want):  # the oracle sees no messages
                raise AssertionError(f"message {tag} of call {number} is wrong; {difference(want, got)}")
            results.append(got & _LOWER)  # the flags depend on where the numbers of a schedule begin
        for tag in (0, 1) if comm.rank < comm.world_size - 1 else ():
            comm.send(payload(tag, comm.rank), comm.rank + 1, tag, protocol=protocols[tag])
        return torch.cat(results) if results else None

    def _flags(self, tag: int, count: int, protocol: str) -> torch.Tensor:
        """For each word of a message of `count`, in its upper half, the number of a later piece in its slot. Counts the
        message's pieces, which are those of `device/message_queues.py`."""
        queues, room = self._plan.queues, self._plan.slot_words(protocol)
        block = self._comm.explain("send", 8 * count, torch.int64, protocol=protocol).block
        length = min(room, -(-count // queues // block) * block)
        words = torch.empty(count, dtype=torch.int64)
        for piece, first in enumerate(range(0, count, length)):
            queue = (piece + tag) % queues
            places = words[first : first + length]
            for turn, half in enumerate((places[: room // 2], places[room // 2 :]), 1):
                half.fill_(layout.upper_half(layout.piece_number(self._next[queue] + turn * layout.SLOTS)))
            self._next[queue] = layout.piece_number(self._next[queue] + 1)
        return words
