"""The call of this rank that is in flight, its time so far, and the peers that have not finished it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tricomm.errors import ResourceError
from tricomm.gpu import Gpu
from tricomm.kernels import layout
from tricomm.store.control import ControlPage, Fault
from tricomm.store.cuda.cuda_driver import load_driver

_STARTED, _STATUS = layout.STARTED, layout.STATUS
_ENDED = slice(layout.ENDED, layout.CONTROL_WORDS)  # a word for each block
_MOST_LOADING = 600.0  # seconds; a compiler that takes longer is assumed to hang
_MESSAGE, _MESSAGE_ENDED = layout.MESSAGE, layout.MESSAGE_ENDED


class UserCall:
    """A kernel that reports nothing to the control page: in flight until its `event`, if it has one, has passed. `name`
    is set for a user's kernel."""

    name = ""
    event: Any = None


class InFlight:
    """The call in flight. `elapsed` is its time so far in seconds, `loading` the part of it in which a rank for which
    it waits compiled or loaded a kernel. `describers` turn a status code that a kernel has reported into a `Fault`."""

    def __init__(self, control: ControlPage) -> None:
        self.elapsed = self.loading = 0.0
        self.describers: dict[int, Callable[[int, int], Fault]] = {}
        self._words = control.own().device_words()
        self._peers = {r: control.page(r).device_words() for r in control.peers}
        self._flags = memoryview(self._words)  # type: ignore[arg-type]  # reads faster than an array
        self._user_calls: list[UserCall] = []
        self._before: object = None
        self._relaxed = False

    def forget(self) -> None:
        """Release the memory."""
        self._words, self._peers = np.zeros(layout.CONTROL_WORDS, np.int64), {}
        self._flags = memoryview(self._words)  # type: ignore[arg-type]
        self.describers.clear()

    def leave(self) -> None:
        """Set the abort word, so that its kernels end."""
        self._words[layout.ABORT] = 1

    def reported(self) -> Fault | None:
        """The fault that a kernel has reported in the status word."""
        status = int(self._words[_STATUS])
        describe = self.describers.get(status & 0xFF)
        return describe((status >> 8) & 0xFF, (status >> 32) & 0xFFFFFFFF) if describe is not None else None

    @property
    def status(self) -> int:
        return int(self._words[_STATUS])

    @property
    def busy(self) -> bool:
        """Whether a call runs, or a kernel has reported something. Very cheap."""
        flags = self._flags
        return bool(
            self.in_epoch()
            or flags[_MESSAGE] != flags[_MESSAGE_ENDED]
            or flags[_STATUS]
            or self._user_calls
            or self._before is not None
        )

    @property
    def counts(self) -> bool:
        """Whether a call was running when time was counted last."""
        return self._before is not None

    def count(self, tick: float) -> None:
        """Add `tick` seconds to the time of the call that runs."""
        running = self.running()
        if running is None or running != self._before:
            self.elapsed = self.loading = 0.0
        else:
            self.elapsed += tick
            if any(self._peers[rank][layout.LOADING] for rank in self.unfinished()):
                self.loading = min(self.loading + tick, _MOST_LOADING)
        self._before = running

    def running(self) -> object:
        """The epoch of the kernel that runs, else the message or the user's call, or None. Calls queued after a running
        kernel do not count.
        """
        for past in list(self._user_calls):
            if past.event is not None and self._passed(past.event):
                self._user_calls.remove(past)
        if self.in_epoch():
            return self._started
        message = self.message()
        if message is not None:
            return "message", message
        return next(iter(list(self._user_calls)), None)  # calls end in other threads

    def in_epoch(self) -> bool:
        """Whether a collective's kernel runs: a block has not ended the epoch that the launch has started."""
        started = self._started
        return started != 0 and bool((self._words[_ENDED] == started).any())

    @property
    def _started(self) -> int:
        return int(self._words[_STARTED])

    def message(self) -> int | None:
        """The number of the message that runs."""
        number = int(self._words[_MESSAGE])
        return number if number != int(self._words[_MESSAGE_ENDED]) else None

    @property
    def from_any(self) -> bool:
        """Whether the running message is a receive from any rank."""
        return self.message() is not None and int(self._words[layout.MESSAGE_PEER]) < 0

    def unfinished(self) -> list[int]:
        """Ranks that have not done their part in the running call; unknown for a user's kernel."""
        if self.in_epoch():
            return [r for r, words in self._peers.items() if not _past(words[_ENDED], self._started).all()]
        peer = int(self._words[layout.MESSAGE_PEER]) if self.message() is not None else -1
        return [r for r in self._peers if peer in (-1, r)]

    def not_entered(self) -> list[int]:
        """Ranks that have not entered the collective that runs."""
        if not self.elapsed or not self.in_epoch():
            return []
        return [r for r, words in self._peers.items() if not _entered(int(words[_STARTED]), self._started)]

    @contextmanager
    def user_call(self, gpu: Gpu | None, name: str = "") -> Iterator[None]:
        """Count a user's kernel, which advances no epoch, as running: on a GPU until its event has passed."""
        token = UserCall()
        token.name = name
        self._user_calls.append(token)
        try:
            yield
            if gpu is not None and not gpu.capturing():
                # not before the launch, because an event that is not recorded yet counts as passed
                token.event = gpu.recorded()
        finally:
            if token.event is None:
                self._user_calls.remove(token)

    def _passed(self, event: torch.cuda.Event) -> bool:
        if not self._relaxed:  # otherwise a query would invalidate another thread's capture
            self._relaxed = True
            with suppress(ResourceError):
                load_driver().relax_capture()
        return bool(event.query())


def _past(ended: NDArray[np.int64], started: int) -> NDArray[np.bool_]:
    """For each block of a rank: True if the block has finished epoch `started`; `ended` has the epoch after its last
    call.

    Not the same as `ended != started`: a peer may be killed in the call before this rank's. Epochs wrap at 2^32, and
    ranks are never far apart.
    """
    since = (ended - started) % layout.EPOCH_LIMIT
    return (0 < since) & (since < layout.EPOCH_LIMIT // 2)


def _entered(theirs: int, started: int) -> bool:
    """True if a rank whose latest call has epoch `theirs` (0: none) has reached epoch `started`."""
    return theirs != 0 and (theirs - started) % layout.EPOCH_LIMIT < layout.EPOCH_LIMIT // 2
