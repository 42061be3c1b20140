"""NCCL behind a stand-alone communicator, through nccl4py (`nccl.core`): what the kernels do not cover.

An extra (`pip install 'tricomm[nccl]'`), imported when a group first needs it, and found missing jointly: where one
rank lacks it, all say which. Every call is enqueued on the caller's current stream. Tensors are contiguous, on the
communicator's device, and checked by whoever calls. What only moves goes as bytes, so every dtype can be moved;
gather, scatter and uneven exchanges are grouped sends and receives, as in ProcessGroupNCCL.
"""

from __future__ import annotations

import importlib
import struct
import time
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch.distributed.distributed_c10d import Store

from tricomm.errors import GroupAborted, InvalidArgument, RendezvousError, ResourceError
from tricomm.store.deadline import Bounded, Worker, first_line

_IN_PROGRESS = 7  # ncclInProgress; 0 is success, all else an error
_TEXT = 200
_HEAD = struct.Struct(f"<4s?128s{_TEXT}s")  # magic, usable, unique id (of rank 0), why not
_MAGIC = b"TCNC"
_REDUCED = frozenset({
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int8, torch.uint8, torch.int32, torch.int64,
    torch.uint32, torch.uint64, torch.bool, torch.float8_e4m3fn, torch.float8_e5m2,
})  # fmt: skip
_BOOL_OPS = {"sum": "MAX", "max": "MAX", "prod": "MIN", "min": "MIN"}  # bool goes as uint8: sum means any
_OPS = {"sum": "SUM", "avg": "AVG", "min": "MIN", "max": "MAX", "prod": "PROD"}


def open_nccl(store: Store, rank: int, world_size: int, device: torch.device, timeout: float) -> Nccl:
    """Meet over `store` and make NCCL's communicator; every rank calls it, once for a store.

    Raises `ResourceError` on all ranks where nccl4py, libnccl or the communicator is missing or broken on one,
    naming it; `RendezvousError` where a rank does not come within `timeout` seconds.
    """
    core, fault = _load()
    unique_id = b""
    if core is not None and rank == 0:
        try:
            unique_id = bytes(core.get_unique_id())
        except Exception as error:
            fault = f"libnccl gives no unique id: {first_line(error)}"
    said = _exchange(store, rank, world_size, unique_id, fault, "open", timeout)
    broken = [f"rank {r}: {text}" for r, (_, text) in enumerate(said) if text]
    if broken:
        raise ResourceError(f"NCCL cannot be used: {'; '.join(broken)}. Install it on every rank: tricomm[nccl]")
    comm, fault = _init(core, rank, world_size, said[0][0], device, timeout)
    said = _exchange(store, rank, world_size, b"", fault, "init", timeout)
    broken = [f"rank {r}: {text}" for r, (_, text) in enumerate(said) if text]
    if broken:
        if comm is not None:
            comm.abort()
        raise ResourceError(f"NCCL's communicator cannot be made: {'; '.join(broken)}")
    return Nccl(core, comm, rank, world_size, device)


def _load() -> tuple[Any, str]:
    """The module, or why there is none."""
    try:
        core: Any = importlib.import_module("nccl.core")
        if core.get_version().libnccl is None:
            return None, "nccl4py finds no libnccl"
    except Exception as error:
        return None, f"nccl4py cannot be used ({first_line(error)})"
    return core, ""


def _init(core: Any, rank: int, world_size: int, unique_id: bytes, device: torch.device, timeout: float) -> Any:
    """(communicator, "") or (None, why). NCCL waits for all ranks without a limit, so this does it with one."""
    worker = Worker("tricomm-nccl-init")

    def make() -> Any:
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            return core.Communicator.init(world_size, rank, core.UniqueId.from_bytes(unique_id))

    try:
        return worker.run(make, "ncclCommInitRank", timeout), ""
    except Exception as error:
        return None, first_line(error)
    finally:
        worker.close()


def _exchange(
    store: Store, rank: int, world_size: int, unique_id: bytes, fault: str, what: str, timeout: float
) -> list[tuple[bytes, str]]:
    """Every rank's unique id and fault."""
    bounded = Bounded(store, timeout + 0.5)
    end = time.monotonic() + timeout
    try:
        record = _HEAD.pack(_MAGIC, not fault, unique_id, fault.encode()[:_TEXT])
        bounded.set(f"tricomm/nccl/{what}/{rank}", record)
        said: list[tuple[bytes, str]] = []
        while len(said) < world_size:
            data = bounded.read(f"tricomm/nccl/{what}/{len(said)}")
            if data is not None:
                said.append(_parse(data, len(said)))
            elif time.monotonic() > end:
                raise RendezvousError(f"NCCL ({what}): rank {len(said)} did not come within {timeout:g} s")
            else:
                time.sleep(0.01)
        return said
    finally:
        bounded.close()


def _parse(data: bytes, rank: int) -> tuple[bytes, str]:
    if len(data) != _HEAD.size or not data.startswith(_MAGIC):
        raise RendezvousError(f"rank {rank} wrote {len(data)} bytes that are no NCCL record: same tricomm everywhere?")
    _, usable, unique_id, text = _HEAD.unpack(data)
    why = text.rstrip(b"\0").decode(errors="replace")
    return unique_id, "" if usable else why or "unusable"


