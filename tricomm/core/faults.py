"""The faults of a group: kernels' reports in words, the errors that calls raise, and those that the other ranks get.

The monitor detects faults. A fault ends the group and nothing else.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NoReturn

import torch

from tricomm import arguments, errors
from tricomm.core.group import Group
from tricomm.core.symmetric import Symmetric
from tricomm.core.watch.monitor import Monitor, different
from tricomm.errors import (
    CollectiveMismatch,
    CollectiveTimeout,
    GroupAborted,
    InvalidArgument,
    ResourceError,
    TricommError,
)
from tricomm.kernels import layout
from tricomm.kernels.launch.kernel_launch import BoundKernel
from tricomm.store.control import Fault
from tricomm.store.process import forks

_STATUS, _ABORT = layout.STATUS, layout.ABORT


class Faults:
    """One group's faults. Methods of this class turn kernels' reports into faults for the monitor.

    handles    counts the handles of calls
    completed  calls whose handles have numbers up to this one had completed before the group had a fault
    remedy     what the ranks can do after a fault, in words
    """

    def __init__(self, group: Group, monitor: Monitor, remedy: str = "") -> None:
        """`remedy`: what ranks that share memory can do after a fault, in words."""
        self.group = group
        self.remedy = f"{remedy}, or " * bool(remedy and group.control.peers) + "make a new communicator"
        self.monitor = self._monitor = monitor
        self._counting = threading.Lock()
        self.handles, self.completed = itertools.count(1), 0
        describers = monitor.in_flight.describers
        describers[layout.OVERLAP] = self._overlap
        describers[layout.SPLITS] = self._splits
        describers[layout.MISMATCH] = self._mismatch

    def check_usable(self) -> None:
        """Raise unless calls may be made: the group's fault, or `GroupAborted` after `close`, or `InvalidArgument` in
        a forked child and while it is suspended."""
        group = self.group
        flags = group.flags
        if not (flags[_STATUS] or flags[_ABORT] or self._monitor.fault or group.refusing or forks() != group.forks):
            return
        if forks() != group.forks:
            raise InvalidArgument(
                f"{group}: made in process {group.pid}, forked into {os.getpid()}; make a new one here"
            )
        if not group.closed:
            self.check()
        if group.refusing:
            self.raise_refused()

    def checked(self, x: Any, what: str) -> torch.Tensor:
        """The tensor of a call with `x`, a tensor or a symmetric handle. Raises as `check_usable`, and
        `InvalidArgument` for a tensor that no backend supports."""
        self.check_usable()
        tensor = x.local if isinstance(x, Symmetric) else x
        arguments.check_tensor(tensor, self.group.device, what)
        return tensor

    def raise_refused(self) -> NoReturn:
        """Raise the error of a call on a group that is closed or suspended."""
        if self.group.closed:
            raise GroupAborted(f"{self.group}: closed; make a new communicator")
        raise InvalidArgument(
            f"{self.group}: suspended, so its memory is freed: no call is possible before resume() on all ranks"
        )

    def known(self) -> bool:
        """Whether the group has a fault; costs two memory reads."""
        flags = self.group.flags
        return bool(flags[_STATUS] or flags[_ABORT] or self._monitor.fault is not None)

    def check(self) -> None:
        """Raise the group's fault if there is one; costs two memory reads if there is none."""
        if self.known():
            self._monitor.diagnose()
            self.raise_fault()

    def raise_fault(self) -> NoReturn:
        """Raise the group's fault, which is known or is being recorded by another thread."""
        fault = self._monitor.fault
        if fault is None:
            fault = self._monitor.abort(self.of(GroupAborted, "the group was aborted"))
        kind = getattr(errors, fault.kind, GroupAborted)
        raise kind(
            f"{self.group}, sequence {fault.sequence}: {fault.text}. The group is lost; {self.remedy}."
            f"{self.group.recorder.report()}"
        )

    def raise_lost(self, rank: int) -> NoReturn:
        """Abort the group because `rank` is gone, and raise that."""
        self._monitor.died(rank)
        self.raise_fault()

    @contextmanager
    def abort_on_error(self, what: str) -> Iterator[None]:
        """A context manager for a step that all ranks make: aborts the group if the step fails in a way that differs
        between ranks."""
        try:
            yield
        except (InvalidArgument, ResourceError):
            raise
        except BaseException as error:
            kind = type(error) if isinstance(error, TricommError) else GroupAborted
            self.abort(kind, f"{what} failed on rank {self.group.rank}: {_name(error)}")
            raise

    def late(self, seconds: float, text: str) -> CollectiveTimeout:
        """The `CollectiveTimeout` of a wait of `seconds`; the group stays usable."""
        error = CollectiveTimeout(f"{self.group}: timeout after {seconds:g} s: {text}")
        self.group.recorder.name_in(error)
        return error

    def abort(self, kind: type[TricommError], text: str) -> None:
        """Abort the group, and tell the other ranks. A later fault does not replace the first."""
        self._monitor.abort(self.of(kind, text))

    def interrupted(self, error: BaseException) -> None:
        """Abort the group because `error` has stopped this rank; does nothing if it is closed."""
        with suppress(GroupAborted):
            self.abort(GroupAborted, f"rank {self.group.rank} was stopped by {_name(error)}")

    def loaded(self, bind: Callable[..., BoundKernel], *arguments: Any, **keywords: Any) -> BoundKernel:
        """The kernel that `bind` compiles and loads; meanwhile the peers' calls have no time limit. An error aborts the
        group, as in `not_launched`, because the peers would wait for this rank."""
        try:
            with self._loading():
                return bind(*arguments, **keywords)
        except ResourceError as error:
            self.not_launched(error)
            raise

    @contextmanager
    def _loading(self) -> Iterator[None]:
        """A context manager: tells the peers that this rank loads a kernel."""
        with self._counting:  # several threads may load at once
            self.group.words[layout.LOADING] += 1
        try:
            yield
        finally:
            with self._counting:
                self.group.words[layout.LOADING] -= 1

    def not_launched(self, error: BaseException) -> None:
        """Abort the group, because `error` has ended a call for whose kernel the peers may wait.

        Raises a `ResourceError` that says so if the driver refused the launch.
        """
        self.interrupted(error)
        if isinstance(error, ResourceError):
            raise ResourceError(
                f"{error}. Nothing was launched on rank {self.group.rank}, so the group is lost: the other ranks get "
                "GroupAborted; make a new communicator"
            ) from error

    def of(self, kind: type[TricommError], text: str, culprit: int | None = None) -> Fault:
        """A `Fault` of this rank's latest call; `culprit` is the rank that caused it, by default this one."""
        rank = self.group.rank
        sequence = self.group.control.page(rank).sequence()
        return Fault(kind.__name__, rank if culprit is None else culprit, sequence, text)

    def _overlap(self, peer: int, got: int) -> Fault:
        return self.of(
            GroupAborted,
            "two launches of this communicator overlapped, or the last one did not end as kernels do. If a graph "
            "replay ran during another call, order them on one stream or with an event, or make one of them over a "
            "second communicator, comm.split(range(comm.world_size))",
        )

    def _splits(self, peer: int, got: int) -> Fault:
        rank = self.group.rank
        text = (
            f"rank {peer} sends rank {rank} {got} elements, and out_splits[{peer}] of the latter is not that; it must "
            f"be in_splits[{rank}] of the former"
        )
        return self.of(CollectiveMismatch, text, peer)

    def _mismatch(self, peer: int, fingerprint: int) -> Fault:
        control, rank = self.group.control, self.group.rank
        mine = control.page(rank).last()
        theirs = control.page(peer).called(mine.sequence) if mine is not None else None
        if theirs is None or theirs.fingerprint != fingerprint:
            theirs = control.page(peer).last()
        if mine and theirs and (mine.sequence, mine.fingerprint) == (theirs.sequence, theirs.fingerprint):
            text = (
                f"rank {rank} and rank {peer} both made {mine.text()}, but a header from rank {peer} is of another "
                "call: their kernels count chunks differently, or something else wrote to the group's memory"
            )
            return self.of(CollectiveMismatch, text, peer)
        said = theirs.text() if theirs else f"a call with fingerprint {fingerprint:08x}"
        return self.of(CollectiveMismatch, different(rank, mine.text() if mine else "none", peer, said), peer)


def _name(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
