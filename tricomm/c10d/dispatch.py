"""Runs the calls of a c10d group: by the kernels or messages on the CPU, by the kernels or NCCL on CUDA."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch._C._distributed_c10d import PrefixStore

from tricomm.c10d.call_guard import NOTHING_SENT, sends
from tricomm.c10d.capabilities import GroupCapabilities, GroupConfig, options_for, torch_backend
from tricomm.c10d.cpu_calls import CpuCalls
from tricomm.c10d.fallback_backends import Backends
from tricomm.c10d.fast_path import FastPath
from tricomm.c10d.group_calls import GroupCall
from tricomm.c10d.streams import GroupStream
from tricomm.communicator import Communicator
from tricomm.core.bootstrap import pick_device
from tricomm.core.symmetric import Symmetric
from tricomm.errors import GroupAborted, InvalidArgument, RendezvousError, ResourceError, TricommError
from tricomm.metrics.counters import KERNELS, count_fallback
from tricomm.options import Options
from tricomm.policy import backend_choice
from tricomm.policy.backend_choice import BackendChoice, GroupFacts
from tricomm.store.bounded_store import first_line
from tricomm.store.control import PackedDescriptor

_MOST_SHAPES = 1024
_DECIDED = BackendChoice(KERNELS, "the c10d group has decided it")


def _all_reduce(comm: Communicator, call: GroupCall) -> None:
    if call.fused is None:
        comm.all_reduce(call.x, op=call.op)  # type: ignore[arg-type]  # it has an input
    else:
        comm.run_fused(call.fused)
        call.finish = lambda: None


# Every collective over a communicator. Even and uneven exchanges share a row: no single rank knows which one it is.
_COMMUNICATOR_CALLS: dict[str, Callable[[Any, GroupCall], Any]] = {
    "all_reduce": _all_reduce,
    "all_gather": lambda comm, call: comm.all_gather(call.x, out=call.handle or call.out),
    "reduce_scatter": lambda comm, call: comm.reduce_scatter(call.handle or call.x, op=call.op, out=call.out),
    "broadcast": lambda comm, call: comm.broadcast(call.x, call.root),
    "reduce": lambda comm, call: comm.reduce(call.x, call.root, op=call.op),
    "gather": lambda comm, call: comm.gather(call.x, call.root, out=call.out),
    "scatter": lambda comm, call: comm.scatter(call.x, call.root, out=call.out),
    "all_to_all_v": lambda comm, call: comm.all_to_all_v(call.x, *(call.splits or ()), out=call.out),
    "barrier": lambda comm, call: comm.barrier(async_op=call.async_op),
}


@dataclass(frozen=True)
class _Routed:
    """What the shape of a call decides: its route, and the record for the peers if it does not go to the kernels."""

    route: BackendChoice
    record: PackedDescriptor | None


class Dispatcher:
    """Runs one group's calls. Creates what they need on first use.

    allreduce -> fast path (a call that was made before) -> communicator
    any call -> run -> CpuCalls, in its turn -> communicator, or messages over TCP
                       stream (CUDA)         -> communicator, or NCCL
    """

    def __init__(
        self, config: GroupConfig, agreed: GroupCapabilities, backends: Backends, options: Options | None
    ) -> None:
        self._config, self._agreed, self._backends, self._options = config, agreed, backends, options
        self.fast_path = FastPath()
        self._cpu = CpuCalls(config, agreed, backends, options)
        self._streams: dict[torch.device, GroupStream] = {}
        self._comms: dict[torch.device, Communicator] = {}
        self._no_kernels = dict(agreed.no_kernels)
        self._routed: dict[tuple[Any, ...], _Routed] = {}
        self._lost: GroupAborted | None = None  # by an interrupted call
        self._closed = False

    @sends
    def run(self, batch: list[GroupCall], native: Callable[[], Any]) -> Any:
        """Run the calls of `batch`, which are on one device, one after another; returns a handle for all of them.

        `native` makes the same calls through NCCL.
        """
        self.check_usable(batch[0].collective)
        if self.batch_invariant:
            self._refuse(batch)
        return self._cpu.run(batch, self) if batch[0].device.type == "cpu" else self.on_cuda(batch, native)

    @property
    def batch_invariant(self) -> bool:
        """Whether the bits of its reductions depend on rank order alone; the same on all ranks."""
        return self._agreed.batch_invariant

    # Routes

    def site(self, device: str) -> GroupFacts:
        """The facts that decide a route; the same on all ranks."""
        no_kernels = self._no_kernels.get(device, f"no {device} kernels")
        return GroupFacts(
            device,
            self._config.world_size,
            self._agreed.nodes,
            no_kernels,
            torch_backend(device),
            reachable=all(c.reachable for d, c in self._comms.items() if d.type == device),
            batch_invariant=self.batch_invariant,
        )

    def _refuse(self, batch: list[GroupCall]) -> None:
        """Raises `InvalidArgument` for a call that a batch-invariant group cannot make, before anything is sent."""
        for call in batch:
            if call.shape not in self._routed:
                self._decide(self.site(call.device.type), call)

    def _route(self, call: GroupCall) -> _Routed:
        """The route of `call`, which is counted.

        The first call makes the kernels' communicator, whatever its own route is. Otherwise ranks that disagree about
        the call, and so about its route, would wait for each other.
        """
        key = call.shape
        routed = self._routed.get(key)
        if routed is None:
            route, made = self._decide_finally(call)
            routed = _Routed(route, None if route.backend == KERNELS else call.record(route.backend))
            if made:
                if len(self._routed) >= _MOST_SHAPES:
                    self._routed.clear()
                self._routed[key] = routed
            self.log_route(call, routed.route)
        self.count_call(call, routed.route)
        return routed

    def _decide_finally(self, call: GroupCall) -> tuple[BackendChoice, bool]:
        """The route of `call`, and whether it is final: it is once the kernels' communicator is made, or cannot be."""
        device = call.device
        site = self.site(device.type)
        made = device in self._comms or site.no_memory is not None
        route = self._decide(site, call)
        if not made and (route.backend == KERNELS or not _capturing(device)):
            self._communicator(device)
            route, made = self._decide(self.site(device.type), call), True
        return route, made

    @sends
    def symmetric(self, call: GroupCall, numel: int) -> Symmetric | None:
        """Memory of `numel` elements that the kernels read in place, for calls like `call`; all ranks ask together. It
        has no multicast address, because calls that gather or scatter do not use one.

        None if such calls do not go to the kernels, or if a graph is being captured.
        """
        self.check_usable("symmetric")
        made: list[Symmetric] = []

        def make() -> None:
            if not _capturing(call.device) and self._decide_finally(call)[0].backend == KERNELS:
                assert call.dtype is not None, "a call with tensors"
                made.append(self._comms[call.device].symmetric((numel,), call.dtype, multicast=False))

        if call.device.type == "cpu":
            self._cpu.between_calls(make, "symmetric", self)
        else:
            make()
        return made[0] if made else None

    @staticmethod
    def _decide(site: GroupFacts, call: GroupCall) -> BackendChoice:
        return backend_choice.decide(site, call.collective, call.dtype, call.op, call.nbytes)

    @staticmethod
    def count_call(call: GroupCall, route: BackendChoice) -> None:
        if route.backend != KERNELS:  # the communicator counts its own calls
            count_fallback(route.backend, call.collective, call.nbytes)

    def message_backend(self, call: GroupCall) -> str:
        """The backend of a send or a receive."""
        route = self._decide(self.site(call.device.type), call)
        self.log_route(call, route)
        return route.backend

    def log_route(self, call: GroupCall, route: BackendChoice) -> None:
        """With TRICOMM_LOG=routing print the route of a call that was not made before."""
        backend_choice.log_once(
            route, self._config.name, self._config.rank, call.collective, call.dtype, call.op, call.nbytes
        )

    def _communicator(self, device: torch.device) -> None:
        """Make the kernels' communicator; if the ranks cannot share memory after all, all of them know why."""
        if _capturing(device):
            raise InvalidArgument(
                f"{self._config}: the first call of a group sets up its memory, and cannot be captured in a CUDA "
                "graph; make one call before the capture"
            )
        if any(comm.suspended for comm in self._comms.values()):
            raise InvalidArgument(
                f"{self._config}: suspended, and the first call on {device} would take memory: resume() comes first"
            )
        config = self._config
        store = PrefixStore(f"kernels/{device.type}", config.store)
        try:
            comm = Communicator(
                store,
                config.rank,
                config.world_size,
                device,
                config.timeout,
                replace(options_for(self._options, config.timeout, device.type), batch_invariant=self.batch_invariant),
                look=self._still_connected,
                decided=_DECIDED,
            )
        except (RendezvousError, ResourceError) as error:  # on all ranks or on none
            self._no_kernels[device.type] = f"the ranks cannot share memory: {first_line(error)}"
            return
        self._comms[device] = comm
        self._routed.clear()
        if self._lost is not None:  # the caller was interrupted meanwhile
            comm.interrupted(self._lost)
        # If the kernels' group is given up, a rank in NCCL may be waiting for one that never comes.
        comm.watch(self._backends)

    def gpu(self) -> torch.device:
        """The GPU of calls without a tensor: the one that this group uses, if just one, else the rank's own."""
        used = [device for device in self._comms if device.type == "cuda"]
        return used[0] if len(used) == 1 else pick_device("cuda")

    def _still_connected(self) -> None:
        """Raises if a rank has ended or left; the store does not show that."""
        if self._backends.transport is not None:
            self._backends.transport.check_connected(lambda: f"{self._config}: setting up the kernels' memory")

    @property
    def has_cpu_kernels(self) -> bool:
        """Whether kernels may run a call on the CPU."""
        return "cpu" in self._no_kernels and self._no_kernels["cpu"] is None

    def run_by_kernels(self, call: GroupCall) -> bool:
        """Run a CPU call by the kernels, if it goes to them."""
        if self._route(call).route.backend != KERNELS:
            return False
        _COMMUNICATOR_CALLS[call.collective](self._comms[call.device], call.flatten())
        return True

    # CUDA

    def on_cuda(self, batch: list[GroupCall], native: Callable[[], Any]) -> Any:
        """Launch `batch` if the kernels cover all of it, else make the calls through NCCL, with `native`."""
        routed = [self._route(call) for call in batch]
        first = batch[0]
        comm = self._comms.get(first.device)
        if comm is None or not all(entry.route.backend == KERNELS for entry in routed):
            return self._to_nccl(native, comm, batch, routed)

        def action() -> None:
            for call in batch:
                _COMMUNICATOR_CALLS[call.collective](comm, call)
                call.finish()

        streams = self._streams.get(first.device)
        if streams is None:
            streams = self._streams[first.device] = GroupStream(comm)
        work = streams.run(action, batch, first.timeout or self._config.timeout)
        if first.collective == "all_reduce" and not first.async_op and len(batch) == 1 and first.fused is None:
            self.fast_path.learn(comm, first.result[0], first.op)
        return work

    @staticmethod
    def _to_nccl(
        native: Callable[[], Any], comm: Communicator | None, batch: list[GroupCall], routed: list[_Routed]
    ) -> Any:
        """Make the calls through NCCL, and announce them to ranks that may be in a kernel meanwhile."""
        if comm is None:
            return native()
        for call, entry in zip(batch, routed, strict=True):
            comm.announce(entry.record or call.record(entry.route.backend))
        try:
            return native()
        except Exception as error:
            setattr(error, NOTHING_SENT, True)
            comm.withdraw(len(batch))
            raise

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
        if self._backends.transport is not None:
            self._backends.transport.check_usable(what)
        if self._lost is not None:
            raise GroupAborted(f"{self._config}: {what} on a group that is lost; make a new one. Lost by: {self._lost}")

    def abort_waits(self, error: TricommError) -> None:
        """End all waits on the connections, here and on the other ranks, with `error`; any thread may call it."""
        if self._backends.transport is not None:
            self._backends.transport.fail(error)

    def interrupted(self, error: BaseException) -> None:
        """Give the group up, because `error` has interrupted a call of this rank; the other ranks are told."""
        if self._closed:
            return
        if self._lost is None:
            self._lost = GroupAborted(f"rank {self._config.rank} was stopped by {first_line(error)}")
        for comm in list(self._comms.values()):
            comm.interrupted(error)
        self.abort_waits(self._lost)
        self._cpu.refuse(self._lost)
        self._backends.abort()

    def close(self) -> None:
        """End the calls of this group and free what they use; idempotent."""
        if self._closed:
            return
        self._closed = True
        self.fast_path.clear()
        self._cpu.close()
        for comm in self._comms.values():
            comm.close()
        self._comms.clear()
        if self._backends.transport is not None:
            self._backends.transport.close()


def _capturing(device: torch.device) -> bool:
    if device.type != "cuda":
        return False
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()
