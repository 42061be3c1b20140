"""CUDA calls over the kernels: on the caller's stream where it waits anyway, else on a stream of the group's own."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import Work
from torch.futures import Future

from tricomm import env
from tricomm.c10d.works import FinishedWork, bounded, failed
from tricomm.errors import CollectiveTimeout, TricommError

_POLL = 5e-5


class CudaWork(Work):
    """A call on the group's stream. `wait` orders the current stream after it and does not block the host.

    With a timeout, or with TRICOMM_BLOCKING_WAIT=1, the host waits too.
    """

    def __init__(self, what: str, result: list[Any], event: Any, future: Any, comm: Any, limit: float | None) -> None:
        super().__init__()
        self._what, self._result, self._event, self._future = what, result, event, future
        self._comm, self._limit = comm, limit

    def wait(self, timeout: timedelta | None = None) -> bool:
        self._event.wait(torch.cuda.current_stream(self._comm.device))
        limit = bounded(timeout)
        if limit is not None or env.flag("TRICOMM_BLOCKING_WAIT"):
            try:
                self._on_host(limit or self._limit)
            except TricommError:
                raise
            except BaseException as error:
                self._comm.interrupted(error)
                raise
        self._comm.check()
        return True

    def _on_host(self, limit: float | None) -> None:
        end = None if limit is None else time.monotonic() + limit
        while not self._event.query():
            self._comm.check()
            if end is not None and time.monotonic() > end:
                raise CollectiveTimeout(f"{self._what}: timeout after {limit:g} s of wait()")
            time.sleep(_POLL)

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return bool(self._event.query())

    def is_success(self) -> bool:
        return self.is_completed() and self.exception() is None

    def exception(self) -> Any:
        try:
            self._comm.check()
        except Exception as error:
            return error
        return None

    def result(self) -> list[Any]:
        return self._result

    def get_future(self) -> Any:
        """Done when the call is launched, as NCCL's; of a group whose fault is known, a failed one."""
        error = self.exception()
        return self._future if error is None else failed(error)


class Streams:
    """One group's stream on one device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: Any = None

    def run(
        self, action: Callable[[], None], what: str, result: list[Any], keep: list[torch.Tensor], async_op: bool,
        comm: Any, timeout: timedelta | None,
    ) -> Any:  # fmt: skip
        """Launch `action`; the memory of `keep` is not given to others before the stream has passed it."""
        if not async_op or torch.cuda.is_current_stream_capturing():
            action()
            return FinishedWork(result)
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            action()
            event = torch.cuda.Event()
            event.record(self._stream)
            future: Any = Future(devices=[self._device])
            future.set_result(result)  # here, so that the future's event is on this stream
        for tensor in keep:
            tensor.record_stream(self._stream)
        return CudaWork(what, result, event, future, comm, bounded(timeout))
