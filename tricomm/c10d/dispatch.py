"""What a c10d group runs its calls with: routes, Gloo or the kernels on the CPU, the kernels or NCCL on CUDA."""

from __future__ import annotations

import dataclasses
import time
import weakref
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import PrefixStore, Store

from tricomm import env
from tricomm.c10d import fallback_backends, gloo_collectives
from tricomm.c10d.call_agreement import Records
from tricomm.c10d.call_guard import NOTHING_SENT
from tricomm.c10d.capabilities import Facts, agree, torch_backend
from tricomm.c10d.fast_path import Quick
from tricomm.c10d.gloo_collectives import Turn
from tricomm.c10d.gloo_transport import Transport
from tricomm.c10d.handles import bounded
from tricomm.c10d.normalized_call import Call
from tricomm.c10d.streams import Streams
from tricomm.c10d.worker_thread import CallQueue
from tricomm.communicator import Communicator
from tricomm.core.bootstrap import pick_device
from tricomm.errors import (
    CollectiveTimeout,
    GroupAborted,
    InvalidArgument,
    RendezvousError,
    ResourceError,
    TricommError,
)
from tricomm.metrics.counters import count_fallback
from tricomm.options import Options
from tricomm.policy import backend_choice
from tricomm.policy.backend_choice import Route, Site
from tricomm.store.deadline import first_line

# A job may make hundreds of groups, and interpreted kernels gain little from more: a 16 MiB all_reduce takes 7.8 s with
# this and 5.3 s with 64 MiB (2 ranks, simulated).
_CPU_ARENA_BYTES = 4 << 20
_DECIDED = Route(backend_choice.KERNELS, "the c10d group has decided it")
# Every collective over a communicator. All uneven exchanges and all even ones are one row: no rank knows alone which.
_KERNELS: dict[str, Callable[[Any, Call], Any]] = {
    "all_reduce": lambda comm, call: comm.all_reduce(call.x, op=call.op),
    "all_gather": lambda comm, call: comm.all_gather(call.x, out=call.out),
    "reduce_scatter": lambda comm, call: comm.reduce_scatter(call.x, op=call.op, out=call.out),
    "broadcast": lambda comm, call: comm.broadcast(call.x, call.root),
    "reduce": lambda comm, call: comm.reduce(call.x, call.root, op=call.op),
    "gather": lambda comm, call: comm.gather(call.x, call.root, out=call.out),
    "scatter": lambda comm, call: comm.scatter(call.x, call.root, out=call.out),
    "all_to_all_v": lambda comm, call: comm.all_to_all_v(call.x, *(call.splits or ()), out=call.out),
    "barrier": lambda comm, call: comm.barrier(),
}


@dataclasses.dataclass(frozen=True)
class Place:
    """A group's coordinates: who we are in it, and the store that is its own."""

    store: Store
    rank: int
    world_size: int
    timeout: timedelta
    ranks: list[int]
    name: str

    def __str__(self) -> str:
        return f"c10d group {self.name!r}, rank {self.rank} of {self.world_size}"


