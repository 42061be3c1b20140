"""The backend: a `ProcessGroup` that turns every c10d call into a `GroupCall` for the group's dispatcher.

Every collective is overridden, and none calls `super()`, because an inherited one runs in C++ with the GIL held, which
deadlocks under DDP. Names differ between versions of torch (`_allgather_base` is `all_gather_single` from 2.13 on), so
the group has both.
"""

from __future__ import annotations

from contextlib import suppress
from datetime import timedelta
from numbers import Integral
from typing import Any

import torch
import torch.distributed as dist

from tricomm.c10d import group_calls, list_calls
from tricomm.c10d.call_guard import WrapperTensor, guard_methods, is_refusal, sends
from tricomm.c10d.capabilities import GroupCapabilities, GroupConfig
from tricomm.c10d.dispatch import Dispatcher
from tricomm.c10d.dtype_emulation import as_bytes, premultiply
from tricomm.c10d.fallback_backends import Backends, CallBlock
from tricomm.c10d.group_calls import GroupCall
from tricomm.c10d.messages import CpuMessages
from tricomm.c10d.torch_names import AnsweringGroup, NoBackend, c10d
from tricomm.c10d.work_handles import CombinedWork, FinishedWork, in_backward, limit_seconds, raise_in_backward
from tricomm.core.entry_guard import name_refusal
from tricomm.errors import GroupAborted, InvalidArgument
from tricomm.metrics.counters import count_fallback
from tricomm.options import Options


