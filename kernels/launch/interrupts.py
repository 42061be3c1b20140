"""When a Ctrl-C may interrupt an interpreted launch, and when it is deferred."""

from __future__ import annotations

import signal
import threading
from typing import Any


class Interrupts:
    """Ctrl-C during a launch: raised in the kernel's own code, deferred in steps that must be atomic.

    Python runs signal handlers only after calls and backward jumps, so setting `raising` is atomic.
    """

    def __init__(self) -> None:
        self.raising = False
        self._noted: tuple[Any, ...] | None = None
        self._before: Any = None

    def begin(self) -> None:
        """Hold back interrupts from here on."""
        main = threading.current_thread() is threading.main_thread()
        if main and callable(before := signal.getsignal(signal.SIGINT)):
            self._before = before
            signal.signal(signal.SIGINT, self._handle)

    def let_through(self) -> None:
        """From here on raise them, and those that were held back."""
        self.raising = True
        self._hand_on()

    def poll(self) -> None:
        """Raise one that was held back, then hold back again."""
        self.let_through()
        self.raising = False

    def over(self) -> None:
        """Restore the previous handler, and hand on what it missed. May run again."""
        self.raising = False
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)
            self._hand_on()

    def _handle(self, *args: Any) -> None:
        self._noted = args
        if self.raising:
            self._hand_on()

    def _hand_on(self) -> None:
        noted, self._noted = self._noted, None
        if noted is not None:
            self._before(*noted)
