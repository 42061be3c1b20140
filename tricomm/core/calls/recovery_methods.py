"""`Communicator.shrink` and `Communicator.replace`: a group after the loss of some ranks."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Self

from torch.distributed.distributed_c10d import Store

from tricomm import arguments
from tricomm.core import bootstrap, nccl
from tricomm.core.bootstrap import Terms
from tricomm.core.entry_guard import guarded
from tricomm.core.faults import Faults
from tricomm.core.group import Group
from tricomm.core.launcher import LEAVE_SECONDS, Launcher
from tricomm.core.planner import Planner
from tricomm.core.recovery import Fewer, Survivor
from tricomm.core.watch.monitor import Monitor
from tricomm.deadline import Deadline, poll
from tricomm.errors import GroupAborted, InvalidArgument, RendezvousError, ResourceError, TricommError
from tricomm.options import seconds
from tricomm.store.bounded_store import server_is_gone
from tricomm.store.control import ControlPage, RankState
from tricomm.store.process import forks

if TYPE_CHECKING:  # a group that loses no rank needs neither
    from tricomm.store.meetings import Meetings
    from tricomm.store.shrink import Shrink

_PAUSES = 1e-3, 0.02
_ENDING_SECONDS = 1.0  # for a process that is being killed to end
log = logging.getLogger("tricomm")


class RecoveryMethods:
    """The recovery of a group."""

    _group: Group
    _faults: Faults
    _launcher: Launcher
    _monitor: Monitor
    _planner: Planner
    _store: Store | None
    _meet: Callable[..., None]
    _dropped: Any
    _retired: list[Planner]
    _release_if_dropped: Callable[[], None]
    close: Callable[[], None]

    @guarded
    def shrink(self, exclude: Collection[int] | None = None, timeout: float | timedelta | None = None) -> Self:
        """Make a communicator of the ranks that are left, in the same order. All of them call this, after a fault or
        before ranks are taken away.

        `exclude` has the ranks to leave out, the same on all ranks that are left; they may still run. None: those whose
        processes have ended, or that have closed the group. The new communicator has this one's device, timeout and
        options, and the topology of its ranks. It does not use the store, and does not compile kernels again that this
        process has for that number of ranks (`prepare`). Its memory is new; make symmetric handles and CUDA graphs
        again.

        On return this communicator is closed. Raises within `timeout` seconds (default: the communicator's), on all
        ranks that are left, which may then call it again: `InvalidArgument` if they exclude different ranks, `PeerDied`
        if another rank ends meanwhile, `CollectiveTimeout` that names ranks that do not call it, `GroupAborted` if a
        rank is interrupted in its call, `ResourceError`. A group without a fault stays usable until the ranks agree. An
        excluded rank that still runs gets the group's fault in its call or at its next one, and `GroupAborted` if it
        calls this.
        """
        out = arguments.excluded(exclude, self._group.rank, self._group.world_size)
        with self._recovering("shrink", out, timeout) as shrink:
            return self._recovered("shrink", shrink, lambda: None, self._fewer, lambda comm: self.close())

    @guarded
    def _shrink_into(
        self,
        exclude: Collection[int] | None,
        timeout: float,
        drain: Callable[[], None],
        make: Callable[[ControlPage, tuple[int, ...]], None],
    ) -> None:
        """Agree as `shrink` does, after `drain`, and let `make` set up what these ranks have instead of this
        communicator: it is called with pages of theirs, which end with this call, and with their numbers here. Returns
        on all of them or raises on all. This communicator then has a fault, and is not closed."""
        group = self._group
        out = arguments.excluded(exclude, group.rank, group.world_size)
        with self._recovering("shrink", out, timeout, drain=drain) as shrink, ExitStack() as undo:
            try:
                shrink.agree()
                self._faults.abort(GroupAborted, f"ranks {list(shrink.members)} have gone on as a smaller group")
                undo.push(partial(bootstrap.leave, control := shrink.connect()))
                control.agree(None, "shrink", shrink.deadline.left)
                make(control, shrink.members)
                shrink.decide()
            except BaseException as error:
                shrink.give_up(error)
                if isinstance(error, TricommError):
                    error.args = (f"{group}: shrink: {error}",)
                raise

    @guarded
    def replace(
        self,
        rank: int | Collection[int] | None = None,
        timeout: float | timedelta | None = None,
        store: Store | None = None,
    ) -> None:
        """Let new processes take the places of lost ranks, in this communicator. All ranks that are left call this; the
        new ones call `join` with the same `store`, by default the one over which this group has met. A group that
        `split` made has met under a prefix that new processes do not know: give it a `store`.

        `rank` is a rank or several, the same on all ranks that are left, whose processes have ended or which have
        closed the group. None: all of those. An empty collection: the same ranks make the group again after a fault.
        Memory is new, zeroed and at the same addresses, so CUDA graphs with calls of this communicator can be replayed
        again, together with the new ranks' ones; until this returns none may be replayed. `group` changes, and
        statistics and the numbers of calls begin again. A suspended group takes its memory for a moment, and stays
        suspended.

        Raises within `timeout` seconds (default: the communicator's), on all ranks that are left, which may then call
        it again: `InvalidArgument` for a rank that is there, if they replace different ranks, while symmetric handles
        are open or registered, after captured calls if NCCL serves some, for memory that cannot keep its addresses
        (cuda_ipc), and for a new rank with another kind of device; `RendezvousError` if a new rank does not come, has
        other options or another version; `PeerDied`, `CollectiveTimeout` and `ResourceError` as `shrink` does. The
        group is lost until a call succeeds.
        """
        out = arguments.replaced(rank, self._group.rank, self._group.world_size)
        if store is not None and not isinstance(store, Store):
            raise InvalidArgument(f"replace: store={store!r}: a store of torch.distributed is needed")
        with self._recovering("replace", out, timeout, again=True) as shrink:
            from tricomm.store.meetings import Meetings

            at: Any = store or self._store
            meetings = Meetings(at)
            refuse = partial(self._refuse_new, out or (), at, shrink.deadline)
            prepare = partial(self._with_new, at, meetings)
            try:
                self._recovered("replace", shrink, refuse, prepare, self._become)
            finally:
                meetings.end()

    @contextmanager
    def _recovering(
        self,
        what: str,
        out: frozenset[int] | None,
        timeout: float | timedelta | None,
        again: bool = False,
        drain: Callable[[], None] = lambda: None,
    ) -> Iterator[Shrink]:
        """Around this rank's part in a recovery, which begins after `drain` and this rank's calls. One at a time; if it
        raises, the other ranks are told."""
        from tricomm.store.shrink import Shrink

        group, lock = self._group, self._group.recovering
        limit = group.timeout if timeout is None else seconds(timeout, "timeout")
        deadline = Deadline(limit)
        if lock.mine():
            raise InvalidArgument(f"{group}: {what} inside another recovery of the same thread")
        try:
            if not lock.acquire(timeout=limit):
                raise self._faults.late(limit, "another thread's recovery still runs")
            if group is not self._group:
                raise GroupAborted(f"{group}: {what}: another thread has made the group again")
            self._check_recoverable(what)
            shrink = Shrink(group.control, out, deadline, again)
            try:
                if (error := group.captured(what)) is not None:
                    raise error
                drain()
                self._end_calls(deadline)
                yield shrink
            except BaseException as error:
                with suppress(GroupAborted):  # another thread has closed this one
                    shrink.give_up(error)
                raise
            finally:
                shrink.close()
        finally:
            lock.release_all()

    def _check_recoverable(self, what: str) -> None:
        from tricomm.store.shrink import MOST_RANKS

        group = self._group
        if group.closed or forks() != group.forks:
            self._faults.check_usable()
        if self._store is None:
            raise InvalidArgument(f"{what}: the ranks of one process end together; make a group of another size")
        if not group.control.peers and group.world_size > 1 or group.world_size > MOST_RANKS:
            raise InvalidArgument(
                f"{what}: only ranks that share memory can agree, {MOST_RANKS} at most, and these cannot: make a new "
                "communicator over a store"
            )

    def _end_calls(self, deadline: Deadline) -> None:
        """Wait for this rank's calls, unless the group has a fault, which ends them."""
        if self._monitor.fault is None:
            made = next(self._faults.handles)
            try:
                self._launcher.wait(deadline.left)
                self._faults.completed = made
            except TricommError:
                if self._monitor.fault is None:
                    raise

    def _recovered(
        self,
        what: str,
        shrink: Shrink,
        refuse: Callable[[], None],
        prepare: Callable[[Shrink], Any],
        finish: Callable[[Any], None],
    ) -> Self:
        """A communicator of the ranks that agree. `refuse` raises before that, `prepare` gives the arguments of `_meet`
        after it, and `finish` ends this group once the ranks have the other one."""
        group = self._group
        comm: Any = type(self).__new__(type(self))
        made: list[Any] = []
        try:
            try:
                refuse()
                shrink.agree()
                made.append(comm._meet(*prepare(shrink)) or comm)
            except BaseException as error:
                with suppress(GroupAborted):  # another thread has closed this one
                    shrink.give_up(error)
                    if self._monitor.fault is not None:
                        self._monitor.in_flight.leave()  # a replace may have got new words
                if isinstance(error, TricommError):
                    fewer = shrink.members and what == "shrink"
                    of = f" (the smaller group's ranks are {list(shrink.members)} of this one)" if fewer else ""
                    error.args = (f"{group}: {what}: {error}{of}",)
                raise
            finally:
                shrink.close()  # here, because an interrupt after this function would drop `comm`
            finish(comm)
            return comm  # type: ignore[no-any-return]
        except BaseException as error:
            if made:  # the others have it already
                comm._faults.interrupted(error)
                comm.close()
            raise

    def _fewer(self, shrink: Shrink) -> tuple[Store | None, Terms, Fewer]:
        group, members = self._group, shrink.members
        self._faults.abort(GroupAborted, f"ranks {list(members)} have gone on as a smaller group")
        topology = group.options.topology.of(members) if group.options.topology is not None else None
        options, rank = replace(group.options, topology=topology), members.index(group.rank)
        left = max(shrink.deadline.left, 1e-3)
        terms = bootstrap.terms(rank, len(members), group.device, group.timeout, options, left)
        return self._store, terms, Fewer(shrink, group.recorder.rank)

    def _refuse_new(self, out: Collection[int], store: Store, deadline: Deadline) -> None:
        """Raise if ranks cannot be replaced, or not these, or not over this store."""
        group, control = self._group, self._group.control
        if handles := sorted([*group.owned, *group.registered]):
            raise InvalidArgument(f"symmetric handles {handles} are open: close them, and make them again afterwards")
        if group.arena.no_suspend:
            raise InvalidArgument(f"memory cannot keep its addresses: {group.arena.no_suspend}")
        if self._planner.adapted:
            raise InvalidArgument(
                "the communicator belongs to a process group or an engine: end that, and make it again"
            )
        if self._planner.nccl is not None and self._launcher.captured:
            raise InvalidArgument(
                "captured graphs may hold calls of NCCL, which cannot be replayed again: shrink instead"
            )
        if server_is_gone(store):
            raise RendezvousError("the process that hosted the store has ended: pass one that is alive, store=")

        def here() -> list[int]:
            return [rank for rank in out if control.page(rank).state != RankState.CLOSED and control.alive(rank)]

        if not poll(lambda: not here(), min(_ENDING_SECONDS, deadline.left), *_PAUSES):
            who = ", ".join(f"{rank} (pid {control.pid(rank)})" for rank in here())
            raise InvalidArgument(f"rank(s) {who} still run in this group: end them first, or leave them out by shrink")

    def _with_new(self, store: Store, meetings: Meetings, shrink: Shrink) -> tuple[Store, Terms, Survivor]:
        group = self._group
        self._faults.abort(GroupAborted, f"ranks {list(shrink.members)} make the group again")
        if not self._launcher.drained():
            raise ResourceError(f"a kernel of rank {group.rank} has not left")
        group.arena.suspend()
        left = max(shrink.deadline.left, 1e-3)
        terms = bootstrap.terms(group.rank, group.world_size, group.device, group.timeout, group.options, left)
        return store, terms, Survivor(group, shrink, meetings, terms)

    def _become(self, comm: Any) -> None:
        """Be `comm`, in one step, and end what was."""
        group, planner, launcher = self._group, self._planner, self._launcher
        if group.closed:
            raise GroupAborted(f"{group}: replace: another thread has closed it")
        comm._launcher.captured = launcher.captured
        # Graphs hold what these hold: kernels' code and their arguments.
        comm._retired = [*self._retired, planner] if launcher.captured else []
        steps: list[Callable[[], object]] = [each.detach for each in (self._dropped, comm._dropped) if each is not None]
        steps += [group.close, self._monitor.stop, group.recorder.close, comm._group.arena.own, group.arena.close]
        steps += [group.control.close, group.forget_views, partial(nccl.end, planner.nccl, True, LEAVE_SECONDS)]
        try:
            self.__dict__ = comm.__dict__
            _run_all(steps)
            self._release_if_dropped()
        except BaseException:  # of a signal; each step may be repeated
            _run_all(steps)
            raise


def _run_all(steps: Iterable[Callable[[], object]]) -> None:
    for step in steps:
        try:
            step()
        except ResourceError as error:
            log.warning("after replace: %s", error)
