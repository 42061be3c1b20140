"""The data of the dashboard: the history, and the jobs' files, whose numbers it also puts into the history."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tricomm.errors import ResourceError
from tricomm.metrics import publish
from tricomm.perf.dashboard import collect, jobs, live, prometheus, render
from tricomm.perf.history import database, schema

_PATIENCE = 5.0  # seconds for another thread to finish its reading


class _Slow(ResourceError):
    """Another thread is still reading."""


class Source:
    """A history file and the jobs of this user. `say` is called with a message about each file that cannot be read."""

    def __init__(self, path: Path | None, say: Callable[[str], None]) -> None:
        self._path = database.default_path() if path is None else path.resolve()
        self._is_default = path is None
        if path is not None:
            schema.check_file(path)
        self._said: set[str] = set()
        self._tell = say
        self._lock = threading.Lock()
        self._made: tuple[Any, str] = (None, "")
        self._live = live.Live()
        self.unreadable = False  # whether the history is unreadable, so that another file or none is read in its place

    def jobs(self) -> jobs.PublishedJobs:
        """The jobs' statistics as they are published now."""
        published = jobs.read()
        for note in published.notes:
            self._say(note)
        return published

    def data(self) -> dict[str, Any]:
        """Everything that the page shows. Raises `ResourceError` for a history that broke while it was read."""
        published = self.jobs()
        doing = self._live.add(published.live)
        past = database.open_history(self._path, self._unreadable, self._is_default)
        if past is None:
            return collect.page_data(()) | doing
        with past:
            jobs.keep(published, past)
            try:
                return collect.page_data(past.read(), past.path.name) | doing
            except sqlite3.Error as error:
                raise ResourceError(f"history {past.path}: {error}; open it again to have it set aside") from None

    def packed(self) -> str:
        """The data for the page. The text changes only if the history or a job has new data.

        If another thread's read takes long, returns the previous text; raises `ResourceError` if there is none.
        """
        try:
            with self._reading():
                state = self._state()
                if state != self._made[0]:
                    self._made = (state, render.packed(self.data()))
        except _Slow:
            if not self._made[1]:
                raise
        return self._made[1]

    def metrics(self) -> bytes:
        """The metrics of live jobs, for Prometheus. Raises `ResourceError` if another thread's read takes long."""
        with self._reading():
            return prometheus.exposition(self.jobs().live)

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """One thread reads at a time, so a file system that hangs blocks one thread of the server, not all."""
        if not self._lock.acquire(timeout=_PATIENCE):
            raise _Slow(f"a file of {publish.folder()} or {self._path} does not answer: is its file system there?")
        try:
            yield
        finally:
            self._lock.release()

    def _state(self) -> Any:
        """A value that changes when a row is written (the write-ahead log grows) or a job publishes."""
        files = [self._path, Path(f"{self._path}-wal")]
        sizes = [(f.stat().st_mtime_ns, f.stat().st_size) if f.exists() else None for f in files]
        return sizes, [(job.name, job.written, job.live) for job in jobs.read().jobs]

    def _unreadable(self, text: str) -> None:
        self.unreadable = True
        self._say(text)

    def _say(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            self._tell(text)
