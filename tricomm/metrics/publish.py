"""Publishes a job's statistics for `tricomm dashboard`, in one file per process.

Nothing is written unless TRICOMM_STATS gives the interval in seconds. The file is replaced atomically, for the last
time when the process exits, and stays until its numbers are in the history. Errors here never fail a job.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import socket
import threading
import time
from collections import deque
from dataclasses import asdict, dataclass
from pathlib import Path

from tricomm import env, threads
from tricomm.errors import InvalidArgument, ResourceError
from tricomm.metrics.counters import Activity, Statistics, fallback_by_size
from tricomm.store import files, process

SCHEMA = 1
log = logging.getLogger("tricomm")
_SLACK = 60.0  # seconds, because clocks of hosts differ and shared file systems are slow
_MOST = 64  # latest communicators of a process that are published, so that the file does not grow
_lock = threading.Lock()
_publisher: _Publisher | None = None
_known: deque[Activity] = deque(maxlen=_MOST)


@dataclass(frozen=True)
class Routed:
    """Calls of the process's c10d groups that NCCL ran or that were sent over TCP."""

    route: str
    collective: str
    bucket: int
    calls: int
    nbytes: int


@dataclass(frozen=True)
class JobStatistics:
    """The statistics of one process, written every `every` seconds. `started` is in clock ticks since its host's boot,
    `written` in seconds of Unix time."""

    schema: int
    pid: int
    started: int
    host: str
    written: float
    every: float
    routed: tuple[Routed, ...]
    communicators: tuple[Statistics, ...]

    @property
    def name(self) -> str:
        return f"{self.host}/{self.pid}-{self.started}"

    @property
    def live(self) -> bool:
        """True if the process still runs; a process of another host counts as live while it writes."""
        if self.host == socket.gethostname():
            return process.start_time(self.pid) == self.started
        return time.time() - self.written < 3 * self.every + _SLACK


def folder() -> Path:
    """The directory to which jobs of this user write: TRICOMM_STATS_DIR, or `live` in the XDG state directory."""
    given = env.text("TRICOMM_STATS_DIR")
    return env.user_folder("XDG_STATE_HOME", ".local/state") / "live" if given is None else Path(given)


def check_folder() -> None:
    """Raises `InvalidArgument` if other users can replace the files of `folder()`; then nothing is written."""
    files.refuse_shared(folder(), "TRICOMM_STATS_DIR")


def add(activity: Activity) -> None:
    """Publish the statistics of this communicator if TRICOMM_STATS is set. Raises `InvalidArgument` if that is no
    number of seconds."""
    global _publisher
    seconds = interval()
    if seconds is None:
        return
    with _lock:
        if _publisher is None or _publisher.pid != os.getpid():  # a forked child gets its own
            _known.clear()
            _publisher = _Publisher(seconds)
        _known.append(activity)


def interval() -> float | None:
    """TRICOMM_STATS in seconds; None if it is not set. Raises `InvalidArgument`."""
    value = env.text("TRICOMM_STATS")
    try:
        seconds = None if value is None else float(value)
    except ValueError:
        seconds = -1.0
    if seconds is not None and not 0.1 <= seconds <= 86400:
        raise InvalidArgument(f"TRICOMM_STATS={value!r}: seconds between two writings are needed, 0.1 to 86400")
    return seconds


def snapshot() -> JobStatistics:
    """The counts of this process's published communicators and c10d groups until now."""
    with _lock:
        known = list(_known)
    return JobStatistics(
        schema=SCHEMA,
        pid=os.getpid(),
        started=process.start_time(os.getpid()) or 0,
        host=socket.gethostname(),
        written=time.time(),
        every=interval() or 0.0,
        routed=tuple(Routed(*key, *counts) for key, counts in fallback_by_size().items()),
        communicators=tuple(activity.statistics() for activity in known),
    )


def _after_fork() -> None:
    """In a child: the parent's thread may have held the lock."""
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_after_fork)


class _Publisher:
    """The thread that writes this process's file."""

    def __init__(self, interval: float) -> None:
        self.pid = os.getpid()
        self.file = folder() / f"{self.pid}-{process.start_time(self.pid) or 0}.json"
        self._interval, self._stop, self._said = interval, threading.Event(), False
        self._thread: threading.Thread | None = None
        atexit.register(self._end)
        try:
            self._thread = threads.start("tricomm-publisher", self._run)
        except ResourceError as error:
            log.warning("statistics are written only when the process ends: %s", error)

    def _run(self) -> None:
        while not self._stop.wait(self._interval):
            self.write()

    def _end(self) -> None:
        if os.getpid() == self.pid:
            self._stop.set()
            if self._thread is not None:
                self._thread.join(timeout=5.0)
            self.write()

    def write(self) -> None:
        """Replace the file; only the first error is logged."""
        try:
            files.make_directory(self.file.parent)
            files.replace(self.file, json.dumps(asdict(snapshot())).encode())
        except Exception as error:  # an error here must not end the job
            if not self._said:
                self._said = True
                log.warning("statistics cannot be written to %s: %s", self.file, error)
