"""Ranks of this node as worker processes: run them, read their messages, and end all of them.

A worker is `python -m tricomm.perf.workers MODULE:FUNCTION RANK WORLD URL JSON`. It calls the function, whose messages
are written as JSON lines to standard output, which the parent reads (`run_workers`). Only JSON is exchanged.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from tricomm.errors import TricommError

WorkerMessage = dict[str, Any]
_GRACE = 2.0  # seconds in which the other workers can report their own errors
_PR_SET_PDEATHSIG = 1


class RankFailed(TricommError):
    """A rank failed or sent nothing in time; all ranks have ended. `unsupported`: the environment lacks something."""

    def __init__(self, text: str, unsupported: bool = False) -> None:
        super().__init__(text)
        self.unsupported = unsupported


def end_with_parent() -> None:
    """Have this process killed when the thread that started it ends for any reason."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def json_lines_only() -> IO[str]:
    """Standard output, for JSON lines only; all other output of this process is redirected to standard error."""
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    return out


def run_workers(function: str, world_size: int, settings: Any, timeout: float) -> Iterator[tuple[int, WorkerMessage]]:
    """Run `function` ("module:name") as `world_size` workers and yield (rank, message); no worker outlives this.

    The function is called as `function(emit, rank, world_size, url, settings)`, where `url` is for `tricomm.init` and
    `emit(event, **fields)` sends a message. Raises `RankFailed` with the workers' errors if one fails, or if none sends
    a message for `timeout` seconds.
    """
    with _started(function, world_size, settings) as workers:
        waiting, done, errors = set(range(world_size)), set[int](), dict[int, WorkerMessage]()
        limit = time.monotonic() + timeout
        while waiting:
            try:
                rank, line = workers.lines.get(timeout=max(0.0, limit - time.monotonic()))
            except queue.Empty:
                break
            message: WorkerMessage = json.loads(line) if line is not None else {"event": "end"}
            if message["event"] == "error":
                errors[rank] = message
            elif message["event"] == "end":
                waiting.discard(rank)
                if rank not in done and rank not in errors:
                    code, output = workers.processes[rank].wait(), _tail(workers.logs[rank])
                    errors[rank] = {"error": "", "text": f"exit code {code}; its last output: {output}"}
            elif message["event"] == "done":
                done.add(rank)
            elif not errors:
                limit = time.monotonic() + timeout
                yield rank, message
            if errors:
                limit = min(limit, time.monotonic() + _GRACE)
        _raise_failures(errors, waiting, timeout)


def _raise_failures(errors: dict[int, WorkerMessage], waiting: set[int], timeout: float) -> None:
    if errors:
        lines = [": ".join(filter(None, (f"rank {r}", e["error"], e["text"]))) for r, e in errors.items()]
        raise RankFailed("\n".join(lines), next(iter(errors.values()))["error"] == "ResourceError")
    if waiting:
        silent = ", ".join(str(r) for r in sorted(waiting))
        raise RankFailed(f"rank {silent}: no message for {timeout:g} s; all ranks have been ended")


@dataclass
class _Workers:
    processes: list[subprocess.Popen[str]] = field(default_factory=list)
    logs: list[IO[str]] = field(default_factory=list)
    readers: list[threading.Thread] = field(default_factory=list)
    lines: queue.Queue[tuple[int, str | None]] = field(default_factory=queue.Queue)

    def start(self, rank: int, arguments: list[str], log: IO[str]) -> None:
        process = subprocess.Popen(
            [sys.executable, "-m", "tricomm.perf.workers", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            start_new_session=True,
        )
        self.processes.append(process)
        self.logs.append(log)
        reader = threading.Thread(target=self._read, args=(rank, process.stdout), daemon=True)
        reader.start()
        self.readers.append(reader)

    def _read(self, rank: int, pipe: IO[str]) -> None:
        with pipe:
            for line in pipe:
                self.lines.put((rank, line))
        self.lines.put((rank, None))

    def end(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.kill()
        for process in self.processes:
            process.wait()
        for reader in self.readers:
            reader.join(_GRACE)


@contextmanager
def _started(function: str, world_size: int, settings: Any) -> Iterator[_Workers]:
    workers = _Workers()
    with ExitStack() as undo:
        folder = undo.enter_context(tempfile.TemporaryDirectory(prefix="tricomm-ranks-"))
        undo.callback(workers.end)
        for rank in range(world_size):
            log = undo.enter_context((Path(folder) / f"rank{rank}.log").open("w+"))
            url = f"file://{folder}/meeting"
            workers.start(rank, [function, str(rank), str(world_size), url, json.dumps(settings)], log)
        yield workers


def _tail(log: IO[str]) -> str:
    log.seek(0)
    return " | ".join(log.read().strip().splitlines()[-8:]) or "nothing"


def _work() -> int:
    """Be a worker; the exit code."""
    end_with_parent()
    out = json_lines_only()

    def emit(event: str, **fields: Any) -> None:
        out.write(json.dumps({**fields, "event": event}) + "\n")
        out.flush()

    try:
        function, rank, world_size, url, settings = sys.argv[1:]
        module, _, name = function.partition(":")
        getattr(importlib.import_module(module), name)(emit, int(rank), int(world_size), url, json.loads(settings))
        emit("done")
        return 0
    except Exception as error:
        emit("error", error=type(error).__name__, text=str(error))
        return 1


if __name__ == "__main__":
    sys.exit(_work())
