"""NCCL as the fallback of a stand-alone communicator, through nccl4py (`nccl.core`).

nccl4py is an extra (`pip install 'tricomm[nccl]'`), imported when a group first needs it. If a rank lacks it, all ranks
raise the same error, which names that rank. Every call is enqueued on the caller's current stream. Tensors are
contiguous, on the communicator's device, and checked by the caller. Collectives that only move data move bytes, so
every dtype can be moved; gather, scatter and uneven exchanges are grouped sends and receives, as in ProcessGroupNCCL.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch

from tricomm.core.launch_plan import LaunchPlan, Request, announced
from tricomm.core.watch.monitor import Monitor
from tricomm.cuda_bindings import REMEDY, bindings_version, refusal
from tricomm.errors import GroupAborted, InvalidArgument, ResourceError
from tricomm.gpu import Gpu
from tricomm.kernels.launch.kernel_launch import Rows
from tricomm.policy import backend_choice, selection
from tricomm.store.bounded_store import BoundedThread, first_line
from tricomm.store.control import ControlPage

log = logging.getLogger("tricomm")
_IN_PROGRESS = 7  # ncclInProgress; 0 is success, all else an error
_GRACE_SECONDS = 5.0
_REDUCED = frozenset(
    getattr(torch, name)
    for name in (
        "float16 bfloat16 float32 float64 float8_e4m3fn float8_e5m2 int8 uint8 int32 int64 uint32 uint64 bool".split()
    )
)
# bool is reduced as uint8, and its sum is a logical or
_BOOL_OPS = {"sum": "MAX", "max": "MAX", "prod": "MIN", "min": "MIN"}
_OPS = {"sum": "SUM", "avg": "AVG", "min": "MIN", "max": "MAX", "prod": "PROD"}


def load(control: ControlPage, timeout: float) -> Any:
    """The module `nccl.core`; every rank calls it. If a rank lacks it, all raise a `ResourceError` that names it."""
    core, error = None, None
    try:
        core = _load()
    except ResourceError as missing:
        error = missing
    control.agree(error, "NCCL (pip install 'tricomm[nccl]' on every rank)", timeout, abort_on_fault=True)
    return core


def open_nccl(control: ControlPage, device: torch.device, timeout: float, max_blocks: int | None = None) -> Nccl:
    """Create NCCL's communicator for the ranks of `control`; every rank calls it, in the same order. Its kernels have
    at most `max_blocks` blocks.

    Raises the same error on all ranks: `ResourceError` if nccl4py, libnccl or the communicator is missing or
    broken on a rank, which it names; and as `control.exchange` does if a rank does not come within `timeout` seconds.
    """
    core = load(control, timeout)
    unique_id, error = b"", None
    if control.rank == 0:
        try:
            unique_id = bytes(core.get_unique_id())
        except Exception as refusal:
            error = ResourceError(f"libnccl gives no unique id: {first_line(refusal)}")
    unique_id = control.exchange(unique_id, "NCCL", timeout, abort_on_fault=True, error=error)[0]
    settings = {} if max_blocks is None else {"config": core.NCCLConfig(max_ctas=max_blocks)}

    def make() -> Any:
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            return core.Communicator.init(
                control.world_size, control.rank, core.UniqueId.from_bytes(unique_id), **settings
            )

    comm, error = _init(make, timeout)
    try:  # a rank that fails at once waits here for ranks that NCCL blocks until the timeout
        control.agree(error, "NCCL's communicator", timeout + _GRACE_SECONDS, abort_on_fault=True)
    except BaseException:
        if comm is not None:
            comm.abort()
        raise
    return Nccl(core, comm, control.rank, control.world_size, device)


def check(collective: str, op: str, dtype: torch.dtype) -> None:
    """Raises `InvalidArgument` for a reduction that NCCL does not have."""
    table = _BOOL_OPS if dtype == torch.bool else _OPS
    if dtype not in _REDUCED or op not in table:
        raise InvalidArgument(
            f"{collective}: NCCL has no {op} of {dtype}; convert the tensor, or use another operation"
        )


def _load() -> Any:
    reason = refusal(bindings_version())  # nccl4py uses the same bindings
    if reason is not None:
        raise ResourceError(f"nccl4py cannot be used: {reason}; {REMEDY}")
    try:
        core: Any = importlib.import_module("nccl.core")
        if core.get_version().libnccl is not None:
            return core
    except Exception as error:
        raise ResourceError(f"nccl4py cannot be used ({first_line(error)})") from error
    raise ResourceError("nccl4py finds no libnccl")


def _init(make: Callable[[], Any], timeout: float) -> tuple[Any, ResourceError | None]:
    """(communicator, None) or (None, reason). NCCL waits for all ranks without a limit, so this runs it with one."""
    worker = BoundedThread("tricomm-nccl-init")
    try:
        return worker.run(make, "ncclCommInitRank", timeout), None
    except Exception as error:
        return None, ResourceError(first_line(error))
    finally:
        worker.close()


class Nccl:
    """One group's NCCL communicator. Made by `open_nccl`; `close` is collective, `abort` is not."""

    def __init__(self, core: Any, comm: Any, rank: int, world_size: int, device: torch.device) -> None:
        self._core, self._comm = core, comm
        self.rank, self.world_size, self.device = rank, world_size, device

    def run(self, request: Request, x: torch.Tensor, y: torch.Tensor, rows: Rows = ()) -> None:
        """Enqueue a call of contiguous input `x` and output `y`, one tensor if the collective works in place; `rows`
        are the splits of dimension 0 if these are uneven. Only the root reads all rows of a scatter's `x`, and writes
        all rows of a gather's `y`."""
        comm, stream, root = self._ready(), self._stream(), request.root
        match request.collective:
            case "all_reduce":
                comm.allreduce(_flat(x), _flat(y), self._op(request, x.dtype), stream=stream)
            case "reduce":
                comm.reduce(_flat(x), _flat(y), self._op(request, x.dtype), root=root, stream=stream)
            case "reduce_scatter":
                kind = self._op(request, x.dtype)
                if x.numel():  # nccl4py refuses empty tensors, and there is nothing to do
                    comm.reduce_scatter(_flat(x), _flat(y), kind, stream=stream)
            case "broadcast":
                comm.broadcast(_bytes(y), _bytes(y), root, stream=stream)
            case "all_gather":
                comm.allgather(_bytes(x), _bytes(y), stream=stream)
            case "gather":
                parts = self._even(y) if self.rank == root else []
                self._grouped([(root, _bytes(x))], list(enumerate(parts)))
            case "scatter":
                parts = self._even(x) if self.rank == root else []
                self._grouped(list(enumerate(parts)), [(root, _bytes(y))])
            case "all_to_all":
                self._grouped(list(enumerate(self._even(x))), list(enumerate(self._even(y))))
            case "all_to_all_v":
                row = x.nbytes // max(1, x.shape[0]) or y.nbytes // max(1, y.shape[0])
                sent, received = (
                    _bytes(t).split([n * row for n in splits]) for t, splits in zip((x, y), rows, strict=True)
                )
                self._grouped(list(enumerate(sent)), list(enumerate(received)))
            case "barrier":
                one = torch.zeros(1, dtype=torch.int32, device=self.device)
                comm.allreduce(one, one, self._core.SUM, stream=stream)

    def _even(self, x: torch.Tensor) -> list[torch.Tensor]:
        """One row of bytes for each rank."""
        return list(_bytes(x).split([x.nbytes // self.world_size] * self.world_size))

    # Life

    def error(self) -> str | None:
        """NCCL's asynchronous error, in words; None if there is none. Any thread may ask."""
        comm = self._comm
        if comm is None:
            return None
        code = int(comm.get_async_error())
        return None if code in (0, _IN_PROGRESS) else f"NCCL reports error {code} ({comm.get_last_error()})"

    def check(self) -> None:
        """Raises `GroupAborted` if NCCL's communicator is closed or reports an error, after which it is aborted."""
        if self._comm is None:
            raise GroupAborted(f"rank {self.rank}: NCCL's communicator is closed; make a new group")
        text = self.error()
        if text is not None:
            self.abort()
            raise GroupAborted(f"rank {self.rank}: {text}; make a new group")

    def abort(self) -> None:
        """Abort NCCL's communicator, which ends kernels in flight. Idempotent."""
        comm, self._comm = self._comm, None
        if comm is not None:
            comm.abort()

    def close(self) -> None:
        """Wait for calls in flight and destroy NCCL's communicator. Idempotent."""
        comm, self._comm = self._comm, None
        if comm is not None:
            comm.finalize()
            comm.destroy()

    def _ready(self) -> Any:
        self.check()
        return self._comm

    def _stream(self) -> int:
        return int(torch._C._cuda_getCurrentRawStream(self.device.index)) if self.device.type == "cuda" else 0

    def _grouped(self, sends: list[tuple[int, torch.Tensor]], receives: list[tuple[int, torch.Tensor]]) -> None:
        comm, stream = self._ready(), self._stream()
        with self._core.group():
            for peer, data in sends:
                if data.numel():
                    comm.send(data, peer, stream=stream)
            for peer, data in receives:
                if data.numel():
                    comm.recv(data, peer, stream=stream)

    def _op(self, request: Request, dtype: torch.dtype) -> Any:
        op = request.op or ""
        check(request.collective, op, dtype)
        return getattr(self._core, (_BOOL_OPS if dtype == torch.bool else _OPS)[op])


def end(communicator: Nccl | None, lost: bool, seconds: float) -> None:
    """Close a communicator, or abort it if its group is `lost`, within `seconds`, because NCCL waits for its peers.

    Never raises: a communicator that cannot end is leaked.
    """
    if communicator is None:
        return
    worker = BoundedThread("tricomm-nccl-end")
    try:
        worker.run(communicator.abort if lost else communicator.close, "NCCL's end", seconds)
    except Exception as error:
        log.error("NCCL's communicator is left behind: %s", first_line(error))
    finally:
        worker.close()


def _flat(x: torch.Tensor) -> torch.Tensor:
    flat = x.detach().view(-1)
    return flat.as_strided((1,), (1,)) if len(flat) == 1 else flat  # a single element may have any stride


def _bytes(x: torch.Tensor) -> torch.Tensor:
    return _flat(x).view(torch.uint8)


def plan(nccl: Nccl, monitor: Monitor, gpu: Gpu | None, reason: str, request: Request, mode: str) -> LaunchPlan:
    """The request as a launch plan: announced, counted, watched and bounded like a kernel's.

    While a call runs, `monitor` counts its time and looks for peers that are gone, as for a user's own kernel. Raises
    `InvalidArgument` for a reduction that NCCL does not have.
    """
    op, dtype = request.op or "none", request.dtype
    if request.collective not in backend_choice.REDUCTIONS:
        op = "none"
    elif dtype is not None:
        check(request.collective, op, dtype)
    choice = selection.nccl(request.collective, reason)
    name = str(dtype).removeprefix("torch.") if dtype is not None else "none"
    fingerprint, record = announced(choice, op, name, request, mode)

    def run(x: torch.Tensor, y: torch.Tensor, count: int, call: int, rows: Rows = ()) -> None:
        with monitor.in_flight.user_call(gpu):
            nccl.run(request, x, y, rows)

    return LaunchPlan(choice, fingerprint, request.elements, record, run, mode)
