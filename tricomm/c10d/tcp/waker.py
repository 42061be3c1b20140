"""Ends a thread's wait for sockets, from another thread."""

from __future__ import annotations

import os
import threading
from contextlib import suppress

from tricomm.c10d.tcp.waits import TICK

_here = threading.local()


class Waker:
    """Ends one thread's waits. `tick` is in milliseconds: without a descriptor the thread looks more often."""

    def __init__(self) -> None:
        self.tick, self.fd = TICK * 1000.0, -1
        try:
            self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        except OSError:
            self.tick = 2.0

    def wake(self) -> None:
        if self.fd >= 0:
            with suppress(OSError):
                os.eventfd_write(self.fd, 1)

    def clear(self) -> None:
        with suppress(OSError):
            os.eventfd_read(self.fd)

    def __del__(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)


def of_thread() -> Waker:
    """This thread's."""
    kept: Waker | None = getattr(_here, "waker", None)
    if kept is None:
        kept = _here.waker = Waker()
    return kept


def _in_forked_child() -> None:
    global _here
    _here = threading.local()


os.register_at_fork(after_in_child=_in_forked_child)
