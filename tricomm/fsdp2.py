"""FSDP2 over symmetric memory: the kernels read in place the buffers that FSDP has written.

    model = fully_shard(model)
    tricomm.fsdp2.use(model)                    # or model.set_custom_all_gather(AllGather()), module by module

FSDP copies a layer's shard into its row of a buffer, gathers the rows in place, and copies the parameters out. It
copies a layer's gradients into a second buffer, and reduces that into another tensor. Both buffers are symmetric memory
here, so nothing is staged before a call. A buffer is reused once FSDP has dropped it, by the stream rules of torch's
allocator.

All ranks lend the same buffers, because FSDP allocates and drops them at the same points of its program. Calls
therefore refer to the memory, not to the lent tensor, because worker threads may drop a call's tensors at any time. If
ranks lend different buffers nevertheless, they get `CollectiveMismatch`, because a buffer's number is part of a call.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from tricomm.c10d.group_calls import GroupCall
from tricomm.c10d.group_creation import wrap
from tricomm.c10d.process_group import TricommGroup
from tricomm.c10d.torch_names import c10d
from tricomm.core.symmetric import Symmetric
from tricomm.errors import InvalidArgument

__all__ = ["MAX_BYTES", "AllGather", "ReduceScatter", "use"]

MAX_BYTES = 512 << 20


@dataclass
class _Buffer:
    """`stream`: the stream on which it was last lent. `lent`: whether FSDP holds it; any thread may return it."""

    handle: Symmetric
    stream: Any = None
    lent: bool = False

    def give_back(self) -> None:
        self.lent = False


class _Buffers:
    """Symmetric memory of one group for one collective, lent as tensors."""

    def __init__(self, what: str, collective: str, group: Any, max_bytes: int) -> None:
        if isinstance(max_bytes, bool) or not isinstance(max_bytes, int) or max_bytes < 0:
            raise InvalidArgument(f"{what}: max_bytes={max_bytes!r}: a number of bytes is needed")
        self._what, self._collective, self._max_bytes = what, collective, max_bytes
        self._given: Any = dist.group.WORLD if group is None else group
        self.group: TricommGroup = wrap(self._given)
        self.nbytes = 0
        self._closed = False
        self._buffers: dict[tuple[int, torch.dtype, torch.device], list[_Buffer]] = {}
        self._by_address: dict[int, _Buffer] = {}

    def allocate(self, size: Sequence[Any], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A buffer of `size`, or an ordinary tensor if no kernel takes the calls, or `max_bytes` are in use."""
        numel = math.prod(int(n) for n in size)
        device = torch.device("cuda", torch.cuda.current_device()) if _unnumbered(device) else torch.device(device)
        buffers = self._buffers.setdefault((numel, dtype, device), [])
        buffer = next((b for b in buffers if not b.lent), None) or self._new(buffers, numel, dtype, device)
        if buffer is None:
            return torch.empty(*size, dtype=dtype, device=device)
        if device.type == "cuda":
            stream = torch.cuda.current_stream(device)
            # earlier users of the buffer are ordered before the next work of `stream`
            if buffer.stream not in (None, stream):
                stream.wait_stream(buffer.stream)
            buffer.stream = stream
        buffer.lent = True
        return buffer.handle.lend(tuple(int(n) for n in size), buffer.give_back)

    def _new(self, buffers: list[_Buffer], numel: int, dtype: torch.dtype, device: torch.device) -> _Buffer | None:
        size, nbytes = self.group.size(), numel * dtype.itemsize
        if self._closed or size == 1 or not numel or numel % size or self.nbytes + nbytes > self._max_bytes:
            return None
        x = torch.empty(0, dtype=dtype, device="meta")  # carries the dtype
        gathers = self._collective == "all_gather"
        op, count = ("none", numel // size) if gathers else ("sum", numel)
        handle = self.group.symmetric(GroupCall(self._collective, x, x, op, count=count, device=device), numel)
        if handle is None:
            return None
        self.nbytes += nbytes
        buffers.append(_Buffer(handle))
        self._by_address[handle.local.data_ptr()] = buffers[-1]
        return buffers[-1]

    def handle_of(self, x: torch.Tensor) -> Symmetric | None:
        """The symmetric memory that `x` covers entirely, if it was lent here; else None."""
        buffer = self._by_address.get(x.data_ptr())
        if buffer is None or not buffer.lent or buffer.handle.shape != (x.numel(),) or buffer.handle.dtype != x.dtype:
            return None
        return buffer.handle

    def check(self, group: Any) -> None:
        """Raises `InvalidArgument` if a call is for another group than this memory."""
        if group is not self._given and group is not self.group:
            raise InvalidArgument(
                f"{self._what}: it was made for group {self.group.group_name!r}, and FSDP calls it for "
                f"{getattr(group, 'group_name', group)!r}; make one with group=mesh.get_group(...) for each mesh"
            )

    def close(self) -> None:
        self._closed = True
        for buffers in self._buffers.values():
            for buffer in buffers:
                buffer.handle.close()
        self._buffers.clear()
        self._by_address.clear()
        self.nbytes = 0


def _unnumbered(device: Any) -> bool:
    device = torch.device(device)
    return device.type == "cuda" and device.index is None


class AllGather:
    """For `FSDPModule.set_custom_all_gather`: gathers in place, in symmetric memory.

    `group` is the module's mesh group (default: the default group); a group of another backend is wrapped, as by
    `tricomm.wrap`, which all its ranks do together. One instance serves any number of modules. It keeps at most
    `max_bytes` of memory on each rank, which is released by `close()` or with the group. Calls that NCCL runs, or that
    are sent over TCP, use ordinary memory. Raises `InvalidArgument` if FSDP calls it for another group.
    """

    def __init__(self, group: Any = None, max_bytes: int = MAX_BYTES) -> None:
        self._buffers = _Buffers("AllGather", "all_gather", group, max_bytes)

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """The uninitialised output of the next call; this rank's row of it is the input. All ranks call it together."""
        return self._buffers.allocate(size, dtype, device)

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, async_op: bool = False
    ) -> Any:
        """Gather every rank's `input_tensor` into `output_tensor`; a `Work` with `async_op=True`, else None."""
        buffers = self._buffers
        buffers.check(group)
        options = c10d.AllgatherOptions()
        options.asyncOp = async_op
        handle = buffers.handle_of(output_tensor)
        if handle is not None:
            row = handle.local.view(buffers.group.size(), -1)[buffers.group.rank()]
            if input_tensor.data_ptr() == row.data_ptr():
                output_tensor, input_tensor = handle.local, row
            else:
                handle = None
        return _ended(buffers.group.all_gather_single(output_tensor, input_tensor, options, handle), async_op)

    @property
    def nbytes(self) -> int:
        """Bytes of symmetric memory that it has allocated on this rank."""
        return self._buffers.nbytes

    def close(self) -> None:
        """Release the memory, all ranks together, when FSDP uses none of it. Idempotent; later calls use ordinary
        memory."""
        self._buffers.close()


