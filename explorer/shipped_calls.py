"""Makes the calls of `tricomm check` for the shipped kernels, and checks results that the oracle does not check."""

from __future__ import annotations

from typing import Any

import torch

from tricomm.communicator import Communicator
from tricomm.core.fused import fused_call, unfused
from tricomm.core.fused.expert_rows import ExpertRows
from tricomm.core.fused.fused_call import FUSED, FusedArguments
from tricomm.explorer.world.oracle import difference
from tricomm.kernels import layout
from tricomm.kernels.collectives.registry import Kernel

_QUANTIZED = {
    ("one_shot", "ll"): "nvfp4",
    ("two_shot", "ll"): "fp8_per_token",
    ("one_shot", "ll128"): "fp8",
    ("two_shot", "ll128"): None,
}
_CODES_A_WORD = 8
_LOWER = (1 << 32) - 1
_OTHER = {"ll": "simple", "simple": "ll"}


def numbers(number: int, rank: int, count: int) -> torch.Tensor:
    """`count` 64-bit integers that differ in every element, rank and call. `number` is the number of the call."""
    first = rank * 1000 + number * 100_000
    return torch.arange(first, first + 7 * count, 7, dtype=torch.int64)  # a single operation of the stream


def cancelling(number: int, rank: int) -> float:
    """Numbers that are large and cancel on the first two ranks. In rank order they cancel first, so a sum in fp32 is
    exact. In most other orders they absorb the other numbers."""
    return (number + 1) * ((2.0**30, -(2.0**30))[rank] if rank < 2 else 1.0)


