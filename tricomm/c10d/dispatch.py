"""Runs the calls of a c10d group: by the kernels or messages on the CPU, by the kernels or NCCL on CUDA."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch._C._distributed_c10d import PrefixStore

from tricomm.c10d import call_recording
from tricomm.c10d.call_guard import NOTHING_SENT, sends
from tricomm.c10d.call_recording import GroupRecorders
from tricomm.c10d.capabilities import GroupCapabilities, GroupConfig, options_for, torch_backend
from tricomm.c10d.cpu_calls import CpuCalls
from tricomm.c10d.fallback_backends import Backends
from tricomm.c10d.group_calls import GroupCall
from tricomm.c10d.streams import FastPath, GroupStream
from tricomm.communicator import Communicator
from tricomm.core import bootstrap
from tricomm.core.bootstrap import pick_device
from tricomm.core.fused.fused_call import FUSED
from tricomm.core.symmetric import Symmetric
from tricomm.errors import GroupAborted, InvalidArgument, RendezvousError, ResourceError, TricommError
from tricomm.metrics.counters import KERNELS, count_fallback
from tricomm.metrics.flight_recorder import FlightRecorder, off
from tricomm.options import Options
from tricomm.policy.backend_choice import BackendChoice, GroupFacts, Router
from tricomm.store.bounded_store import first_line
from tricomm.store.control import PackedDescriptor

_MOST_RECORDS = 1024
_CPU = torch.device("cpu")


class Dispatcher:
    """Runs one group's calls. Creates communicators and streams on first use.

    allreduce -> fast path (a call that was made before) -> communicator
    any call -> run -> CpuCalls, in its turn -> communicator, or messages over TCP
                       stream (CUDA)         -> communicator, or NCCL
    """

    def __init__(
        self, config: GroupConfig, agreed: GroupCapabilities, backends: Backends, options: Options | None
    ) -> None:
        self._config, self._agreed, self._backends, self._options = config, agreed, backends, options
        self.fast_path = FastPath()
        self.recorders = GroupRecorders(config, backends.devices)
        self._cpu = CpuCalls(config, agreed, backends, self.recorders)
        self._native = 0  # number of calls that NCCL has run without a communicator
        self._streams: dict[torch.device, GroupStream] = {}
        self._comms: dict[torch.device, Communicator] = {}
        self._no_kernels = dict(agreed.no_kernels)
        self._routers: dict[torch.device, Router] = {}
        self._records: dict[tuple[Any, ...], PackedDescriptor] = {}  # of calls that do not go to the kernels
        self._lost: GroupAborted | None = None  # set by an interrupted call
        self._closed = False

    @sends
    def run(self, batch: list[GroupCall], native: Callable[[], Any]) -> Any:
        """Run the calls of `batch`, which are on one device, one after another; returns a handle for all of them.

        `native` makes the same calls through NCCL.
        """
        self.check_usable(batch[0].collective)
        if self.batch_invariant or batch[0].wire:  # raises before anything is sent
            for call in batch:
                self.router(call.device).choice(*call.facts)
        return self._cpu.run(batch, self) if batch[0].device.type == "cpu" else self.on_cuda(batch, native)

    @property
    def batch_invariant(self) -> bool:
        """Whether the bits of its reductions depend on rank order alone; the same on all ranks."""
        return self._agreed.batch_invariant

    # Routes

    def router(self, device: torch.device) -> Router:
        """The router of the calls on `device`, whose facts are the same on all ranks."""
        router = self._routers.get(device)
        if router is None:
            config, agreed, kind = self._config, self._agreed, device.type
            why = self._no_kernels.get(kind, f"no {kind} kernels")
            facts = GroupFacts(
                kind, config.world_size, agreed.nodes, why, torch_backend(kind), batch_invariant=agreed.batch_invariant
            )
            router = self._routers[device] = Router(facts, config.name, config.rank, alone=False)
        return router

    def _route(self, call: GroupCall) -> BackendChoice:
        """The route of `call`; counts the call."""
        self._prepare(call)
        route = self.router(call.device).route(*call.facts, name=None if call.fused is None else FUSED)
        if route.backend != KERNELS:  # the communicator counts its own calls
            count_fallback(route.backend, call.collective, call.nbytes)
        return route

    def _prepare(self, call: GroupCall) -> None:
        """Make the kernels' communicator with the first call, whatever its route. Otherwise ranks whose calls differ,
        and therefore their routes, would wait for each other."""
        device = call.device
        if device in self._comms:
            return
        router = self.router(device)
        possible = router.facts.no_memory is None
        if possible and (router.choice(*call.facts).backend == KERNELS or not _capturing(device)):
            self._communicator(device)

    @sends
    def symmetric(self, call: GroupCall, numel: int) -> Symmetric | None:
        """Allocate memory of `numel` elements that the kernels read in place, for calls like `call`; called by all
        ranks together. It has no multicast address, because calls that gather or scatter do not use one.

        None if such calls do not go to the kernels, or if a graph is being captured.
        """
        self.check_usable("symmetric")
        made: list[Symmetric] = []

        def make() -> None:
            if _capturing(call.device):
                return
            self._prepare(call)
            if call.dtype is not None and self.router(call.device).choice(*call.facts).backend == KERNELS:
                made.append(self._comms[call.device].symmetric((numel,), call.dtype, multicast=False))

        if call.device.type == "cpu":
            self._cpu.between_calls(make, "symmetric", self)
        else:
            make()
        return made[0] if made else None

    def _communicator(
        self, device: torch.device, limit: float | None = None, on_wait: Callable[[], None] | None = None
    ) -> None:
        """Make the kernels' communicator; if the ranks cannot share memory after all, all ranks note the reason.
        `limit`, by default the group's timeout, and `on_wait` are for the rendezvous."""
        if _capturing(device):
            raise InvalidArgument(
                f"{self._config}: the first call of a group sets up its memory, and cannot be captured in a CUDA "
                "graph; make one call before the capture"
            )
        if any(comm.suspended for comm in self._comms.values()):
            raise InvalidArgument(
                f"{self._config}: suspended, and the first call on {device} would take memory: resume() comes first"
            )
        config, router = self._config, self.router(device)
        store = PrefixStore(f"kernels/{device.type}", config.store)
        try:
            options = options_for(self._options, config.timeout, device.type)
            options = replace(options, batch_invariant=self.batch_invariant, wire=self._agreed.wire)
            terms = bootstrap.terms(config.rank, config.world_size, device, config.timeout, options, limit)
            recorder: FlightRecorder | None = off()  # the queue records a CPU's calls
            if device.type == "cuda":  # one for each GPU, if this process uses several
                recorder = None if self._comms.keys() - {_CPU} else self.recorders.of("cuda")
            terms = replace(terms, router=router, recorder=recorder, on_wait=on_wait or self.still_connected)
            comm = Communicator._behind(store, terms)
        except (RendezvousError, ResourceError) as error:  # raised on all ranks or on none
            why = self._no_kernels[device.type] = f"the ranks cannot share memory: {first_line(error)}"
            router.facts = replace(router.facts, no_kernels=why)
            return
        self._comms[device] = comm
        if comm._internal.group.control.peers:
            self._backends.shrinks()
        comm._internal.faults.remedy = self._backends.remedy
        if self._lost is not None:  # the caller was interrupted meanwhile
            comm._internal.faults.interrupted(self._lost)
        # If the kernels' group is aborted, a rank in NCCL may be waiting for a rank that never comes.
        comm._internal.monitor.watch(self._backends)

    def gpu(self) -> torch.device:
        """The GPU of calls without a tensor: the GPU that this group uses, if it is only one, else the rank's
        default."""
        used = [device for device in self._comms if device.type == "cuda"]
        return used[0] if len(used) == 1 else pick_device("cuda")

    def still_connected(self) -> None:
        """Raises if a rank has ended or left; the store does not show that."""
        if self._backends.transport is not None:
            self._backends.transport.check_connected(lambda: f"{self._config}: setting up the kernels' memory")

    @property
    def has_cpu_kernels(self) -> bool:
        """Whether kernels may run a call on the CPU."""
        return "cpu" in self._no_kernels and self._no_kernels["cpu"] is None

    def run_by_kernels(self, call: GroupCall) -> bool:
        """Run a CPU call by the kernels, if that is its route."""
        if self._route(call).backend != KERNELS:
            return False
        _by_kernels(self._comms[call.device], call.flatten())
        return True

    def decided(self, call: GroupCall) -> dict[str, Any]:
        """As `call_recording.decided`."""
        return call_recording.decided(call, self.router(call.device), self._comms.get(call.device))

    # CUDA

    def on_cuda(self, batch: list[GroupCall], native: Callable[[], Any]) -> Any:
        """Launch `batch` if the kernels support all of its calls, else make the calls through NCCL, with `native`."""
        routes = [self._route(call) for call in batch]
        first = batch[0]
        comm = self._comms.get(first.device)
        if comm is None or not all(route.backend == KERNELS for route in routes):
            return self._to_nccl(native, comm, batch, routes)

        def action() -> None:
            for call in batch:
                _by_kernels(comm, call)
                call.finish()

        streams = self._streams.get(first.device)
        if streams is None:
            streams = self._streams[first.device] = GroupStream(comm)
        work = streams.run(action, batch, first.timeout or self._config.timeout)
        plain = first.collective == "all_reduce" and first.fused is None and first.wire is None
        if plain and not first.async_op and len(batch) == 1:
            self.fast_path.learn(comm._internal, first.result[0], first.op)
        return work

    def _to_nccl(
        self, native: Callable[[], Any], comm: Communicator | None, batch: list[GroupCall], routes: list[BackendChoice]
    ) -> Any:
        """Make the calls through NCCL, and announce them to ranks that may be in a kernel."""
        if comm is None:
            call_recording.native(self.recorders.of("cuda"), self._native + 1, batch)
            self._native += len(batch)
            return native()
        for call, route in zip(batch, routes, strict=True):
            comm._internal.announce(self._record(call, route.backend), call.made)
        try:
            return native()
        except Exception as error:
            setattr(error, NOTHING_SENT, True)
            comm._internal.withdraw(len(batch))
            raise

    def _record(self, call: GroupCall, backend: str) -> PackedDescriptor:
        """The record of a call that `backend` runs, for the peers."""
        key = *call.shape, backend
        record = self._records.get(key)
        if record is None:
            if len(self._records) >= _MOST_RECORDS:
                self._records.clear()
            record = self._records[key] = call.record(backend)
        return record

    # Life

    @property
    def devices(self) -> list[torch.device]:
        """The devices that have a communicator; the same on all ranks, except for the number of a GPU."""
        return sorted(self._comms, key=str)

    def step(self, device: torch.device, what: str, step: Callable[[Communicator], None]) -> None:
        """Run `step` with the communicator of `device`, in its turn; `what` names it in messages."""
        self.check_usable(what)
        call = partial(step, self._comms[device])
        if device.type == "cpu":
            self._cpu.between_calls(call, what, self)
        else:
            call()

    def check_usable(self, what: str) -> None:
        """Raises `GroupAborted` if the group is closed or lost."""
        if self._closed:
            raise GroupAborted(f"{self._config}: {what} on a group that was destroyed; make a new one")
        self.check_not_lost(what)

    def check_not_lost(self, what: str) -> None:
        """Raises `GroupAborted` if the group is lost; `close` lets the calls that were made before it run."""
        if self._backends.transport is not None:
            self._backends.transport.check_usable(what)
        if self._lost is not None:
            raise GroupAborted(
                f"{self._config}: {what} on a group that is lost; {self._backends.remedy}. Lost by: {self._lost}"
            )

    def abort_waits(self, error: TricommError) -> None:
        """End all waits on the connections, here and on the other ranks, with `error`; any thread may call it."""
        if self._backends.transport is not None:
            self._backends.transport.fail(error)

    def interrupted(self, error: BaseException) -> None:
        """Abort the group, because `error` has interrupted a call of this rank; the other ranks are told."""
        if self._closed:
            return
        if self._lost is None:
            self._lost = GroupAborted(f"rank {self._config.rank} was stopped by {first_line(error)}")
        for comm in list(self._comms.values()):
            comm._internal.faults.interrupted(error)
        self.abort_waits(self._lost)
        self._cpu.refuse(self._lost)
        self.recorders.report_soon()
        self._backends.abort()

    def close(self) -> None:
        """End the calls of this group and free their resources; idempotent."""
        if self._closed:
            return
        self._closed = True
        self.fast_path.clear()
        self._cpu.close()
        self.recorders.close()
        for comm in self._comms.values():
            comm.close()
        self._comms.clear()
        if self._backends.transport is not None:
            self._backends.transport.close()


def _by_kernels(comm: Communicator, call: GroupCall) -> None:
    x: Any = call.x
    sends, takes = call.splits or ([], [])
    match call.collective:
        case "all_reduce" if call.fused is not None:
            comm._internal.run_fused(call.fused)
            call.finish = lambda: None
        case "all_reduce":
            comm.all_reduce(x, call.op, wire=call.wire)
        case "all_gather":
            comm.all_gather(x, call.handle or call.out)
        case "reduce_scatter":
            comm.reduce_scatter(call.handle or x, call.op, call.out)
        case "broadcast":
            comm.broadcast(x, call.root)
        case "reduce":
            comm.reduce(x, call.root, call.op)
        case "gather":
            comm.gather(x, call.root, call.out)
        case "scatter":
            comm.scatter(x, call.root, call.out)
        case "all_to_all_v":  # also of equal splits, because no rank knows all splits
            comm.all_to_all_v(x, sends, takes, call.out)
        case _:
            comm.barrier(async_op=call.async_op)


def _capturing(device: torch.device) -> bool:
    if device.type != "cuda":
        return False
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()
