"""The calls of `tricomm check` for the shipped kernels, and the right results of those that the oracle does not see."""

from __future__ import annotations

from typing import Any

import torch

from tricomm.communicator import Communicator
from tricomm.core.fused import fused_checks, unfused
from tricomm.core.fused.fused_call import FUSED
from tricomm.core.fused.fused_checks import FusedArguments
from tricomm.explorer.call_inputs import cancelling, numbers
from tricomm.explorer.message_calls import MessageCalls
from tricomm.explorer.world.oracle import difference
from tricomm.kernels.collectives.registry import Kernel

_QUANTIZED = {
    ("one_shot", "ll"): "nvfp4",
    ("two_shot", "ll"): "fp8_per_token",
    ("one_shot", "ll128"): "fp8",
    ("two_shot", "ll128"): None,
}


class ShippedCalls:
    """The calls of one rank. A handle is used again by all calls of its length, so that one call's reads of it meet
    the next one's input."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self._messages = MessageCalls(comm)
        self._handles: dict[tuple[int, torch.dtype], Any] = {}

    def make(self, kernel: Kernel, number: int, size: float) -> torch.Tensor | None:
        """Call number `number`, of `size` words: what it gave, if anything, in memory that no later call changes."""
        comm = self._comm
        if kernel.collective == "barrier":
            comm.barrier()
            return None
        if kernel.pairwise:
            return self._messages.hand_on(kernel.protocol, number, int(size))
        if kernel.collective == FUSED:
            return self._normalised(kernel, number)
        kind, shards = kernel.kind, 1 if kernel.shards is None else kernel.shards or comm.world_size
        count = max(int(size), 1) * shards
        if size < 1:
            x = torch.full((count * kind.rows_in(comm.world_size),), cancelling(number, comm.rank))
        else:
            x = numbers(number, comm.rank, count * kind.rows_in(comm.world_size))
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
        """Symmetric memory that holds `x`."""
        key = (len(x), x.dtype)
        if key not in self._handles:
            self._handles[key] = self._comm.symmetric((len(x),), x.dtype)
        self._handles[key].local.copy_(x)
        return self._handles[key]

    def _uneven(self, x: torch.Tensor, count: int, number: int, how: dict[str, Any]) -> torch.Tensor:
        """Rows of 0 to `count` elements, by sender, receiver and call."""
        comm = self._comm
        ranks, me = range(comm.world_size), comm.rank
        length = [[(count * (a + 2 * b + number)) % (count + 1) for b in ranks] for a in ranks]
        into, out = length[me], [length[r][me] for r in ranks]
        y = torch.full((sum(out),), -1, dtype=torch.int64)
        comm.all_to_all_v(x[: sum(into)], into, out, y, **how)
        firsts = [sum(row[:me]) for row in length]
        want = torch.cat([numbers(number, r, len(x))[firsts[r] :][: out[r]] for r in ranks])
        if not torch.equal(y, want):  # the oracle sees no uneven calls
            raise AssertionError(f"call {number} of all_to_all_v is wrong; {difference(want, y)}")
        return y

    def _normalised(self, kernel: Kernel, number: int) -> torch.Tensor:
        """Rows that end in RMSNorm, by each kernel with another quantisation, compared with the same steps unfused. The
        numbers of every third call tell in which order they were added."""
        comm = self._comm
        rows, hidden = (5, 1, 2)[number % 3], 160
        quantize = _QUANTIZED[kernel.algorithm, kernel.protocol]
        given = {"quantize": quantize, "scale": None if quantize in (None, "fp8_per_token") else 0.5}

        def row_numbers(rank: int) -> torch.Tensor:
            small = (numbers(number, rank, rows * hidden) % 61 - 30).float()
            return small.fill_(cancelling(number, rank)) if number % 3 == 2 and rank < 2 < comm.world_size else small

        # The large ones cancel first, here and in rank order; no other partial sum is rounded.
        total = sum(row_numbers(rank) for rank in range(comm.world_size))
        inputs = (row_numbers(comm.rank), row_numbers(comm.world_size), torch.as_tensor(total))
        tensors = [each.to(torch.bfloat16).view(rows, hidden) for each in inputs]
        weight = (torch.arange(hidden) % 5).to(torch.bfloat16)
        call, exact = (
            fused_checks.checked(FusedArguments(start, tensors[1], weight, 1e-6, **given), comm.device)
            for start in (tensors[0], tensors[2])
        )
        comm._internal.run_fused(call, kernel.algorithm, kernel.protocol)
        unfused.finish(exact, exact.x)
        for name in ("residual_out", "norm_out", "quant_out", "scale_out"):
            got, want = getattr(call, name), getattr(exact, name)
            if want is not None and not torch.equal(got.view(torch.uint8), want.view(torch.uint8)):  # not the oracle's
                raise AssertionError(f"{kernel.name} of {rows} rows: {name} differs from the unfused steps")
        return call.residual_out