class ReduceScatter:
    """For `FSDPModule.set_custom_reduce_scatter`: reduces out of symmetric memory. Arguments as of `AllGather`.

    FSDP allocates the input of a call and then its output. Peers read only the input, so the output, which becomes the
    gradients, is an ordinary tensor.
    """

    def __init__(self, group: Any = None, max_bytes: int = MAX_BYTES) -> None:
        self._buffers = _Buffers("ReduceScatter", "reduce_scatter", group, max_bytes)
        self._input: weakref.ref[torch.Tensor] | None = None  # of the call that FSDP prepares

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """The input of the next call, and then its output, uninitialised; all ranks call it together."""
        prepared = self._input() if self._input is not None else None
        numel = math.prod(int(n) for n in size)
        if prepared is not None and prepared.numel() == numel * self._buffers.group.size():
            return torch.empty(*size, dtype=dtype, device=device)
        lent = self._buffers.allocate(size, dtype, device)
        self._input = weakref.ref(lent)
        return lent

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, op: Any, async_op: bool = False
    ) -> Any:
        """Reduce `input_tensor` over the ranks, row r to rank r; a `Work` with `async_op=True`, else None."""
        buffers, self._input = self._buffers, None
        buffers.check(group)
        options = c10d.ReduceScatterOptions()
        options.asyncOp, options.reduceOp = async_op, op
        handle = buffers.handle_of(input_tensor)
        if handle is not None:
            input_tensor = handle.local
        return _ended(buffers.group.reduce_scatter_single(output_tensor, input_tensor, options, handle), async_op)

    def close(self) -> None:
        """See `AllGather.close`."""
        self._buffers.close()

    @property
    def nbytes(self) -> int:
        """Bytes of symmetric memory that it has allocated on this rank."""
        return self._buffers.nbytes


def use(model: torch.nn.Module, group: Any = None, max_bytes: int = MAX_BYTES) -> tuple[AllGather, ReduceScatter]:
    """Give every FSDP module of `model` one `AllGather` and one `ReduceScatter`, which it returns.

    Raises `InvalidArgument` if `model` has no FSDP module: call `fully_shard` first.
    """
    from torch.distributed.fsdp import FSDPModule

    modules: list[Any] = [module for module in model.modules() if isinstance(module, FSDPModule)]
    if not modules:
        raise InvalidArgument(f"fsdp2.use: {type(model).__name__} has no FSDP module; call fully_shard first")
    gather, scatter = AllGather(group, max_bytes), ReduceScatter(group, max_bytes)
    for module in modules:
        module.set_custom_all_gather(gather)
        module.set_custom_reduce_scatter(scatter)
    return gather, scatter


def _ended(work: Any, async_op: bool) -> Any:
    if async_op:
        return work
    work.wait()
    return None
