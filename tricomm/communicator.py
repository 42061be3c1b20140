"""The communicator: a facade over the parts in `tricomm.core`."""

from __future__ import annotations

import atexit
import logging
import os
import time
import weakref
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from datetime import timedelta
from functools import partial
from types import TracebackType
from typing import Any, Self

import torch
from torch.distributed.distributed_c10d import PrefixStore, Store

from tricomm import arguments
from tricomm.core import bootstrap, nccl
from tricomm.core.bootstrap import Terms, pick_device
from tricomm.core.calls.collectives import Collectives
from tricomm.core.calls.fused_calls import FusedCalls, FusedMethods
from tricomm.core.calls.internal_calls import Internal
from tricomm.core.calls.memory_methods import MemoryMethods
from tricomm.core.calls.point_to_point import PointToPoint
from tricomm.core.calls.prepared_calls import PreparedCalls
from tricomm.core.calls.recovery_methods import RecoveryMethods
from tricomm.core.calls.tuning_methods import TuningMethods
from tricomm.core.entry_guard import entry, guarded, set_up
from tricomm.core.faults import Faults
from tricomm.core.group import PROCESSES, Group, Runtime
from tricomm.core.launcher import LEAVE_SECONDS, Launcher
from tricomm.core.planner import Planner
from tricomm.core.recovery import WHAT, Newcomer, Recovery
from tricomm.errors import InvalidArgument, RendezvousError
from tricomm.gpu import Gpu
from tricomm.kernels import layout
from tricomm.metrics import publish
from tricomm.metrics.counters import Activity, Statistics
from tricomm.options import Options, seconds, with_environment
from tricomm.policy.backend_choice import GroupFacts, Router
from tricomm.store.arenas.arena import Arena
from tricomm.store.bounded_store import server_is_gone
from tricomm.store.control import ControlPage, RankState
from tricomm.store.rendezvous import check_rank, open_store
from tricomm.topology.model import Topology

log = logging.getLogger("tricomm")
_live: weakref.WeakSet[Communicator] = weakref.WeakSet()
_kept: list[Communicator] = []  # closed communicators whose memory a kernel may still use


