"""Set-up in stages with one outcome for all ranks: a stage that fails on one rank fails on all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TypeVar

from tricomm.deadline import Deadline
from tricomm.errors import PeerDied, ResourceError, TricommError
from tricomm.store.control import ControlPage
from tricomm.store.descriptors import DescriptorSocket, Sender

_T = TypeVar("_T")
_U = TypeVar("_U")
_EXPECTED = (TricommError, OSError, RuntimeError, ValueError, TypeError, MemoryError)


class CollectiveStages:
    """The stages of a set-up called `name`, which has to end before `deadline`."""

    def __init__(self, control: ControlPage, name: str, deadline: Deadline) -> None:
        self._control, self._name, self._deadline = control, name, deadline

    def __call__(self, stage: str, action: Callable[[], _T]) -> _T:
        """Run `action` and return its result if it succeeds on all ranks; otherwise raise the same error on all.

        The other ranks see an error that is not tricomm's own as a `ResourceError`. So does this rank if the system or
        torch raised it; any other error (a signal handler's) is raised here unchanged.
        """

        def agree(error: TricommError | None, result: Sequence[_T], what: str) -> _T:
            self._control.agree(error, what, self._deadline.left)
            return result[0]

        return self._joint(stage, action, agree)

    def gather(self, stage: str, action: Callable[[], bytes]) -> list[bytes]:
        """The same, for an action that gives this rank's record (1023 bytes at most); returns all ranks' records."""

        def gather(error: TricommError | None, result: Sequence[bytes], what: str) -> list[bytes]:
            return self._control.gather(error, result[0] if result else b"", what, self._deadline.left)

        return self._joint(stage, action, gather)

    def _joint(
        self, stage: str, action: Callable[[], _T], meet: Callable[[TricommError | None, Sequence[_T], str], _U]
    ) -> _U:
        what = f"{self._name}: {stage}"
        try:
            result = action()
        except Exception as error:
            # The peers wait in `meet`: every kind of error has to reach them.
            known = error if isinstance(error, TricommError) else ResourceError(f"{type(error).__name__}: {error}")
            try:
                if isinstance(error, _EXPECTED):
                    meet(known, (), what)
                    raise known from error
                with suppress(TricommError):  # raised on the others; this rank raises a signal handler's error itself
                    meet(known, (), what)
                raise
            finally:
                del known  # an error that refers to itself through this frame would keep memory mapped
        return meet(None, (result,), what)


def pass_descriptors(
    control: ControlPage,
    passing: DescriptorSocket,
    names: Sequence[bytes],
    mine: Sequence[int],
    take: Callable[[int, list[int]], None],
    what: str,
    deadline: Deadline,
) -> None:
    """`DescriptorSocket.exchange` as a stage of a set-up; `what` names it in messages.

    Also raises `PeerDied` if a rank has ended, and an error of the same class if the stage has failed on another rank.
    """

    def look() -> None:
        control.give_up_if_refused()
        ended = [rank for rank in control.peers if not control.alive(rank)]
        if ended:
            raise PeerDied(f"rank(s) {ended} died")

    sender = Sender(control.rank, control.world_size, control.nonce, what)
    passing.exchange(sender, names, mine, take, deadline, look)
