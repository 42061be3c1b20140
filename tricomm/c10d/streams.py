"""CUDA calls over the kernels: on the caller's stream if the caller waits, else on the group's stream; and the fast
path of those that repeat an earlier one."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch.futures import Future

from tricomm import env
from tricomm.c10d.call_guard import sends
from tricomm.c10d.group_calls import OPERATIONS, GroupCall
from tricomm.c10d.torch_names import c10d
from tricomm.c10d.work_handles import FinishedWork, Handle, failed, limit_seconds
from tricomm.communicator import Communicator
from tricomm.core.calls.internal_calls import Internal
from tricomm.core.work import Completion
from tricomm.deadline import poll
from tricomm.errors import CollectiveTimeout, TricommError
from tricomm.gpu import Gpu

_POLL = 5e-5
# One handle for all calls, because the caller already has the result of a finished call.
_FINISHED = FinishedWork([])
# Keyed by hash, which is a ReduceOp's number, because comparing two ReduceOps takes microseconds.
_NAMES = {
    hash(c10d._make_nccl_premul_sum(2.0) if name == "PREMUL_SUM" else c10d.ReduceOp(getattr(c10d.ReduceOp, name))): ours
    for name, ours in OPERATIONS.items()
}
_DISTINCT = len(_NAMES) == len(set(OPERATIONS.values()))


class FastPath:
    """One group's small synchronous all_reduces, the most frequent call, in which every microsecond counts.

    It makes no decisions: the dispatcher adds each call that it has sent to the kernels, and the fast path repeats that
    call on the caller's stream. The dispatcher makes all other calls, including wrong ones.
    """

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

        The call is ordered on the caller's stream, and the next call raises its faults. So a timeout that is given with
        the call has no effect.
        """
        repeat = self._repeat
        try:
            if repeat is None or opts.asyncOp or type(tensors) is not list:
                return None
            (x,) = tensors
            op = _NAMES[hash(opts.reduceOp)]
        except (KeyError, ValueError, AttributeError):  # not known, not a single tensor, or a short form of the options
            return None
        if not repeat(op, x):  # new to the communicator, or needs the checks of a first call
            return None
        self.made += 1
        return _FINISHED


class CudaWork(Handle):
    """A call on the group's stream. `wait` makes the current stream wait for it and does not block the host.

    With a timeout, with TRICOMM_BLOCKING_WAIT=1, and for a barrier, the host also waits.
    """

    def __init__(
        self, what: str, result: list[Any], event: Any, future: Any, comm: Communicator, gpu: Gpu, limit: float | None
    ) -> None:
        super().__init__(result)
        self._what, self._future = what, future
        self._end = Completion(comm._internal.faults, event)
        self._comm, self._gpu, self._limit = comm, gpu, limit

    def wait(self, timeout: timedelta | None = None) -> bool:
        self._end.event.wait(self._gpu.stream())
        limit = limit_seconds(timeout)
        if limit is not None or self._what == "barrier" or env.flag("TRICOMM_BLOCKING_WAIT"):
            try:
                self._on_host(limit or self._limit)
            except TricommError:
                raise
            except BaseException as error:
                self._comm._internal.faults.interrupted(error)
                raise
        self._end.check()
        return True

    def _on_host(self, limit: float | None) -> None:
        if not poll(self._end.passed, limit, _POLL, meanwhile=self._end.check):
            late = CollectiveTimeout(f"{self._what}: timeout after {limit:g} s of wait()")
            self._comm._internal.group.recorder.name_in(late)
            raise late

    def is_completed(self) -> bool:
        return self._end.passed()

    def exception(self) -> Any:
        try:
            self._end.check()
        except Exception as error:
            return error
        return None

    def get_future(self) -> Any:
        """A future that is complete once the call is launched, as with NCCL; it has failed if the group has a fault."""
        error = self.exception()
        return self._future if error is None else failed(error)


class GroupStream:
    """One group's stream on the device of `comm`."""

    def __init__(self, comm: Communicator) -> None:
        assert comm.gpu is not None, "calls on a CPU have no streams"
        self._comm, self._gpu = comm, comm.gpu
        self._stream: Any = None

    def run(self, action: Callable[[], None], batch: list[GroupCall], timeout: timedelta) -> Any:
        """Launch `action`, which makes the calls of `batch`, and return a handle for all of them.

        The allocator does not reuse the memory of their tensors before the calls have run. Works with any current
        device, and does not change it.
        """
        gpu = self._gpu
        run = self._run if gpu.current_device() == gpu.index else gpu.under(self._run)
        return run(action, batch, timeout)

    def _run(self, action: Callable[[], None], batch: list[GroupCall], timeout: timedelta) -> Any:
        gpu = self._gpu
        result = [x for call in batch for x in call.result]
        if not batch[0].async_op or gpu.capturing():
            action()
            return FinishedWork(result)
        if self._stream is None:
            # high priority: scheduled before waiting blocks of a long kernel
            self._stream = torch.cuda.Stream(gpu.device, priority=-1)
        self._stream.wait_stream(gpu.stream())
        with torch.cuda.stream(self._stream):
            action()
            event = gpu.recorded(self._stream)
            future: Any = Future(devices=[gpu.device])
            future.set_result(result)  # set here, so that the future's event is on this stream
        for tensor in (x for call in batch for x in (call.x, call.out, *call.keep) if x is not None):
            tensor.record_stream(self._stream)
        return CudaWork(batch[0].collective, result, event, future, self._comm, gpu, limit_seconds(timeout))