class Communicator(Collectives, FusedMethods, MemoryMethods, RecoveryMethods, TuningMethods):
    """Ranks of one node that share memory and run collectives over it; on GPUs, with NCCL as the fallback.

    `store` is any `torch.distributed` Store; after the rendezvous only `split`, and groups that share no memory, use
    it. `rank` and `world_size` place this process in the group; `device` defaults to the current GPU, or to the CPU if
    there is none, where the kernels run under Triton's interpreter. `timeout` (seconds or timedelta; default:
    `options.timeout`) bounds each call, and the rendezvous if there is no `meeting_timeout` (seconds).

    On GPUs NCCL runs calls that the kernels do not: other types and sizes, and calls of groups that span nodes or
    cannot share memory.

    Raises `RendezvousError` if the ranks do not meet or disagree, `ResourceError` if memory or peer access is refused
    and NCCL cannot be used (on every rank, or on none), `InvalidArgument` for bad arguments.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        world_size: int,
        device: torch.device | str | int | None = None,
        timeout: float | timedelta | None = None,
        options: Options | None = None,
        *,
        meeting_timeout: float | None = None,
    ) -> None:
        check_rank(rank, world_size)
        options = bootstrap.settings(store, rank, world_size, options)
        self._meet(store, bootstrap.terms(rank, world_size, device, timeout, options, meeting_timeout))

    @classmethod
    def _behind(cls, store: Store, terms: Terms) -> Self:
        """A communicator for the calls that `terms.router` sends to the kernels."""
        comm = cls.__new__(cls)
        comm._meet(store, terms)
        return comm

    def _meet(self, store: Store, terms: Terms, recovery: Recovery | None = None) -> None:
        def make(undo: ExitStack) -> None:
            shared = bootstrap.rejoin(undo, recovery, terms) if recovery else bootstrap.join(undo, store, terms)
            group = Group(shared, terms.device, terms.timeout, terms.options, PROCESSES)
            self._assemble(undo, group, store, terms.router)
            self._release_if_dropped()
            # Every rank gets the communicator, or none does.
            if recovery is None:
                group.recorder.place(shared.control.exchange(group.recorder.job_rank(), WHAT, terms.timeout))
                return
            numbers, suspended = recovery.settle(group)
            group.recorder.place(numbers)
            if suspended:
                self._fall_asleep()
            recovery.decide()
            shared.control.limit = None

        set_up(make)

    def _release_if_dropped(self) -> None:
        """From now on release the group if this object is garbage-collected without `close`."""
        if self._gpu is None:  # a GPU may still run kernels
            release = partial(self._group.drop, self._monitor.stop)
            self._dropped = weakref.finalize(self, self._monitor.abandon, release)
            self._dropped.atexit = False

    @classmethod
    def _over(
        cls,
        control: ControlPage,
        arena: Arena,
        arena_layout: layout.Layout,
        device: torch.device,
        timeout: float,
        options: Options,
        runtime: Runtime,
    ) -> Self:
        """A communicator over memory that is shared already; it owns `control` and `arena`."""
        comm, options = cls.__new__(cls), with_environment(options)
        missing, exact = "there is no other backend behind the kernels here", options.batch_invariant
        routes = GroupFacts(device.type, control.world_size, 1, None, None, missing, batch_invariant=exact)
        shared = bootstrap.Shared(control, arena, arena_layout, None, routes)
        set_up(lambda undo: comm._assemble(undo, Group(shared, device, timeout, options, runtime)))
        return comm

    def _assemble(
        self, undo: ExitStack, group: Group, store: Store | None = None, router: Router | None = None
    ) -> None:
        """Make the parts of a communicator, each from the parts before it; the monitor starts last."""
        self._group, self._gpu, self._splits = group, group.gpu, 0
        self._dropped, self._retired = None, list[Planner]()
        self._store = store  # kept alive: if this rank hosts it, another rank may still be in the rendezvous
        self.stream: Any = None  # this rank's stream, if all ranks are in one process
        tuned = group.runtime.table(group.control, group.fingerprint, group.timeout)
        monitor = group.runtime.monitor(group.control, group.timeout, group.options.stall_timeout)
        undo.callback(monitor.stop)
        undo.callback(_live.discard, self)
        activity = Activity(group.name, group.rank, group.world_size, group.device, monitor.waited, group.gpu)
        activity.held, activity.origin = group.memory, group.origin
        publish.add(activity)
        remedy = "" if store is None or router is not None else "go on by shrink() or replace()"
        faults = Faults(group, monitor, remedy)
        launcher = Launcher(group, faults, monitor)
        planner = Planner(group, faults, launcher, monitor, activity, tuned, router)
        self._monitor, self._activity, self._faults, self._launcher = monitor, activity, faults, launcher
        self._guard, self._planner = launcher.guard, planner
        self._calls = PreparedCalls(group, faults, planner, launcher)
        self._run = self._calls.run
        self._fused = FusedCalls(group, faults, planner, launcher)
        self._messages = PointToPoint(group, faults, planner, launcher, monitor, activity)
        self._internal = Internal(group, faults, monitor, launcher, planner, self._calls, self._fused)
        monitor.start(self._messages.describe, group.recorder.report_soon)
        _live.add(self)

    @guarded
    def split(self, ranks: Sequence[int]) -> Communicator | None:
        """A communicator of these `ranks`, in that order; called by all ranks with the same list.

        Members get it, with the device, timeout and options of this communicator, and must close it; other ranks get
        None. Its calls are not ordered with calls of this communicator, so `split(range(world_size))` is for concurrent
        calls. The ranks meet over this communicator's store, which has to be alive. Raises `InvalidArgument` on all
        ranks for a bad list, or one that differs between ranks (the group stays usable), and otherwise as
        `Communicator` does.
        """
        group = self._group
        self._faults.check_usable()
        if self._store is None:
            raise InvalidArgument("split: ranks of one process have no store to meet over; make a group of that size")
        members, error = arguments.members(ranks, group.world_size)
        with self._launcher.held(), self._faults.abort_on_error("split"):
            error = error or group.captured("split")
            group.control.require_equal(repr(members), "split", group.timeout, abort_on_fault=True, error=error)
            self._splits += 1
            gone = b"gone" if server_is_gone(self._store) else b""
            ended = group.control.exchange(gone, "split: the store", group.timeout, abort_on_fault=True)
        if any(ended):
            raise RendezvousError(
                f"{group}: split: the ranks meet over the store of this group, and the process that hosted it has "
                "ended: make the communicator over a store that is alive, by Communicator(store, ...)"
            )
        if group.rank not in members:
            return None
        options = group.options
        topology = options.topology.of(members) if options.topology is not None else None
        store = PrefixStore(f"tricomm-split-{group.name}-{self._splits}", self._store)
        options = replace(options, topology=topology)
        return Communicator(store, members.index(group.rank), len(members), group.device, group.timeout, options)

    # Faults

    def check(self) -> None:
        """Raise the group's fault if there is one; costs two memory reads if there is none."""
        self._faults.check()

    # Facts and statistics

    def stats(self) -> Statistics:
        """Calls, bytes and times by kernel and size, and this rank's waiting time for each peer. Asks no other rank.
        Only the calls that `time_calls` selects are timed.
        """
        self._activity.collect()
        return self._activity.statistics()

    @property
    def rank(self) -> int:
        """This rank's number, from 0."""
        return self._group.rank

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self._group.world_size

    @property
    def group(self) -> str:
        """The group's name, the same on all ranks."""
        return self._group.name

    @property
    def device(self) -> torch.device:
        """The device of this rank's tensors."""
        return self._group.device

    @property
    def options(self) -> Options:
        """The options, including those that the environment sets for every group."""
        return self._group.options

    @property
    def topology(self) -> Topology | None:
        """How the ranks' devices are linked; None if that is not known."""
        return self._group.topology

    @property
    def simulated(self) -> bool:
        """Whether a CPU interprets the kernels; then times say nothing about a GPU."""
        return self._group.device.type != "cuda"

    @property
    def gpu(self) -> Gpu | None:
        """The GPU on whose streams the kernels run; None if they are interpreted."""
        return self._group.gpu

    @property
    def kind(self) -> str:
        """The kind of shared memory: posix_shm, cuda_vmm, cuda_ipc or local; none if NCCL runs every call."""
        return self._group.arena.kind

    @property
    def suspended(self) -> bool:
        """True from `suspend` until `resume`."""
        return self._group.suspended

    @property
    def group_table(self) -> torch.Tensor:
        """int64 tensor, the argument `group` of `tricomm.kernels.primitives`: this rank's number, and the addresses of
        its peers' memory."""
        return self._group.table

    def __repr__(self) -> str:
        return str(self._group)

    # The end

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, KeyboardInterrupt):  # between two calls: record the cause before the group is closed
            self._faults.interrupted(error)
        self.close()

    @entry
    def close(self) -> None:
        """Leave the group and release everything. Idempotent; a forked child's copy is only marked as closed.

        If calls were captured in a CUDA graph, memory stays allocated until the process ends, so that a replay is
        harmless; its output is undefined.
        """
        try:
            self._close(again=False)  # noqa: E701
        except BaseException as error:
            self._guard.unwound(error)
            self._close(again=True)
            raise

    def _close(self, again: bool) -> None:
        """Every step can be repeated, because an earlier `close` may have been interrupted."""
        group, monitor = self._group, self._monitor
        if group.closed and not again:
            return
        group.close()
        _live.discard(self)
        if os.getpid() != group.pid:
            return
        if not self._launcher.drained():
            log.error("%s: a kernel has not left within %g s; its memory is kept", self, LEAVE_SECONDS)
            if not group.simulated:  # when interpreting, the calling thread keeps the group alive
                _kept.append(self)
            if monitor.fault is None:  # otherwise the peers have been told already
                group.control.set_state(RankState.CLOSED)
            monitor.stop()
            return
        group.recorder.close()
        self._activity.collect()
        with ExitStack() as undo:
            if group.recovering.acquire(timeout=LEAVE_SECONDS):  # another thread's replace may use the memory
                undo.callback(group.recovering.release)
            if self._launcher.captured:
                _kept.append(self)  # including the plans, because they hold memory that kernels read
                group.leave_to_graphs(undo)
                undo.callback(monitor.stop)
                return
            acknowledged = group.suspended or self._messages.acknowledged(LEAVE_SECONDS)
            if not acknowledged:
                log.error("%s: a peer has not taken a message yet, and will say so here; its memory is kept", self)
            group.release(undo, acknowledged)
            undo.callback(lambda: nccl.end(self._planner.nccl, monitor.fault is not None, LEAVE_SECONDS))
            undo.callback(monitor.stop)
            self._planner.forget()
            group.forget_views()


