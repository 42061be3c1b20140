"""The faults of a group: what a kernel reported, put into words; what a call raises; what the others are told."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress

import numpy as np
from numpy.typing import NDArray

from tricomm import errors
from tricomm.core.entry_guard import Turn, inside
from tricomm.core.monitor import Monitor, different
from tricomm.errors import GroupAborted, InvalidArgument, ResourceError, TricommError
from tricomm.gpu import Gpu
from tricomm.kernels import layout
from tricomm.store.control import ControlPage, Fault

_STATUS, _ABORT = layout.STATUS, layout.ABORT


class Faults:
    """The part of a group that speaks of its faults; the monitor finds them."""

    rank: int
    _gpu: Gpu | None
    _sequence: int
    _turn: Turn
    _control: ControlPage
    _monitor: Monitor
    _words: NDArray[np.int64]
    _flags: memoryview

    def check(self) -> None:
        """Raise the group's fault where there is one; costs two memory reads where there is none."""
        if self._flags[_STATUS] or self._flags[_ABORT] or self._monitor.fault is not None:
            self._diagnose()
            self._raise()

    def _unwound(self, error: BaseException) -> None:
        """By the guard of every public call: `error` leaves it.

        Where it is not tricomm's own, it came from outside, at any instruction: what this rank has told the others by
        then, nobody knows, so the group is given up.
        """
        try:
            if not isinstance(error, TricommError):
                self.interrupted(error)
        finally:
            if not inside(self):
                self._turn.let_go()

    @contextmanager
    def _or_give_up(self, what: str) -> Iterator[None]:
        """A step of all ranks together: where it fails otherwise than jointly, the group has come apart."""
        try:
            yield
        except (InvalidArgument, ResourceError):
            raise
        except BaseException as error:
            kind = type(error) if isinstance(error, TricommError) else GroupAborted
            self._monitor.give_up(self._fault(kind, f"{what} failed on rank {self.rank}: {_name(error)}"))
            raise

    def interrupted(self, error: BaseException) -> None:
        """Give the group up because `error` has stopped this rank, and tell the others; nothing if it is closed."""
        with suppress(GroupAborted):
            self._monitor.give_up(self._fault(GroupAborted, f"rank {self.rank} was stopped by {_name(error)}"))

    def _not_launched(self, error: BaseException) -> None:
        """`error` has ended a call whose kernel the peers may be waiting for: give the group up, and tell them.

        Raises `ResourceError` that says so for one that the driver has refused.
        """
        self.interrupted(error)
        if isinstance(error, ResourceError):
            raise ResourceError(
                f"{error}. Nothing was launched on rank {self.rank}, so the group is lost: the other ranks get "
                "GroupAborted; make a new communicator"
            ) from error

    def _diagnose(self) -> None:
        """Put what a kernel reported in the status word into words."""
        status = int(self._words[layout.STATUS])
        if status & 0xFF == layout.OVERLAP:
            self._monitor.give_up(
                self._fault(
                    GroupAborted,
                    "two launches of this communicator overlapped: a graph replay ran beside another call; order them "
                    "on one stream or with an event",
                )
            )
        elif status & 0xFF == layout.SPLITS:
            peer, got = (status >> 8) & 0xFF, (status >> 32) & 0xFFFFFFFF
            text = (
                f"rank {peer} sends rank {self.rank} {got} elements, and out_splits[{peer}] of the latter is not that; "
                f"it must be in_splits[{self.rank}] of the former"
            )
            self._monitor.give_up(Fault(errors.CollectiveMismatch.__name__, peer, self._sequence, text))
        elif status & 0xFF == layout.MISMATCH:
            self._monitor.give_up(self._mismatch((status >> 8) & 0xFF, (status >> 32) & 0xFFFFFFFF))

    def _describe(self, message: int) -> str:
        """What a message of that number waits for; groups that have messages know more."""
        return f"message {message}"

    def _mismatch(self, peer: int, fingerprint: int) -> Fault:
        mine = self._control.last(self.rank)
        theirs = self._control.called(peer, mine.sequence) if mine is not None else None
        if theirs is None or theirs.fingerprint != fingerprint:
            theirs = self._control.last(peer)
        said = theirs.text() if theirs else f"a call with fingerprint {fingerprint:08x}"
        text = different(self.rank, mine.text() if mine else "none", peer, said)
        return Fault(errors.CollectiveMismatch.__name__, peer, self._sequence, text)

    def _fault(self, kind: type[TricommError], text: str) -> Fault:
        return Fault(kind.__name__, self.rank, self._sequence, text)

    def _raise(self) -> None:
        fault = self._monitor.fault
        if fault is None:  # abort without a fault can only be a fault that is being recorded this very moment
            fault = self._monitor.give_up(self._fault(GroupAborted, "the group was given up"))
        kind = getattr(errors, fault.kind, GroupAborted)
        raise kind(f"{self}, sequence {fault.sequence}: {fault.text}. The group is lost; make a new communicator.")


def _name(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