class Engine:
    """Runs one group's calls. Collective only where a call is; what it needs is made at the first that needs it."""

    def __init__(
        self, place: Place, facts: Facts, options: Options | None, quick: Quick, abort: Callable[[], None]
    ) -> None:
        self._place, self._facts, self._options = place, facts, options
        self._abort = weakref.WeakMethod(abort)  # ends NCCL's part; the group's own method, a cycle would keep it
        interrupted = weakref.WeakMethod(self.interrupted)
        self._queue = CallQueue(
            str(place), lambda error: (tell := interrupted()) and tell(error), facts.no_kernels.get("cpu", "") is None
        )
        self._quick = quick
        self._streams: dict[torch.device, Streams] = {}
        self._comms: dict[torch.device, Communicator] = {}
        self._no_kernels = dict(facts.no_kernels)
        self._transport: Transport | None = None
        self._records = Records(place.world_size)
        self._text = str(place)
        self._number = 0
        self._lost: GroupAborted | None = None  # by an interrupted call
        self._closed = False

    @property
    def checks(self) -> bool:
        """Whether ranks compare what they do before Gloo does it: TRICOMM_CHECK, the same on all of them."""
        return self._facts.check

    # Routes

    def site(self, device: str) -> Site:
        """The facts that decide a route; the same on all ranks."""
        return Site(
            device, self._place.world_size, self._facts.nodes, self._no_kernels.get(device, f"no {device} kernels"),
            torch_backend(device), reachable=all(c.reachable for d, c in self._comms.items() if d.type == device),
        )  # fmt: skip

    def route(self, call: Call) -> Route:
        """Where `call` goes. The first call makes the kernels' communicator, wherever it goes itself: a rank that
        means another route would not come otherwise."""
        device, facts = call.device, (call.collective, call.dtype, call.op, call.nbytes)
        site = self.site(device.type)
        if device in self._comms or site.no_kernels is not None or site.nodes > 1:
            return backend_choice.decide(site, *facts)
        found = backend_choice.decide(site, *facts)
        if found.path != backend_choice.KERNELS and self._capturing(device):
            return found
        self._communicator(device)
        return backend_choice.decide(self.site(device.type), *facts)

    @staticmethod
    def _capturing(device: torch.device) -> bool:
        if device.type != "cuda":
            return False
        with torch.cuda.device(device):
            return torch.cuda.is_current_stream_capturing()

    def took(self, call: Call, route: Route) -> None:
        if route.path != backend_choice.KERNELS:  # the communicator counts its own calls
            count_fallback(route.path, call.collective, call.nbytes)
        backend_choice.print_once(
            route, self._place.name, self._place.rank, call.collective, call.dtype, call.op, call.nbytes
        )  # fmt: skip

    def _communicator(self, device: torch.device) -> None:
        """Make the kernels' communicator; where they cannot share memory after all, all ranks know why."""
        if self._capturing(device):
            raise InvalidArgument(
                f"{self._place}: the first call of a group sets up its memory, and cannot be captured in a CUDA graph; "
                "make one call before the capture"
            )
        place = self._place
        store = PrefixStore(f"kernels/{device.type}", place.store)
        try:
            comm = Communicator(
                store, place.rank, place.world_size, device, place.timeout,
                options_for(self._options, place.timeout, device.type), look=self._still_connected,
                decided=_DECIDED,
            )  # fmt: skip
        except (RendezvousError, ResourceError) as error:  # on all ranks or on none
            self._no_kernels[device.type] = f"the ranks cannot share memory: {first_line(error)}"
            return
        self._comms[device] = comm
        if self._lost is not None:  # the caller was interrupted meanwhile
            comm.interrupted(self._lost)
        if device.type == "cuda":
            self._quick.use(comm, self.site("cuda"))
        comm.watch(self)

    def gpu(self) -> torch.device:
        """The GPU of a call without a tensor: the one that this group uses, if that is one; else the rank's own."""
        used = [device for device in self._comms if device.type == "cuda"]
        return used[0] if len(used) == 1 else pick_device("cuda")

    def _still_connected(self) -> None:
        """Raises if a rank has ended or left, which the store does not show."""
        if self._transport is not None:
            self._transport.check(lambda: f"{self._place}: setting up the kernels' memory")

    # Of a communicator's monitor, about what goes to NCCL

    def error(self) -> str | None:
        """torch's own watchdog asks NCCL."""
        return None

    def abort(self) -> None:
        """The kernels' group is given up: who is in NCCL meanwhile may be waiting for one who never comes."""
        abort = self._abort()
        if abort is not None:
            abort()

    # The CPU

    def on_cpu(self, batch: list[Call]) -> Any:
        """Run `batch` in its turn; the handle's result is that of the calls, one after another."""
        self.usable(batch[0].collective)
        result = [x for call in batch for x in call.result]
        return self._queue.run(lambda: self._run(batch), str(self._place), result, batch[0].async_op)

    def _run(self, batch: list[Call]) -> None:
        self.usable(batch[0].collective)
        self._number += 1
        here = None
        if self._facts.check:
            here = self._records.check(self._turn(batch[0]), batch, self._number, self._text)
        for call in batch:
            route = self.route(call)
            self.took(call, route)
            if route.path == backend_choice.KERNELS:
                _KERNELS[call.collective](self._comms[call.device], call)
            else:
                gloo_collectives.run(self._turn(call, here), call)
            call.finish()

    def _turn(self, call: Call, here: list[torch.Tensor] | None = None) -> Turn:
        """The connections, for as long as `call` may take; `here` is what the ranks have given to it already."""
        number, text = self._number, self._text
        limit = (call.timeout or self._place.timeout).total_seconds()
        if self._transport is None:
            self._transport = self._connected()
        end = time.monotonic() + limit
        return Turn(self._transport, end, lambda: f"{text}, call {number} ({call.text()})", here)

    def _connected(self) -> Transport:
        """Connections of a wrapped group's own, at the first call that needs them: its native backend is in use."""
        place = self._place
        store = PrefixStore("wrapped", place.store)
        try:
            facts = agree(store, place.rank, place.world_size, place.timeout.total_seconds())
        except RendezvousError as error:
            if "timeout" not in str(error):
                raise
            raise CollectiveTimeout(f"{place}, call {self._number}: timeout: {error}") from error
        return fallback_backends.connected(
            store, place.rank, place.world_size, place.timeout, place.name, facts.members, self._options
        )

    def use(self, transport: Transport) -> None:
        """The connections that were made with the group."""
        self._transport = transport

    def give_up(self, error: TricommError) -> None:
        """End all waits on the connections, here and on the other ranks, with `error`; any thread may call it."""
        if self._transport is not None:
            self._transport.fail(error)

    # CUDA

    def on_cuda(self, batch: list[Call], native: Callable[[], Any]) -> Any:
        """Launch `batch` where the kernels cover all of it, else hand the call as it came to NCCL by `native`."""
        self.usable(batch[0].collective)
        routes = [self.route(call) for call in batch]
        for call, route in zip(batch, routes, strict=True):
            self.took(call, route)
        device = batch[0].device
        comm = self._comms.get(device)
        if comm is None or any(route.path != backend_choice.KERNELS for route in routes):
            for call, route in zip(batch, routes, strict=True):
                if comm is not None:
                    comm.announce(call.record(route.path))
            try:
                return native()
            except Exception as error:
                setattr(error, NOTHING_SENT, True)
                if comm is not None:
                    comm.withdraw(len(batch))
                raise

        def action() -> None:
            for call in batch:
                _KERNELS[call.collective](comm, call)
                call.finish()

        keep = [x for call in batch for x in (call.x, call.out, *call.keep) if x is not None]
        result = [x for call in batch for x in call.result]
        streams = self._streams.get(device)
        if streams is None:
            streams = self._streams[device] = Streams(comm)
        timeout = batch[0].timeout or self._place.timeout
        return streams.run(action, batch[0].collective, result, keep, batch[0].async_op, timeout)

    # Life

    def usable(self, what: str) -> None:
        """Raises `GroupAborted` after `close`, and after a failure that the group did not survive."""
        if self._closed:
            raise GroupAborted(f"{self._place}: {what} on a group that was destroyed; make a new one")
        if self._transport is not None:
            self._transport.usable(what)
        if self._lost is not None:
            raise GroupAborted(f"{self._place}: {what} on a group that is lost; make a new one. Lost by: {self._lost}")

    def interrupted(self, error: BaseException) -> None:
        """Give the group up, because `error` has ended a call of this rank at some point; the other ranks are told."""
        if self._closed:
            return
        if self._lost is None:
            self._lost = GroupAborted(f"rank {self._place.rank} was stopped by {first_line(error)}")
        for comm in list(self._comms.values()):
            comm.interrupted(error)
        self.give_up(self._lost)
        self.abort()

    def close(self) -> None:
        """End what this group runs; idempotent."""
        if self._closed:
            return
        self._closed = True
        self._quick.clear()
        self._queue.close()
        for comm in self._comms.values():
            comm.close()
        self._comms.clear()
        if self._transport is not None:
            self._transport.close()


def options_for(given: Options | None, timeout: timedelta, device: str) -> Options:
    """The communicator's options: what the caller gave, else the group's timeout and TRICOMM_ARENA_BYTES."""
    if given is not None:
        return replace(given, nccl=False)  # torch's own NCCL is behind a c10d group
    limit = bounded(timeout)
    found = Options(nccl=False) if limit is None else Options(timeout=limit, nccl=False)
    nbytes = env.integer("TRICOMM_ARENA_BYTES")
    if nbytes is None and device == "cpu":
        nbytes = _CPU_ARENA_BYTES
    return found if nbytes is None else replace(found, arena_bytes=nbytes)
