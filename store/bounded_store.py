"""Store calls with a time limit.

A Store's own timeout does not hold: with the server of a TCPStore stopped, `get` with a timeout of 4 s was still
blocked after 90 s. So every call runs on another thread, and the caller waits for a limited time. A thread that is
stuck in a call cannot be ended; it stays as a daemon and is never used again.
"""

from __future__ import annotations

import os
import queue
import socket
import stat
import threading
import time
from collections.abc import Callable, Mapping
from concurrent import futures
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeVar, cast

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from tricomm import threads
from tricomm.deadline import Deadline
from tricomm.errors import RendezvousError

JOIN_SECONDS = 0.2
_EACH_SECONDS = 0.05  # between reads of single keys
_ABSENT = "\0tricomm: no such key"  # no value in a store

_T = TypeVar("_T")
_Job = tuple["Future[Any]", Callable[[], Any]]


class BoundedThread:
    """A daemon thread that runs one action at a time while its owner waits with a limit.

    It begins with the first action, and ends with its owner at the latest.
    """

    def __init__(self, name: str) -> None:
        self.stuck: str | None = None
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._name = name

    def __del__(self) -> None:
        if hasattr(self, "_jobs"):
            self._jobs.put(None)

    def run(self, action: Callable[[], _T], what: str, seconds: float) -> _T:
        """The result of `action`. Raises the errors of `action`, and after `seconds` a `RendezvousError` that names
        `what`."""
        if self.stuck is not None:
            raise RendezvousError(f"{what}: the store still does not answer {self.stuck}")
        job = self.start(action)
        try:
            return job.result(max(seconds, 0.0))
        except futures.TimeoutError:
            if job.done():  # a TimeoutError of the action, or it has just ended
                return job.result()
        self.stuck = what
        self._jobs.put(None)  # ends the thread if the action ever returns
        raise RendezvousError(f"{what}: timeout after {max(seconds, 0.0):.1f} s: is the store's server stopped?")

    def start(self, action: Callable[[], _T]) -> Future[_T]:
        """Begin `action` and return at once; its result or its error is the future's."""
        if self._thread is None:
            self._thread = threads.start(self._name, _serve, self._jobs)
        job: Future[_T] = Future()
        self._jobs.put((job, action))
        return job

    def close(self) -> None:
        """End the thread, unless it is stuck; idempotent."""
        self._jobs.put(None)
        if self.stuck is None and self._thread is not None and self._thread.is_alive():
            self._thread.join(JOIN_SECONDS)


def _serve(jobs: queue.SimpleQueue[_Job | None]) -> None:
    # Refers to the queue only: a reference to its owner would keep the owner, and the last store, alive.
    while (job := jobs.get()) is not None:
        future, action = job
        try:
            future.set_result(action())
        except Exception as error:
            future.set_exception(error)
        del job, future, action


