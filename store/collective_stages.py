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
_EXPECTED = (TricommError, OSError, RuntimeError, ValueError, TypeError, MemoryError)


class CollectiveStages:
    """The stages of a set-up called `name`, which has to end before `deadline`."""

    def __init__(self, control: ControlPage, name: str, deadline: Deadline) -> None:
        self._control, self._name, self._deadline = control, name, deadline

    def __call__(self, stage: str, action: Callable[[], _T]) -> _T:
        """Run `action` and return its result if it succeeds on all ranks; otherwise raise the same error on all.

        An error that is not tricomm's own becomes a `ResourceError`; on this rank only if its class is the system's or
        torch's.
        """
        what = f"{self._name}: {stage}"
        try:
            result = action()
        except Exception as error:
            # The peers wait in `agree`: every kind of error has to reach them.
            known = error if isinstance(error, TricommError) else ResourceError(f"{type(error).__name__}: {error}")
            if isinstance(error, _EXPECTED):
                self._control.agree(known, what, self._deadline.left)
                raise known from error
            with suppress(TricommError):  # raised on the other ranks; this one raises a signal handler's error itself
                self._control.agree(known, what, self._deadline.left)
            raise
        self._control.agree(None, what, self._deadline.left)
        return result


def pass_descriptors(
    control: ControlPage, passing: DescriptorSocket, names: Sequence[bytes], mine: Sequence[int],
    take: Callable[[int, list[int]], None], what: str, deadline: Deadline,
) -> None:  # fmt: skip
    """`DescriptorSocket.exchange` in a stage of a set-up of a group that has a control page, for what `what` names.

    Raises also `PeerDied` if a rank has ended, `GroupAborted` if the stage has failed on another rank.
    """

    def look() -> None:
        control.give_up_if_refused()
        ended = [rank for rank in control.peers if not control.alive(rank)]
        if ended:
            raise PeerDied(f"rank(s) {ended} died")

    sender = Sender(control.rank, control.world_size, control.nonce, what)
    passing.exchange(sender, names, mine, take, deadline, look)