@guard_methods(
    "_allreduce", "allreduce_coalesced", "broadcast", "reduce", "allgather", "allgather_coalesced", "all_gather_single",
    "_allgather_base", "all_gather_single_coalesced", "allgather_into_tensor_coalesced", "gather", "scatter",
    "reduce_scatter", "reduce_scatter_single", "_reduce_scatter_base", "reduce_scatter_single_coalesced",
    "reduce_scatter_tensor_coalesced", "alltoall", "all_to_all_single", "alltoall_base", "send", "recv",
    "recv_anysource", "batch", "barrier", "monitored_barrier", "symmetric",
)  # fmt: skip
class TricommGroup(AnsweringGroup):
    """A c10d group over tricomm. Made by `dist.init_process_group("tricomm")` and its relatives, or by `wrap`."""

    __slots__ = ("_fast_path",)  # in a subclass of a C++ class, a slot is read faster than an attribute

    def __init__(
        self, config: GroupConfig, agreed: GroupCapabilities, backends: Backends, options: Options | None = None
    ) -> None:
        super().__init__(config)
        self._backends, self._made, self._serves = backends, 0, frozenset(backends.devices)
        self._dispatcher = Dispatcher(config, agreed, backends, options)
        self._fast_path = self._dispatcher.fast_path
        self._block = CallBlock()
        self._point_to_point = None
        if backends.transport is not None and "cpu" not in backends.native:
            recorders = self._dispatcher.recorders
            self._point_to_point = CpuMessages(backends.transport, config.timeout, str(config), recorders)
        backends.register(self)

    @property
    def batch_invariant(self) -> bool:
        """Whether the bits of its reductions depend on rank order alone."""
        return self._dispatcher.batch_invariant

    def _get_sequence_number_for_group(self) -> int:
        """The number of collectives that this rank has made."""
        return self._made + self._fast_path.made

    def _get_backend(self, device: torch.device) -> Any:
        return self._backend_for(torch.device(device))

    # In place

    def allreduce(self, tensors: Any, opts: Any = None, timeout: timedelta | None = None) -> Any:
        # On one line, so that Python checks for interrupts only inside of the `try`.
        try:
            return self._fast_path.all_reduce(tensors, opts) or self._allreduce(tensors, opts, timeout)  # noqa: E701
        except BaseException as error:
            if not is_refusal(error):
                self.interrupted(error)
            raise

    def _allreduce(self, tensors: Any, opts: Any = None, timeout: timedelta | None = None) -> Any:
        opts = group_calls.options(c10d.AllreduceOptions, opts, "reduceOp", timeout)
        x = tensors if isinstance(tensors, torch.Tensor) else tensors[0] if len(tensors) == 1 else None
        if x is not None and x.layout != torch.strided and x.device.type == "cpu":
            call = GroupCall("all_reduce_sparse", op=group_calls.operation(opts.reduceOp), result=[x], keep=[x])
        else:
            x, op = group_calls.single_tensor(tensors, "all_reduce"), group_calls.operation(opts.reduceOp)
            call = group_calls.in_place("all_reduce", x, op, result=tensors)
        return self._submit([call], opts, ("allreduce",), tensors, opts)

    def allreduce_coalesced(self, tensors: list[torch.Tensor], opts: Any = None) -> Any:
        opts = opts or c10d.AllreduceCoalescedOptions()
        op = group_calls.operation(opts.reduceOp)
        batch = [
            group_calls.in_place("all_reduce", group_calls.checked_tensor(x, "all_reduce"), op, result=[x])
            for x in tensors
        ]
        return self._submit(batch, opts, ("allreduce_coalesced",), tensors, opts)

    def broadcast(self, tensors: Any, opts: Any = None, timeout: timedelta | None = None) -> Any:
        opts = group_calls.options(c10d.BroadcastOptions, opts, "rootRank", timeout)
        x = group_calls.single_tensor(tensors, "broadcast")
        call = group_calls.in_place("broadcast", x, root=self._checked_root(opts, "broadcast"), result=tensors)
        return self._submit([call], opts, ("broadcast",), tensors, opts)

    def reduce(self, tensors: Any, opts: Any = None, op: Any = None, timeout: timedelta | None = None) -> Any:
        opts = group_calls.options(c10d.ReduceOptions, opts, "rootRank", timeout)
        if op is not None:
            opts.reduceOp = op
        x, name = group_calls.single_tensor(tensors, "reduce"), group_calls.operation(opts.reduceOp)
        call = group_calls.in_place("reduce", x, name, self._checked_root(opts, "reduce"), result=tensors)
        return self._submit([call], opts, ("reduce",), tensors, opts)

    # Gathering

    def allgather(self, outs: Any, xs: Any, opts: Any = None, timeout: timedelta | None = None) -> Any:
        opts = group_calls.options(c10d.AllgatherOptions, opts, None, timeout)
        rows = list_calls.tensor_list(outs, "all_gather output list", self.size())
        call = list_calls.all_gather(rows, group_calls.single_tensor(xs, "all_gather"), self.rank(), result=outs)
        return self._submit([call], opts, ("allgather",), outs, xs, opts)

    def allgather_coalesced(self, outs: list[list[torch.Tensor]], xs: list[torch.Tensor], opts: Any = None) -> Any:
        """`outs` has a list per rank, with a tensor per input."""
        opts = opts or c10d.AllgatherOptions()
        if len(outs) != self.size() or any(len(row) != len(xs) for row in outs):
            raise InvalidArgument(
                f"all_gather_coalesced: {self.size()} lists of {len(xs)} outputs are needed, one list per rank; found "
                f"lists of {[len(row) for row in outs]}"
            )
        batch = []
        for x, *row in zip(xs, *outs, strict=True):
            rows = [group_calls.checked_tensor(out, "all_gather_coalesced output") for out in row]
            given = group_calls.checked_tensor(x, "all_gather_coalesced")
            batch.append(list_calls.all_gather(rows, given, self.rank(), rows))
        return self._submit(batch, opts, ("allgather_coalesced",), outs, xs, opts)

    def all_gather_single(self, out: torch.Tensor, x: torch.Tensor, opts: Any = None, handle: Any = None) -> Any:
        """`handle`: the `symmetric` memory that contains `out`."""
        opts = opts or c10d.AllgatherOptions()
        x, y = (group_calls.checked_tensor(t, "all_gather_into_tensor") for t in (x, out))
        call = group_calls.all_gather_single(y, x, self.size(), handle)
        return self._submit([call], opts, ("all_gather_single", "_allgather_base"), out, x, opts)

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(self, outs: list[torch.Tensor], xs: list[torch.Tensor], opts: Any = None) -> Any:
        opts = opts or c10d.AllgatherOptions()
        pairs = list(zip(outs, xs, strict=True))
        return self._coalesced(pairs, opts, group_calls.all_gather_single, self.all_gather_single)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def gather(self, outs: Any, xs: Any, opts: Any = None, timeout: timedelta | None = None) -> Any:
        opts = group_calls.options(c10d.GatherOptions, opts, "rootRank", timeout)
        root = self._checked_root(opts, "gather")
        rows = self._root_list(outs, root, "gather output")
        call = list_calls.gather(rows, group_calls.single_tensor(xs, "gather"), root)
        return self._submit([call], opts, ("gather",), outs, xs, opts)

    # Scattering

    def scatter(self, outs: Any, xs: Any, opts: Any = None, timeout: timedelta | None = None) -> Any:
        opts = group_calls.options(c10d.ScatterOptions, opts, "rootRank", timeout)
        root = self._checked_root(opts, "scatter")
        parts = self._root_list(xs, root, "scatter input")
        call = list_calls.scatter(group_calls.single_tensor(outs, "scatter"), parts, root, self.size())
        return self._submit([call], opts, ("scatter",), outs, xs, opts)

    def reduce_scatter(self, outs: Any, xs: Any, opts: Any = None, timeout: timedelta | None = None) -> Any:
        opts = group_calls.options(c10d.ReduceScatterOptions, opts, "reduceOp", timeout)
        parts = list_calls.tensor_list(xs, "reduce_scatter input list", self.size())
        op = group_calls.operation(opts.reduceOp)
        call = list_calls.reduce_scatter(group_calls.single_tensor(outs, "reduce_scatter"), parts, op, self.rank())
        return self._submit([call], opts, ("reduce_scatter",), outs, xs, opts)

    def reduce_scatter_single(self, out: torch.Tensor, x: torch.Tensor, opts: Any = None, handle: Any = None) -> Any:
        """`handle`: the `symmetric` memory that contains `x`."""
        opts = opts or c10d.ReduceScatterOptions()
        x, y = (group_calls.checked_tensor(t, "reduce_scatter_tensor") for t in (x, out))
        call = group_calls.reduce_scatter_single(y, x, group_calls.operation(opts.reduceOp), self.size(), handle)
        return self._submit([call], opts, ("reduce_scatter_single", "_reduce_scatter_base"), out, x, opts)

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(
        self, outs: list[torch.Tensor], xs: list[torch.Tensor], opts: Any = None
    ) -> Any:
        opts = opts or c10d.ReduceScatterOptions()
        op = group_calls.operation(opts.reduceOp)

        def make(out: torch.Tensor, x: torch.Tensor, world_size: int) -> GroupCall:
            return group_calls.reduce_scatter_single(out, x, op, world_size)

        return self._coalesced(list(zip(outs, xs, strict=True)), opts, make, self.reduce_scatter_single)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def symmetric(self, call: GroupCall, numel: int) -> Any:
        """As `Dispatcher.symmetric`: the memory to pass as `handle`, or None."""
        return self._dispatcher.symmetric(call, numel)

    # All to all

    def alltoall(self, outs: Any, xs: Any, opts: Any = None, timeout: timedelta | None = None) -> Any:
        opts = group_calls.options(c10d.AllToAllOptions, opts, None, timeout)
        rows = list_calls.tensor_list(outs, "all_to_all output list", self.size())
        parts = list_calls.tensor_list(xs, "all_to_all input list", self.size())
        return self._submit([list_calls.all_to_all(rows, parts)], opts, ("alltoall",), outs, xs, opts)

    def all_to_all_single(
        self, out: torch.Tensor, x: torch.Tensor, out_splits: Any, in_splits: Any, opts: Any = None
    ) -> Any:
        opts = group_calls.options(c10d.AllToAllOptions, opts, None, None)
        y, z = (group_calls.checked_tensor(t, "all_to_all_single") for t in (out, x))
        call = group_calls.all_to_all_single(y, z, out_splits or [], in_splits or [], self.size())
        names = ("all_to_all_single", "alltoall_base")
        return self._submit([call], opts, names, out, x, out_splits or [], in_splits or [], opts)

    alltoall_base = all_to_all_single

    # Point to point, barriers

    def send(self, tensors: Any, dst: int, tag: int = 0) -> Any:
        return self._message("send", tensors, dst, tag)

    def recv(self, tensors: Any, src: int, tag: int = 0) -> Any:
        return self._message("recv", tensors, src, tag)

    def recv_anysource(self, tensors: Any, tag: int = 0) -> Any:
        return self._message("recv", tensors, None, tag)

    def batch(self, ops: list[Any], run: Any) -> list[Any]:
        """The handles of `ops`, with one for all messages that NCCL sends. Raises before anything is sent if one of
        `ops` cannot be made. Wrapper tensors are sent by `run`, torch's `batch_isend_irecv`, which unwraps them.
        """
        messages = []
        for op in ops:
            what = "send" if op.op is dist.isend else "recv"
            with suppress(WrapperTensor):
                x = self._checked_message(what, op.tensor, op.group_peer, op.tag)
                x = torch.view_as_real(x) if x.is_complex() else x  # as `dist.isend` sends it
                messages.append((what, x, op.group_peer, op.tag))
        if len(messages) < len(ops):
            return self._block.together(lambda: run(ops))

        def send() -> list[Any]:
            works = [self._routed_message(*message) for message in messages]
            return [work for work in works if work is not None]  # NCCL has no handle for a call in a group

        return self._block.together(send)

    def barrier(self, opts: Any = None, timeout: timedelta | None = None) -> Any:
        opts = group_calls.options(c10d.BarrierOptions, opts, None, timeout)
        device = opts.device
        if device is None or device.type not in self._backends.devices:
            cuda = bool(opts.device_ids) or "cpu" not in self._backends.devices
            device = torch.device("cpu")
            if cuda:
                device = torch.device("cuda", opts.device_ids[0]) if opts.device_ids else self._dispatcher.gpu()
        return self._submit([group_calls.barrier(device)], opts, ("barrier",), opts)

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """As `dist.monitored_barrier`, which torch before 2.15 refuses by name for every backend but gloo.

        Every barrier names all missing ranks, so `wait_all_ranks` has no effect.
        """
        self._dispatcher.check_usable("monitored_barrier")
        opts = c10d.BarrierOptions()
        opts.asyncOp = False
        opts.timeout = self._config.timeout if limit_seconds(timeout) is None else timeout
        self._submit([group_calls.barrier(torch.device("cpu"))], opts, ("barrier",), opts).wait()

    def _start_coalescing(self, device: torch.device) -> None:
        self._block.begin()

    def _end_coalescing(self, device: torch.device) -> Any:
        return self._block.end()

    # Life

    def shutdown(self) -> None:
        """End the group; running calls get a moment to end. Idempotent."""
        self._dispatcher.close()
        self._backends.shutdown()

    def abort(self) -> None:
        self._dispatcher.abort_waits(GroupAborted(f"rank {self.rank()} aborted the group"))
        self._dispatcher.close()
        self._backends.abort()

    def interrupted(self, error: BaseException) -> None:
        """Abort the group, because an exception of other code has left a call. Raises `ResourceError` if the system
        refused a resource."""
        self._dispatcher.interrupted(error)
        name_refusal(error)

    def _submit(self, batch: list[GroupCall], opts: Any, names: tuple[str, ...], *args: Any) -> Any:
        if not batch:
            return FinishedWork([])
        group_calls.read_first(batch, self.rank())
        timeout = None if limit_seconds(opts.timeout) is None else opts.timeout
        for call in batch:
            call.timeout, call.async_op = timeout, opts.asyncOp
            premultiply(call, getattr(opts, "reduceOp", None), self.rank())
        device = batch[0].device
        if any(call.device != device for call in batch):
            raise InvalidArgument(f"{batch[0].collective}: tensors of several devices in one call; make one call each")
        if device.type not in self._serves:
            self._backend_for(device)  # raises

        def native() -> Any:
            backend = self._backend_for(device)
            name = next((n for n in names if hasattr(backend, n)), names[0])
            return getattr(self._block.entered(backend), name)(*args)

        self._made += 1
        work = self._dispatcher.run(batch, native)
        self._block.add(work)
        if work is not None and in_backward():  # NCCL has no handle for a synchronous call
            raise_in_backward(work)
        return work

    def _coalesced(self, pairs: list[tuple[torch.Tensor, torch.Tensor]], opts: Any, make: Any, single: Any) -> Any:
        """A coalesced call: on the CPU one batch, else one call after another, because torch before 2.14 has no binding
        for NCCL's."""
        if all(out.device.type == "cpu" for out, _ in pairs):
            return self._submit([make(out, x, self.size()) for out, x in pairs], opts, ())
        return CombinedWork([single(out, x, opts) for out, x in pairs])

    def _backend_for(self, device: torch.device) -> Any:
        """torch's backend for `device`, or the group itself if its TCP connections serve the device."""
        native = self._backends.native.get(device.type)
        if native is not None:
            return native
        served = self._backends.devices
        if device.type not in served:
            names = ", ".join(served) or "no device"
            raise NoBackend(
                f"{self._config}: a tensor on {device} was given; this group serves {names}: move the "
                f"tensor, or make a group with a backend for {device.type}"
            )
        return self

    def _checked_root(self, opts: Any, what: str) -> int:
        root = int(opts.rootRank)
        if not 0 <= root < self.size():
            raise InvalidArgument(f"{what}: root rank {root} is not in 0..{self.size() - 1} of this group")
        return root

    def _root_list(self, tensors: Any, root: int, what: str) -> list[torch.Tensor]:
        """A list of one tensor per rank on the root, and nothing on the others."""
        if self.rank() == root:
            return list_calls.tensor_list(tensors, f"{what} list", self.size())
        given = sum(len(row) if isinstance(row, list | tuple) else 1 for row in tensors)
        if given:
            raise InvalidArgument(f"{what} list: only rank {root} gives one, rank {self.rank()} gave {given} tensors")
        return []

    def _message(self, what: str, tensors: Any, peer: int | None, tag: int) -> Any:
        return self._routed_message(what, self._checked_message(what, tensors, peer, tag), peer, tag)

    def _routed_message(self, what: str, x: torch.Tensor, peer: int | None, tag: int) -> Any:
        route = self._dispatcher.router(x.device).route(what, x.dtype, "none", x.nbytes)
        count_fallback(route.backend, what, x.nbytes)
        return self._sent(what, x, peer, tag)

    @sends
    def _sent(self, what: str, x: torch.Tensor, peer: int | None, tag: int) -> Any:
        recorders = self._dispatcher.recorders
        with recorders.shown(what, x, peer, tag):
            if self._point_to_point is not None and x.device.type == "cpu":
                work: Any = getattr(self._point_to_point, what)(x, peer, tag)
                work.entry = recorders.message(what, x, peer, tag)
            else:
                # A native backend on the CPU is the Gloo of a wrapped group, which lacks some types.
                given = [as_bytes(x.view(-1)) if x.device.type == "cpu" else x]
                backend = self._block.entered(self._backend_for(x.device))
                work = backend.recv_anysource(given, tag) if peer is None else getattr(backend, what)(given, peer, tag)
                recorders.message(what, x, peer, tag)
        self._block.add(work)
        return work

    def _checked_message(self, what: str, tensors: Any, peer: int | None, tag: int) -> torch.Tensor:
        self._dispatcher.check_usable(what)
        for name, value in (("rank", peer), ("tag", tag)):
            if not (isinstance(value, Integral) or (name == "rank" and value is None and what == "recv")):
                raise InvalidArgument(f"{what}: {name} {value!r} is no integer")
        x = group_calls.single_tensor(tensors, what)
        rank, size = self._config.rank, self._config.world_size  # `rank()` and `size()` take microseconds
        if peer is not None and not 0 <= peer < size:
            raise InvalidArgument(f"{what}: rank {peer} is not in 0..{size - 1} of this group")
        if peer == rank:
            raise InvalidArgument(f"{what}: rank {peer} is this rank itself; copy the tensor instead")
        if not x.is_contiguous() or x.is_neg() or x.is_conj():
            raise InvalidArgument(f"{what}: a contiguous tensor is needed, no view with another sign; pass x + 0")
        return x