class Nccl:
    """One group's NCCL communicator. Made by `open_nccl`; `close` is collective, `abort` is not."""

    def __init__(self, core: Any, comm: Any, rank: int, world_size: int, device: torch.device) -> None:
        self._core, self._comm = core, comm
        self.rank, self.world_size, self.device = rank, world_size, device

    # Reductions

    def all_reduce(self, x: torch.Tensor, op: str = "sum", out: torch.Tensor | None = None) -> None:
        kind = self._op(op, x.dtype, "all_reduce")
        self._ready().allreduce(_flat(x), _flat(x if out is None else out), kind, stream=self._stream())

    def reduce(self, x: torch.Tensor, dst: int, op: str = "sum") -> None:
        kind = self._op(op, x.dtype, "reduce")
        self._ready().reduce(_flat(x), _flat(x), kind, root=dst, stream=self._stream())

    def reduce_scatter(self, x: torch.Tensor, out: torch.Tensor, op: str = "sum") -> None:
        kind = self._op(op, x.dtype, "reduce_scatter")
        if x.numel():  # nccl4py refuses an empty one, and there is nothing to do
            self._ready().reduce_scatter(_flat(x), _flat(out), kind, stream=self._stream())

    # Movements, as bytes

    def broadcast(self, x: torch.Tensor, src: int) -> None:
        self._ready().broadcast(_bytes(x), _bytes(x), src, stream=self._stream())

    def all_gather(self, x: torch.Tensor, out: torch.Tensor) -> None:
        self._ready().allgather(_bytes(x), _bytes(out), stream=self._stream())

    def gather(self, x: torch.Tensor, dst: int, out: torch.Tensor | None) -> None:
        """`out` is needed on `dst` alone."""
        rows = _rows(out, [x.nbytes] * self.world_size) if self.rank == dst else []
        self._grouped([(dst, _bytes(x))], list(enumerate(rows)))

    def scatter(self, x: torch.Tensor | None, src: int, out: torch.Tensor) -> None:
        """`x` is needed on `src` alone."""
        rows = _rows(x, [out.nbytes] * self.world_size) if self.rank == src else []
        self._grouped(list(enumerate(rows)), [(src, _bytes(out))])

    def all_to_all_v(
        self, x: torch.Tensor, in_splits: Sequence[int], out_splits: Sequence[int], out: torch.Tensor
    ) -> None:
        """Splits count rows of dimension 0."""
        row = x.nbytes // max(1, x.shape[0]) or out.nbytes // max(1, out.shape[0])
        send, receive = _rows(x, [n * row for n in in_splits]), _rows(out, [n * row for n in out_splits])
        self._grouped(list(enumerate(send)), list(enumerate(receive)))

    def all_to_all(self, x: torch.Tensor, out: torch.Tensor) -> None:
        splits = [x.shape[0] // self.world_size] * self.world_size
        self.all_to_all_v(x, splits, splits, out)

    def send(self, x: torch.Tensor, dst: int) -> None:
        self._grouped([(dst, _bytes(x))], [])

    def recv(self, x: torch.Tensor, src: int) -> None:
        self._grouped([], [(src, _bytes(x))])

    def barrier(self) -> None:
        self.all_reduce(torch.zeros(1, dtype=torch.int32, device=self.device))

    # Life

    def check(self) -> None:
        """Poll NCCL's asynchronous errors; raises `GroupAborted`, and then the communicator is gone."""
        if self._comm is None:
            raise GroupAborted(f"rank {self.rank}: NCCL's communicator is closed; make a new group")
        code = int(self._comm.get_async_error())
        if code not in (0, _IN_PROGRESS):
            text = f"rank {self.rank}: NCCL reports error {code} ({self._comm.get_last_error()}); make a new group"
            self.abort()
            raise GroupAborted(text)

    def abort(self) -> None:
        """Make kernels in flight leave, and forget the communicator. Idempotent."""
        comm, self._comm = self._comm, None
        if comm is not None:
            comm.abort()

    def close(self) -> None:
        """Wait for what is in flight and end; idempotent."""
        comm, self._comm = self._comm, None
        if comm is not None:
            comm.finalize()
            comm.destroy()

    def _ready(self) -> Any:
        self.check()
        return self._comm

    def _stream(self) -> int:
        return torch.cuda.current_stream(self.device).cuda_stream if self.device.type == "cuda" else 0

    def _grouped(self, sends: list[tuple[int, torch.Tensor]], receives: list[tuple[int, torch.Tensor]]) -> None:
        comm, stream = self._ready(), self._stream()
        with self._core.group():
            for peer, data in sends:
                if data.numel():
                    comm.send(data, peer, stream=stream)
            for peer, data in receives:
                if data.numel():
                    comm.recv(data, peer, stream=stream)

    def _op(self, op: str, dtype: torch.dtype, what: str) -> Any:
        table = _BOOL_OPS if dtype == torch.bool else _OPS
        if dtype not in _REDUCED or op not in table:
            raise InvalidArgument(f"{what}: NCCL has no {op} of {dtype}; convert the tensor, or use another operation")
        return getattr(self._core, table[op])


def _flat(x: torch.Tensor) -> torch.Tensor:
    return x.detach().view(-1)


def _bytes(x: torch.Tensor) -> torch.Tensor:
    return _flat(x).view(torch.uint8)


def _rows(x: torch.Tensor | None, counts: list[int]) -> list[torch.Tensor]:
    assert x is not None, "the rank that gives or takes all rows has a tensor for them"
    return list(_bytes(x).split(counts))
