"""The fast path of the most frequent call, in which every microsecond counts: a small synchronous all_reduce.

It decides nothing. The dispatcher teaches it each call that it has sent to the kernels, and the fast path repeats that
call on the caller's stream. Any other call, a bad one included, goes through the dispatcher.
"""

from __future__ import annotations

from typing import Any

import torch

from tricomm.c10d.call_guard import sends
from tricomm.c10d.group_calls import OPERATIONS
from tricomm.c10d.torch_names import c10d
from tricomm.c10d.work_handles import FinishedWork
from tricomm.communicator import Communicator

_MOST_CALLS = 1024
# One handle for all calls: the caller already holds the result of a finished one.
_FINISHED = FinishedWork([])
# Comparing two ReduceOps takes microseconds; the hash of one is its number.
_HASHES = {
    ours: hash(c10d._make_nccl_premul_sum(2.0) if name == "PREMUL_SUM" else c10d.ReduceOp(getattr(c10d.ReduceOp, name)))
    for name, ours in OPERATIONS.items()
}
_DISTINCT = len(set(_HASHES.values())) == len(_HASHES)


class FastPath:
    """One group's known all_reduce calls over the kernels, by type, count and operation."""

    def __init__(self) -> None:
        self._comm: Communicator | None = None
        # By the operation's hash, type and count: three small look-ups take less time than one of a tuple.
        self._calls: dict[int, dict[torch.dtype, dict[int, Any]]] = {}
        self._known = 0
        self.made = 0

    def learn(self, comm: Communicator, x: torch.Tensor, op: str) -> None:
        """From now on repeat all_reduces of tensors like `x`, of which `comm` has just made one.

        For one communicator only: a group has one, unless its process uses several GPUs.
        """
        known = comm.known(op, x.dtype, x.numel())
        if known is None or not _DISTINCT or self._comm not in (None, comm):
            return
        self._known += 1
        if self._known > _MOST_CALLS:
            self.clear()
        self._comm = comm
        self._calls.setdefault(_HASHES[op], {}).setdefault(x.dtype, {})[x.numel()] = known

    def clear(self) -> None:
        """Forget all calls: the group is closed."""
        self._calls.clear()
        self._known = 0

    @sends
    def all_reduce(self, tensors: Any, opts: Any) -> FinishedWork | None:
        """Repeat a known call and return its handle; None, with nothing done, if the call is not known.

        The caller's own stream orders what follows, and the next call raises the faults of this one. So a timeout that
        is given with the call has nothing to limit.
        """
        try:
            if opts.asyncOp or type(tensors) is not list:
                return None
            (x,) = tensors
            known = self._calls[hash(opts.reduceOp)][x.dtype][x.numel()]
        except (KeyError, ValueError, AttributeError):  # not known, not one tensor, or a short form of the options
            return None
        if not self._comm.repeat(known, x):  # type: ignore[union-attr]  # sparse, requires grad, another device
            return None
        self.made += 1
        return _FINISHED
