"""The fast path of the most frequent call, in which every microsecond counts: a small synchronous all_reduce.

It decides nothing. The dispatcher adds each call that it has sent to the kernels, and the fast path repeats that call
on the caller's stream. Any other call, a wrong one included, takes the way through the dispatcher.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tricomm.c10d.call_guard import sends
from tricomm.c10d.group_calls import OPERATIONS
from tricomm.c10d.torch_names import c10d
from tricomm.c10d.work_handles import FinishedWork
from tricomm.core.calls.internal import Internal

# One handle for all calls: the caller already holds the result of a finished one.
_FINISHED = FinishedWork([])
# By their hashes, because comparing two ReduceOps takes microseconds; the hash of one is its number.
_NAMES = {
    hash(c10d._make_nccl_premul_sum(2.0) if name == "PREMUL_SUM" else c10d.ReduceOp(getattr(c10d.ReduceOp, name))): ours
    for name, ours in OPERATIONS.items()
}
_DISTINCT = len(_NAMES) == len(set(OPERATIONS.values()))


class FastPath:
    """One group's all_reduce calls that its communicator can repeat."""

    def __init__(self) -> None:
        self._comm: Internal | None = None
        self._repeat: Callable[[str, torch.Tensor], bool] | None = None
        self.made = 0

    def learn(self, comm: Internal, x: torch.Tensor, op: str) -> None:
        """From now on repeat all_reduces of tensors like `x`, of which `comm` has just made one, flattened.

        For one communicator only: a group has one, unless its process uses several GPUs.
        """
        if self._comm in (None, comm) and _DISTINCT and comm.remember(op, x):
            self._comm, self._repeat = comm, comm.repeat

    def clear(self) -> None:
        """Repeat no calls: the group is closed."""
        self._comm = self._repeat = None

    @sends
    def all_reduce(self, tensors: Any, opts: Any) -> FinishedWork | None:
        """Repeat a known call and return its handle; None, with nothing done, if the call is not known.

        The caller's own stream orders what follows, and the next call raises the faults of this one. So a timeout that
        is given with the call has nothing to limit.
        """
        repeat = self._repeat
        try:
            if repeat is None or opts.asyncOp or type(tensors) is not list:
                return None
            (x,) = tensors
            op = _NAMES[hash(opts.reduceOp)]
        except (KeyError, ValueError, AttributeError):  # not known, not one tensor, or a short form of the options
            return None
        if not repeat(op, x):  # new to the communicator, or needs the checks of a first call
            return None
        self.made += 1
        return _FINISHED