class BoundedStore:
    """A Store whose calls share one limit of `timeout` seconds (see `extend`), and raise once it has passed.

    Every method raises `RendezvousError` that names the operation, the key and the seconds waited, if the store fails
    or does not answer. Any `torch.distributed` Store will do.
    """

    def __init__(self, store: Store, timeout: float = 300.0) -> None:
        self._store = store
        self._deadline = Deadline(timeout)
        self._thread = BoundedThread("tricomm-store")
        self._next_each = time.monotonic() + _EACH_SECONDS

    def set(self, key: str, value: bytes) -> None:
        # The declared type says str; bytes are passed on as they are, str would be encoded.
        self._call("set", key, lambda: self._store.set(key, cast(str, value)))

    def get_all(self, keys: list[str]) -> list[bytes]:
        """The values of keys that exist, in one request."""
        return self._call("get", keys[0], lambda: [bytes(value) for value in self._store.multi_get(keys)])

    def present(self, keys: Mapping[int, str], each: bool = False) -> list[tuple[int, bytes]]:
        """The values of `keys` that exist and are not empty, by rank, for a caller that polls.

        Asks for all keys in one request until all exist. Reads the keys one by one every 50 ms, or if `each`, because
        some may exist before the others.
        """
        now = time.monotonic()
        found: list[tuple[int, bytes | None]] = []
        if each or now >= self._next_each:
            self._next_each = now + _EACH_SECONDS
            found = [(rank, self.read(key)) for rank, key in keys.items()]
        elif keys and self.check(*keys.values()):
            found = list(zip(keys, self.get_all(list(keys.values())), strict=True))
        return [(rank, data) for rank, data in found if data]

    def add(self, key: str, amount: int) -> int:
        """The new total."""
        return self._call("add", key, lambda: int(self._store.add(key, amount)))

    def check(self, *keys: str) -> bool:
        """True if all these keys exist."""
        return bool(self._call("check", keys[0], lambda: self._store.check(list(keys))))

    def read(self, key: str) -> bytes | None:
        """The value of the key, or None if it does not exist. Never waits for the key, even if it is deleted
        meanwhile."""

        def action() -> bytes | None:
            try:
                value = bytes(self._store.compare_set(key, _ABSENT, _ABSENT))  # changes nothing
            except (AttributeError, RuntimeError):  # a Store in Python may have no such call
                return bytes(self._store.get(key)) if self._store.check([key]) else None
            return None if value == _ABSENT.encode() else value

        return self._call("get", key, action)

    def delete(self, key: str) -> None:
        """Delete the key if it exists; a store that cannot delete keeps it."""

        def action() -> None:
            with suppress(AttributeError, RuntimeError):
                self._store.delete_key(key)

        self._call("delete", key, action)

    def delete_all(self, which: Callable[[str], bool]) -> None:
        """Delete the keys for whose part before the first slash `which` is true."""
        for key in self.keys():
            if which(key.partition("/")[0]):
                self.delete(key)

    def keys(self) -> list[str]:
        """The names of all keys; none if the store cannot list them."""

        def action() -> list[str]:
            with suppress(AttributeError, RuntimeError):
                return [str(key) for key in self._store.list_keys()]
            return []

        return self._call("list_keys", "", action)

    @property
    def usable(self) -> bool:
        """False once a call has not returned in time: all later calls raise."""
        return self._thread.stuck is None

    def extend(self, seconds: float) -> None:
        """Extend the limit to at least `seconds` from now."""
        self._deadline.extend(seconds)

    def close(self) -> None:
        """End the thread; idempotent. The store itself stays open."""
        self._thread.close()

    def _call(self, operation: str, key: str, action: Callable[[], _T]) -> _T:
        began = time.monotonic()
        what = f"store {operation}({key!r})"

        def attempt() -> tuple[list[_T], Exception | None]:
            try:
                return [action()], None
            except Exception as error:
                return [], error

        # Errors of the store are returned as values, to tell them from an error that a signal handler raises.
        result, error = self._thread.run(attempt, what, self._deadline.left)
        if error is not None:
            waited = time.monotonic() - began
            raise RendezvousError(f"{what} failed after {waited:.1f} s: {first_line(error)}") from error
        return result[0]


def server_is_gone(store: Any) -> bool:
    """Whether the server of a TCPStore has closed this process's connections. A call would then fail, and torch would
    print a stack trace, although it is no fault if the rank that hosts the store ends first.

    This only looks at the connections: a new one that sends nothing blocks torch's server.
    """
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    if not isinstance(store, TCPStore):
        return False
    states = [_closed_by_peer(int(fd), store.port) for fd in os.listdir("/proc/self/fd")]
    return True in states and False not in states


def _closed_by_peer(fd: int, port: int) -> bool | None:
    """Whether the peer has closed the TCP connection `fd`; None if that does not lead to `port`."""
    try:
        if not stat.S_ISSOCK(os.fstat(fd).st_mode):
            return None
        with socket.socket(fileno=os.dup(fd)) as copy:
            if copy.family not in (socket.AF_INET, socket.AF_INET6) or copy.getpeername()[1] != port:
                return None
            try:
                return not copy.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
            except BlockingIOError:
                return False
            except OSError:
                return True
    except OSError:  # closed meanwhile, or not connected
        return None


def first_line(error: BaseException) -> str:
    """Class and first line of an error's text: torch appends a C++ stack trace to many."""
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0]}" if text else type(error).__name__
