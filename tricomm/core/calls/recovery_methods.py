"""`Communicator.shrink`: a smaller group after the loss of some ranks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any, Self

from torch.distributed.distributed_c10d import Store

from tricomm import arguments
from tricomm.core import bootstrap
from tricomm.core.entry_guard import guarded
from tricomm.core.faults import Faults
from tricomm.core.group import Group
from tricomm.core.launcher import Launcher
from tricomm.core.watch.monitor import Monitor
from tricomm.deadline import Deadline
from tricomm.errors import GroupAborted, InvalidArgument, TricommError
from tricomm.options import seconds
from tricomm.store.control import ControlPage
from tricomm.store.process import forks
from tricomm.store.shrink import MOST_RANKS, Shrink


class RecoveryMethods:
    """The recovery of a group."""

    _group: Group
    _faults: Faults
    _launcher: Launcher
    _monitor: Monitor
    _store: Store | None
    _meet: Callable[..., None]
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
        if another rank ends meanwhile, `CollectiveTimeout` that names ranks that do not call it, `ResourceError`. A
        group without a fault stays usable until the ranks agree. An excluded rank that still runs gets the group's
        fault in its call or at its next one, and `GroupAborted` if it calls this.
        """
        out = arguments.excluded(exclude, self._group.rank, self._group.world_size)
        with self._recovering("shrink", timeout) as deadline:
            return self._shrunk(Shrink(self._group.control, out, deadline))

    @guarded
    def _shrink_into(
        self, exclude: Collection[int] | None, timeout: float, make: Callable[[ControlPage, tuple[int, ...]], None]
    ) -> None:
        """Agree as `shrink` does, and let `make` set up what these ranks have instead of this communicator: it is
        called with pages of theirs, which end with this call, and with their numbers here. Returns on all of them or
        raises on all. This communicator then has a fault, and is not closed."""
        group = self._group
        out = arguments.excluded(exclude, group.rank, group.world_size)
        with self._recovering("shrink", timeout) as deadline, ExitStack() as undo:
            shrink = Shrink(group.control, out, deadline)
            undo.callback(shrink.close)
            try:
                shrink.agree()
                self._faults.abort(GroupAborted, f"ranks {list(shrink.members)} have gone on as a smaller group")
                undo.push(partial(bootstrap.leave, control := shrink.connect()))
                control.agree(None, "shrink", deadline.left)
                make(control, shrink.members)
                shrink.decide()
            except BaseException as error:
                shrink.give_up(error)
                if isinstance(error, TricommError):
                    error.args = (f"{group}: shrink: {error}",)
                raise

    @contextmanager
    def _recovering(self, what: str, timeout: float | timedelta | None) -> Iterator[Deadline]:
        """Around a recovery, one at a time, after this rank's calls."""
        group, lock = self._group, self._group.recovering
        limit = group.timeout if timeout is None else seconds(timeout, "timeout")
        deadline = Deadline(limit)
        if lock.mine():
            raise InvalidArgument(f"{group}: {what} inside another {what} of the same thread")
        try:
            if not lock.acquire(timeout=limit):
                raise self._faults.late(limit, f"another thread's {what} still runs")
            self._check_shrinkable()
            self._end_calls(deadline)
            yield deadline
        finally:
            lock.release_all()

    def _check_shrinkable(self) -> None:
        group = self._group
        if group.closed or forks() != group.forks:
            self._faults.check_usable()
        if self._store is None:
            raise InvalidArgument("shrink: the ranks of one process end together; make a group of another size")
        if not group.control.peers and group.world_size > 1 or group.world_size > MOST_RANKS:
            raise InvalidArgument(
                f"shrink: only ranks that share memory can agree, {MOST_RANKS} at most, and these cannot: make a new "
                "communicator over a store"
            )
        if (error := group.captured("shrink")) is not None:
            raise error

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

    def _shrunk(self, shrink: Shrink) -> Self:
        group = self._group
        comm: Any = type(self).__new__(type(self))
        made: list[Any] = []
        try:
            try:
                shrink.agree()
                members = shrink.members
                self._faults.abort(GroupAborted, f"ranks {list(members)} have gone on as a smaller group")
                topology = group.options.topology.of(members) if group.options.topology is not None else None
                options, rank = replace(group.options, topology=topology), members.index(group.rank)
                left = max(shrink.deadline.left, 1e-3)
                terms = bootstrap.terms(rank, len(members), group.device, group.timeout, options, left)
                made.append(comm._meet(self._store, terms, shrink, group.recorder.rank) or comm)
            except BaseException as error:
                with suppress(GroupAborted):  # another thread has closed this one
                    shrink.give_up(error)
                if isinstance(error, TricommError):
                    of = (
                        f" (the smaller group's ranks are {list(shrink.members)} of this one)" if shrink.members else ""
                    )
                    error.args = (f"{group}: shrink: {error}{of}",)
                raise
            finally:
                shrink.close()
            self.close()
            return comm  # type: ignore[no-any-return]
        except BaseException as error:
            if made:  # the others have it already
                comm._faults.interrupted(error)
                comm.close()
            raise
