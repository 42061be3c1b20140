"""The backends between the parts of a group; each connects the ranks of one position, one from every part.

NCCL on GPUs, Gloo on a CPU, and kernels between the islands of a node. Each gives all its ranks the same bits.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch._C import _distributed_c10d as c10d
from torch.distributed.distributed_c10d import Store

from tricomm.core import nccl
from tricomm.core.launch_plan import Request
from tricomm.deadline import poll
from tricomm.errors import CollectiveMismatch, CollectiveTimeout, GroupAborted, ResourceError, TricommError
from tricomm.kernels import reference
from tricomm.store.bounded_store import BoundedThread, first_line
from tricomm.store.control import ControlPage

_HEADER = struct.Struct("<QQ240s")  # fingerprint, bytes, the call in words
_BACKSTOP_SECONDS = 5.0
_PAUSE, _LONGEST_PAUSE = 5e-5, 2e-3


class ConnectionLost(Exception):
    """A connection to another part has failed; its reason may be known elsewhere."""


class Runs(Protocol):
    """The collectives of a group that shares memory."""

    def run(self, request: Request, x: torch.Tensor, y: torch.Tensor, count: int) -> None:
        """Plan and launch a call of contiguous tensors that have been checked, with `count` elements a row."""


class Across(Protocol):
    """One rank's end of such a backend, whose name is `name`."""

    name: str

    def check(self, op: str, dtype: torch.dtype) -> None:
        """Raises `InvalidArgument` for a reduction that this backend does not have."""

    def all_reduce(self, x: torch.Tensor, op: str, call: tuple[int, str], check: Callable[[], None]) -> None:
        """Reduce contiguous `x` in place, between the parts. `call` is its fingerprint and description. If the host
        waits, `check` is called periodically, and ends the wait if it raises. Raises `ConnectionLost` if a part is
        gone."""

    def error(self) -> str | None:
        """An asynchronous error of the backend, in words; None if there is none."""

    def abort(self) -> None:
        """End what is in flight. Idempotent."""

    def close(self, lost: bool, seconds: float) -> None:
        """Release everything, within `seconds`; `lost`: the group is lost. Never raises."""


class NcclAcross:
    """NCCL's communicator of one rank of each part."""

    name = "nccl"

    def __init__(self, control: ControlPage, device: torch.device, timeout: float, max_blocks: int | None) -> None:
        self._control = control
        self._nccl = nccl.open_nccl(control, device, timeout, max_blocks)

    def check(self, op: str, dtype: torch.dtype) -> None:
        nccl.check("all_reduce", op, dtype)

    def all_reduce(self, x: torch.Tensor, op: str, call: tuple[int, str], check: Callable[[], None]) -> None:
        try:
            self._nccl.all_reduce(x, op)
        except GroupAborted as error:
            raise ConnectionLost(str(error)) from error

    def error(self) -> str | None:
        return self._nccl.error()

    def abort(self) -> None:
        self._nccl.abort()

    def close(self, lost: bool, seconds: float) -> None:
        nccl.end(self._nccl, lost, seconds)
        self._control.close()


class GlooAcross:
    """Gloo's connections between one rank of each part. The values are reduced here, in the order of the parts, as the
    kernels reduce ranks, so every type and operation of theirs is there. Ranks compare their calls first.

    Gloo runs on a thread of its own: a wait inside it cannot be cancelled, so it is left behind with its memory if the
    group is lost meanwhile, and ends with the connections. `timeout` limits a call, `limit` the connecting, in seconds;
    the group's monitor ends a late call before this does, and names the late ranks.
    """

    name = "gloo"

    def __init__(self, store: Store, part: int, parts: int, timeout: float, limit: float) -> None:
        self._part, self._parts, self._timeout = part, parts, timeout + _BACKSTOP_SECONDS
        self._thread = BoundedThread("tricomm-gloo")
        self._group: Any = None
        try:
            self._group = self._thread.run(lambda: _connect(store, part, parts, self._timeout), "Gloo", limit)
        except TricommError:
            raise
        except Exception as error:
            raise ResourceError(
                f"Gloo does not connect: {first_line(error)}; set GLOO_SOCKET_IFNAME to the interface if it is not the "
                "host name's"
            ) from error

    def check(self, op: str, dtype: torch.dtype) -> None:
        pass

    def all_reduce(self, x: torch.Tensor, op: str, call: tuple[int, str], check: Callable[[], None]) -> None:
        self._compare(_HEADER.pack(call[0], x.nbytes, call[1].encode()[:240]), call[1], check)
        parts = self._gather(x.reshape(-1).view(torch.uint8).clone(), check)
        shaped = [part.view(x.dtype).view(x.shape) for part in parts]
        x.copy_(reference.reduced(op, shaped))

    def _compare(self, header: bytes, text: str, check: Callable[[], None]) -> None:
        """Raises `CollectiveMismatch` if another part makes another call: Gloo would mix them."""
        heard = self._gather(torch.frombuffer(bytearray(header), dtype=torch.uint8), check)
        for part, theirs in enumerate(row.numpy().tobytes() for row in heard):
            if theirs[:16] != header[:16]:
                said = _HEADER.unpack(theirs)[2].rstrip(b"\0").decode(errors="replace")
                raise CollectiveMismatch(
                    f"ranks made different calls: this rank {text}; the rank of its position on node {part} {said}; "
                    "make the same call, with the same shape, on every rank"
                )

    def _gather(self, mine: torch.Tensor, check: Callable[[], None]) -> Sequence[torch.Tensor]:
        rows = [torch.empty_like(mine) for _ in range(self._parts)]
        group = self._group

        def gather() -> None:
            if group is None:
                raise RuntimeError("the connections are closed")
            group.allgather([rows], [mine]).wait()

        done: Future[None] = self._thread.start(gather)
        if not poll(done.done, self._timeout, _PAUSE, _LONGEST_PAUSE, meanwhile=check):
            raise CollectiveTimeout(f"timeout after {self._timeout:g} s: another node has not come")
        error = done.exception()
        if error is not None:
            raise ConnectionLost(first_line(error)) from error
        return rows

    def error(self) -> str | None:
        return None

    def abort(self) -> None:
        self._group = None  # closes the connections, unless the thread is in a call over them

    def close(self, lost: bool, seconds: float) -> None:
        self.abort()
        self._thread.close()


def _connect(store: Store, part: int, parts: int, timeout: float) -> Any:
    interface = (os.environ.get("GLOO_SOCKET_IFNAME") or "").split(",")[0]
    make: Any = c10d.ProcessGroupGloo
    options = make._Options()
    device = make.create_device(interface=interface) if interface else make.create_default_device()
    options._devices, options._threads, options._timeout = [device], 1, timedelta(seconds=timeout)
    return make(store, part, parts, options)


class KernelsAcross:
    """Kernels between the islands of a node, over memory of their own."""

    name = "kernels"

    def __init__(self, collectives: Runs, close: Callable[[], None], abort: Callable[[], None]) -> None:
        self._collectives, self._close, self._abort = collectives, close, abort

    def check(self, op: str, dtype: torch.dtype) -> None:
        pass

    def all_reduce(self, x: torch.Tensor, op: str, call: tuple[int, str], check: Callable[[], None]) -> None:
        self._collectives.run(Request("all_reduce", op), x, x, x.numel())

    def error(self) -> str | None:
        return None

    def abort(self) -> None:
        self._abort()

    def close(self, lost: bool, seconds: float) -> None:
        self._close()