@atexit.register
def _close_all() -> None:
    for comm in list(_live):
        if comm._group.pid == os.getpid():
            log.warning("%s was not closed; closing it at exit", comm)
            comm.close()


def join(
    store: Store,
    rank: int,
    world_size: int,
    device: torch.device | str | int | None = None,
    timeout: float | timedelta | None = None,
    options: Options | None = None,
    *,
    meeting_timeout: float | None = None,
) -> Communicator:
    """The communicator of a new process that takes the place of the lost `rank` of a group of `world_size` ranks.

    It waits, for `meeting_timeout` seconds at most, until the ranks that are left call `Communicator.replace` with the
    same `store`. The arguments are those of `Communicator`; pass the group's options. Make symmetric handles and CUDA
    graphs as in a new group.

    Raises as `Communicator`, also if all ranks are new. If several processes join for one place, the first one gets it.
    The others, and a process that joins for a rank that runs, wait until that rank is lost, and raise `RendezvousError`
    if it is not.
    """
    check_rank(rank, world_size)
    terms = bootstrap.terms(rank, world_size, device, timeout, with_environment(options), meeting_timeout)
    comm = Communicator.__new__(Communicator)
    comm._meet(store, terms, Newcomer(store, terms))
    return comm


def init(
    url: str = "env://",
    rank: int | None = None,
    world_size: int | None = None,
    device: torch.device | str | int | None = None,
    timeout: float | timedelta | None = None,
    options: Options | None = None,
) -> Communicator:
    """Meet at `url` ("env://", "tcp://host:port" or "file:///path") and return a communicator.

    `rank` and `world_size` are read from the URL's query, these arguments, or RANK and WORLD_SIZE; torchrun sets all
    variables for "env://". A store hosted here listens on the given address only. Raises `InvalidArgument`,
    `RendezvousError` or `ResourceError`.
    """
    limit = (options or Options()).timeout if timeout is None else seconds(timeout, "timeout")
    chosen = pick_device(device)  # so that a mistake raises before the rendezvous
    began = time.monotonic()
    try:
        store, rank, world_size = open_store(url, rank, world_size, limit)
    except InvalidArgument as error:
        bootstrap.refuse_at(url, error)
        raise
    left = max(0.1, limit - (time.monotonic() - began))
    return Communicator(store, rank, world_size, chosen, timeout, options, meeting_timeout=left)
