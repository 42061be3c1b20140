"""Set-up in stages with one outcome for all ranks: a stage that fails on one rank fails on all."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

from tricomm.deadline import Deadline
from tricomm.errors import ResourceError, TricommError
from tricomm.store.control import ControlPage

_T = TypeVar("_T")
_EXPECTED = (TricommError, OSError, RuntimeError, ValueError, TypeError, MemoryError)


class CollectiveStages:
    """The stages of a set-up called `name`, which has to end before `deadline`."""

    def __init__(self, control: ControlPage, name: str, deadline: Deadline) -> None:
        self.control, self.deadline, self._name = control, deadline, name

    def __call__(self, stage: str, action: Callable[[], _T]) -> _T:
        """Run `action` and return its result if it succeeds on all ranks; raises as `gather`."""
        results: list[_T] = []

        def run() -> bytes:
            results.append(action())
            return b""

        self.gather(stage, run)
        return results[0]

    def gather(self, stage: str, action: Callable[[], bytes]) -> list[bytes]:
        """Run `action`, which returns this rank's record (1024 bytes at most). Returns all ranks' records if it
        succeeds on all ranks; otherwise raises the same error on all.

        An error that is not a `TricommError` is a `ResourceError` on the other ranks, and on this rank if the system or
        torch raised it. Any other error (of a signal handler) is raised here unchanged.
        """
        what = f"{self._name}: {stage}"
        try:
            mine = action()
        except Exception as error:
            # The peers wait in the exchange, so they must be told every kind of error.
            known = error if isinstance(error, TricommError) else ResourceError(f"{type(error).__name__}: {error}")
            try:
                if isinstance(error, _EXPECTED):
                    self.control.agree(known, what, self.deadline.left)
                    raise known from error
                with suppress(TricommError):  # raised on the other ranks; here the handler's is raised
                    self.control.agree(known, what, self.deadline.left)
                raise
            finally:
                del known  # an error that refers to itself through this frame would keep memory mapped
        return self.control.exchange(mine, what, self.deadline.left)
