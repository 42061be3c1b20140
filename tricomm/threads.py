"""Threads of the library: daemons, and a named error if the system starts no more."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from tricomm.errors import ResourceError


def start(name: str, target: Callable[..., Any], *args: Any) -> threading.Thread:
    """Run `target(*args)` in a thread called `name`, which does not keep the process from ending.

    Raises `ResourceError` if no thread can start: at the limit of processes, or without memory for a stack.
    """
    thread = threading.Thread(target=target, args=args, name=name, daemon=True)
    try:
        thread.start()
    except (RuntimeError, MemoryError) as error:
        raise ResourceError(
            f"the thread {name} cannot start ({error}): raise the limit of processes (ulimit -u; the pids limit of a "
            "container), or end threads that are not needed"
        ) from error
    return thread
