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

from tricomm import env, routing
from tricomm.c10d import agreement, natives, on_gloo, on_kernels
from tricomm.c10d.call import Call
from tricomm.c10d.facts import Facts, torch_backend
from tricomm.c10d.guard import NOTHING_SENT
from tricomm.c10d.on_cuda import Streams
from tricomm.c10d.quick import Quick
from tricomm.c10d.worker import CallQueue
from tricomm.c10d.works import bounded
from tricomm.communicator import Communicator
from tricomm.errors import (
    CollectiveTimeout,
    GroupAborted,
    InvalidArgument,
    PeerDied,
    RendezvousError,
    ResourceError,
    TricommError,
)
from tricomm.options import Options
from tricomm.routing import Route, Site
from tricomm.store.deadline import Bounded, first_line

_SECOND_LOOK = 0.5  # for the other ranks to say that they failed too


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
        self._queue = CallQueue(str(place), lambda error: (tell := interrupted()) and tell(error))
        self._quick = quick
        self._streams: dict[torch.device, Streams] = {}
        self._comms: dict[torch.device, Communicator] = {}
        self._no_kernels = dict(facts.no_kernels)
        self._gloo: Any = None
        self._number = 0
        self._lost: str | None = None
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
            return routing.decide(site, *facts)
        found = routing.decide(site, *facts)
        if found.path != routing.KERNELS and self._capturing(device):
            return found
        self._communicator(device)
        return routing.decide(self.site(device.type), *facts)

    @staticmethod
    def _capturing(device: torch.device) -> bool:
        return device.type == "cuda" and torch.cuda.is_current_stream_capturing()

    def took(self, call: Call, route: Route) -> None:
        routing.took(
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
                store, place.rank, place.world_size, device, place.timeout, options_for(self._options, place.timeout)
            )
            comm.counted = False
        except (RendezvousError, ResourceError) as error:  # on all ranks or on none
            self._no_kernels[device.type] = f"the ranks cannot share memory: {first_line(error)}"
            return
        self._comms[device] = comm
        if device.type == "cuda":
            self._quick.use(comm, self.site("cuda"))
        comm.watch(self)

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
        timeout = batch[0].timeout or self._place.timeout
        began = time.monotonic()
        try:
            if self._facts.check:
                gloo = self._private_gloo()
                agreement.check(gloo, batch, self._number, timeout, str(self._place))
            for call in batch:
                if call.timeout is None:
                    call = replace(call, timeout=timeout)
                route = self.route(call)
                self.took(call, route)
                if route.path == routing.KERNELS:
                    on_kernels.TABLE[call.collective](self._comms[call.device], call)
                else:
                    on_gloo.TABLE[call.collective](self._private_gloo(), call)
                call.finish()
        except TricommError:
            raise
        except RuntimeError as error:
            raise self._diagnosed(error, batch, time.monotonic() - began) from error

    def _private_gloo(self) -> Any:
        """Gloo for the lane alone: C++-only paths use the registered one, in an order of their own."""
        if self._gloo is None:
            place = self._place
            store = PrefixStore("lane", place.store)
            self._gloo = natives.gloo(
                store, place.rank, place.world_size, place.timeout, place.ranks, f"{place.name}/lane"
            )
        return self._gloo

    def _diagnosed(self, error: RuntimeError, batch: list[Call], waited: float) -> TricommError:
        """Gloo's failure in words of ours. Gloo's connections are gone after it, and with them the group."""
        what = f"{self._place}, call {self._number} ({batch[0].text()})"
        dead = self._ended()
        absent = self._absent()
        timed_out = "imed out" in str(error) or "timeout" in str(error)
        if not timed_out:  # a process that was killed loses its connections a moment before it counts as ended
            end = time.monotonic() + _SECOND_LOOK
            while not dead and absent and time.monotonic() < end:
                time.sleep(0.01)
                dead = self._ended()
        if dead:
            found: TricommError = PeerDied(f"{what}: the process of rank(s) {dead} has ended")
        elif timed_out:
            who = f"rank(s) {absent} have not come" if absent else "some rank was too late"
            found = CollectiveTimeout(f"{what}: timeout after {waited:.1f} s: {who}")
        else:
            found = GroupAborted(f"{what}: the connection failed: {first_line(error)}")
        self._lost = str(found)
        return type(found)(f"{found}. The group is lost; make a new one")

    def _ended(self) -> list[int]:
        return [r for r, member in enumerate(self._facts.members) if member.ended()]

    def _absent(self) -> list[int]:
        """Ranks that do not say within a moment that this very call failed for them too."""
        place, key = self._place, f"lost/{self._number}"
        bounded_store = Bounded(PrefixStore("tricomm", place.store), 2 * _SECOND_LOOK)
        try:
            bounded_store.set(f"{key}/{place.rank}", b"1")
            end = time.monotonic() + _SECOND_LOOK
            missing = [r for r in range(place.world_size) if r != place.rank]
            while missing and time.monotonic() < end:
                missing = [r for r in missing if not bounded_store.check(f"{key}/{r}")]
                time.sleep(0.02)
            return missing
        except RendezvousError:  # the store is gone as well
            return []
        finally:
            bounded_store.close()

    # CUDA

    def on_cuda(self, batch: list[Call], native: Callable[[], Any]) -> Any:
        """Launch `batch` where the kernels cover all of it, else hand the call as it came to NCCL by `native`."""
        self.usable(batch[0].collective)
        routes = [self.route(call) for call in batch]
        for call, route in zip(batch, routes, strict=True):
            self.took(call, route)
        device = batch[0].device
        comm = self._comms.get(device)
        if comm is None or any(route.path != routing.KERNELS for route in routes):
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
                on_kernels.TABLE[call.collective](comm, call)
                call.finish()

        keep = [x for call in batch for x in (call.x, call.out, *call.keep) if x is not None]
        result = [x for call in batch for x in call.result]
        streams = self._streams.setdefault(device, Streams(device))
        timeout = batch[0].timeout or self._place.timeout
        return streams.run(action, batch[0].collective, result, keep, batch[0].async_op, comm, timeout)

    # Life

    def usable(self, what: str) -> None:
        """Raises `GroupAborted` after `close`, and after a failure that the group did not survive."""
        if self._closed:
            raise GroupAborted(f"{self._place}: {what} on a group that was destroyed; make a new one")
        if self._lost is not None:
            raise GroupAborted(f"{self._place}: {what} on a group that is lost; make a new one. Lost by: {self._lost}")

    def interrupted(self, error: BaseException) -> None:
        """Give the group up, because `error` has ended a call of this rank at some point; the other ranks are told."""
        if self._closed:
            return
        if self._lost is None:
            self._lost = f"rank {self._place.rank} was stopped by {first_line(error)}"
        for comm in list(self._comms.values()):
            comm.interrupted(error)
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
        self._gloo = None


def options_for(given: Options | None, timeout: timedelta) -> Options:
    """The communicator's options: what the caller gave, else the group's timeout and TRICOMM_ARENA_BYTES."""
    if given is not None:
        return replace(given, nccl=False)  # torch's own NCCL is behind a c10d group
    limit = bounded(timeout)
    found = Options(nccl=False) if limit is None else Options(timeout=limit, nccl=False)
    nbytes = env.integer("TRICOMM_ARENA_BYTES")
    return found if nbytes is None else replace(found, arena_bytes=nbytes)
