"""One outcome for all ranks: what one rank cannot do, none does."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol, TypeVar

from tricomm.errors import ResourceError, TricommError

_T = TypeVar("_T")
_EXPECTED = (TricommError, OSError, RuntimeError, ValueError, TypeError, MemoryError)


class Agreeing(Protocol):
    """The part of a control page that this needs."""

    def agree(self, error: BaseException | None, what: str, timeout: float) -> None: ...


class Stages:
    """The stages of a set-up called `name`, which has to be over by `deadline` (monotonic)."""

    def __init__(self, control: Agreeing, name: str, deadline: float) -> None:
        self._control, self._name, self._deadline = control, name, deadline

    def __call__(self, stage: str, action: Callable[[], _T]) -> _T:
        """Result of `action` where it succeeded on all ranks; otherwise the same error on all.

        An error that is not tricomm's own becomes a `ResourceError`; here only if it is of the system's or torch's.
        """
        what = f"{self._name}: {stage}"
        try:
            result = action()
        except Exception as error:
            # The peers wait in `agree`: every kind of error has to reach them.
            known = error if isinstance(error, TricommError) else ResourceError(f"{type(error).__name__}: {error}")
            if isinstance(error, _EXPECTED):
                self._control.agree(known, what, left(self._deadline))
                raise known from error
            with suppress(TricommError):  # what all ranks raise; here the class of a signal handler's error counts
                self._control.agree(known, what, left(self._deadline))
            raise
        self._control.agree(None, what, left(self._deadline))
        return result


def left(deadline: float) -> float:
    """Seconds until `deadline`, and a moment where it has passed."""
    return max(deadline - time.monotonic(), 0.001)