class ShippedCalls:
    """The calls of one rank. All calls of one length use the same handle, so that a late read by one call would get the
    input of the next call."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self._messages = MessageCalls(comm)
        self._handles: dict[tuple[int, torch.dtype], Any] = {}

    def make(self, kernel: Kernel, number: int, size: float) -> torch.Tensor | None:
        """Make call number `number`, of `size` words. Returns its result, if any, in memory that no later call
        changes."""
        comm = self._comm
        if kernel.collective == "barrier":
            comm.barrier()
            return None
        if kernel.pairwise:
            return self._messages.hand_on(kernel.protocol, number, int(size))
        if kernel.collective == FUSED:
            return self._normalised(kernel, number)
        kind, shards = kernel.kind, 1 if kernel.shards is None else kernel.shards or comm.world_size
        count = max(int(size), 1) * shards * (_CODES_A_WORD if kernel.wire else 1)
        if size < 1:
            x = torch.full((count * kind.rows_in(comm.world_size),), cancelling(number, comm.rank))
        else:
            x = numbers(number, comm.rank, count * kind.rows_in(comm.world_size))
            if kernel.wire:  # few bits of each number remain, so neighbours must differ in the highest bits
                x = (x * 40503 % 65521 - 32760).float()
        how: dict[str, Any] = {"algorithm": kernel.algorithm, "protocol": kernel.protocol}
        if kind.root:
            how[kind.root] = number % comm.world_size
        if kernel.collective == "all_to_all_v":
            return self._uneven(x, count, number, how)
        into_x = kernel.in_place or kernel.collective in ("broadcast", "reduce")
        if not into_x and (kind.root != "dst" or how["dst"] == comm.rank):
            how["out"] = torch.full((count * kind.rows_out(comm.world_size),), -1, dtype=x.dtype)
        if not kernel.zero_copy:
            result: torch.Tensor | None = getattr(comm, kernel.collective)(x, **how)
            return result
        handle = self._handle(x)
        getattr(comm, kernel.collective)(handle, **how)
        result = handle.local.clone() if kernel.in_place else how["out"]
        return result

    def _handle(self, x: torch.Tensor) -> Any:
        """A handle of symmetric memory that contains `x`."""
        key = (len(x), x.dtype)
        if key not in self._handles:
            self._handles[key] = self._comm.symmetric((len(x),), x.dtype)
        self._handles[key].local.copy_(x)
        return self._handles[key]

    def _uneven(self, x: torch.Tensor, count: int, number: int, how: dict[str, Any]) -> torch.Tensor:
        """A call with rows of 0 to `count` elements. Their lengths depend on the sender, the receiver and the call."""
        comm = self._comm
        ranks, me = range(comm.world_size), comm.rank
        length = [[(count * (a + 2 * b + number)) % (count + 1) for b in ranks] for a in ranks]
        into, out = length[me], [length[r][me] for r in ranks]
        y = torch.full((sum(out),), -1, dtype=torch.int64)
        comm.all_to_all_v(x[: sum(into)], into, out, y, **how)
        firsts = [sum(row[:me]) for row in length]
        want = torch.cat([numbers(number, r, len(x))[firsts[r] :][: out[r]] for r in ranks])
        if not torch.equal(y, want):  # the oracle does not check uneven calls
            raise AssertionError(f"call {number} of all_to_all_v is wrong; {difference(want, y)}")
        return y

    def _normalised(self, kernel: Kernel, number: int) -> torch.Tensor:
        """Calls of the all-reduce fused with RMSNorm. Each kernel uses another quantisation, and the result is compared
        with the unfused steps. In the second of three calls the rows are sums of experts' rows; in the third one the
        numbers show the order of addition."""
        comm = self._comm
        rows, hidden = (5, 1, 2)[number % 3], 160
        quantize = _QUANTIZED[kernel.algorithm, kernel.protocol]
        given = {"quantize": quantize, "scale": None if quantize in (None, "fp8_per_token") else 0.5}

        def row_numbers(rank: int) -> torch.Tensor:
            small = (numbers(number, rank, rows * hidden) % 61 - 30).float()
            return small.fill_(cancelling(number, rank)) if number % 3 == 2 and rank < 2 < comm.world_size else small

        # The large numbers cancel first, here and in rank order. No other partial sum is rounded.
        total = sum(row_numbers(rank) for rank in range(comm.world_size))
        inputs = (row_numbers(comm.rank), row_numbers(comm.world_size), torch.as_tensor(total))
        tensors = [each.to(torch.bfloat16).view(rows, hidden) for each in inputs]
        weight = (torch.arange(hidden) % 5).to(torch.bfloat16)
        experts = _spread(tensors[0]) if number % 3 == 1 else None
        call, exact = (
            fused_call.checked(FusedArguments(start, tensors[1], weight, 1e-6, **given), comm.device, of)
            for start, of in ((tensors[0], experts), (tensors[2], None))
        )
        comm._internal.run_fused(call, kernel.algorithm, kernel.protocol)
        unfused.finish(exact, exact.x)
        for name in ("residual_out", "norm_out", "quant_out", "scale_out"):
            got, want = getattr(call, name), getattr(exact, name)
            # the oracle does not check it
            if want is not None and not torch.equal(got.view(torch.uint8), want.view(torch.uint8)):
                raise AssertionError(f"{kernel.name} of {rows} rows: {name} differs from the unfused steps")
        return call.residual_out


def _spread(x: torch.Tensor) -> ExpertRows:
    """Experts' rows that add up to `x`: the routed rows are `x` and minus half of it, the shared row is the other
    half."""
    rows = torch.stack([torch.full_like(x[0], torch.nan), *x, *(x * 0.5)])
    place = torch.arange(len(x), dtype=torch.int32) + 1
    none = torch.full_like(place, len(rows))
    places = torch.stack([none, place, place + len(x)], 1)
    return ExpertRows(rows, places, torch.tensor([[2.0, 1.0, -1.0]]).repeat(len(x), 1), x * 0.5, 3)


class MessageCalls:
    """The messages of one rank.

    All pairs of ranks have the same messages, so one count of the pieces of each queue is right for both ends. It tells
    which numbers the next pieces in a slot will have. Plain payload contains the next number where LL words have their
    flags; in the second half of the slot, the number after that. An `ll` receiver could take these words for those
    pieces.
    """

    def __init__(self, comm: Any) -> None:
        self._comm, self._plan = comm, comm._internal.group.layout
        self._next = [max(comm.options._tuning.first_epoch, layout.SLOTS)] * self._plan.queues

    def hand_on(self, protocol: str, number: int, size: int) -> torch.Tensor | None:
        """Send two messages from each rank to the next one: a short one, and then one of `size` words, which is
        received first. Returns the received words; None on rank 0.

        The short message is one word. In every other call it uses the other protocol, which leaves words of another
        kind in its slots; if they are plain, it fills the slots. Only acknowledgements are sent back, so the first rank
        runs ahead until it has to wait for one. The second message fits into the slots that the first one leaves,
        because the receiver would refuse a longer one. The short message of the third call is received from any rank.
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
            if not torch.equal(got, want):  # the oracle does not check messages
                raise AssertionError(f"message {tag} of call {number} is wrong; {difference(want, got)}")
            results.append(got & _LOWER)  # the flags depend on the first epoch of the schedule
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
