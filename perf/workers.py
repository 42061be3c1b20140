"""Ranks of this node as processes of their own: start them, hear them, and never leave one behind.

A rank is `python -m MODULE RANK WORLD URL JSON`; it says what it has to say as JSON lines on its standard output
(`speak`), and the parent reads them (`talk`). Nothing but JSON crosses.
"""

from __future__ import annotations

import ctypes
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from tricomm.errors import TricommError

Record = dict[str, Any]
_GRACE = 2.0  # seconds in which the other ranks may say what happened to them
_PR_SET_PDEATHSIG = 1


class RankFailed(TricommError):
    """A rank failed or fell silent; all ranks have been ended. `unsupported`: the environment lacks something."""

    def __init__(self, text: str, unsupported: bool = False) -> None:
        super().__init__(text)
        self.unsupported = unsupported


def end_with_parent() -> None:
    """Have this process killed when the thread that started it ends, whatever ends it."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def speak(main: Callable[[Callable[..., None], int, int, str, Any], None]) -> int:
    """Be a rank: run `main(say, rank, world_size, url, settings)`; returns the exit code."""
    end_with_parent()  # a rank must not outlive the command, even one that was killed outright
    # Whatever else prints, on any level, must not get between the JSON lines.
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def say(what: str, **record: Any) -> None:
        out.write(json.dumps({**record, "what": what}) + "\n")
        out.flush()

    try:
        rank, world_size, url, settings = sys.argv[1:]
        main(say, int(rank), int(world_size), url, json.loads(settings))
        say("done")
        return 0
    except Exception as error:
        say("error", error=type(error).__name__, text=str(error))
        return 1


@dataclass
class _Ranks:
    processes: list[subprocess.Popen[str]] = field(default_factory=list)
    logs: list[IO[str]] = field(default_factory=list)
    readers: list[threading.Thread] = field(default_factory=list)
    lines: queue.Queue[tuple[int, str | None]] = field(default_factory=queue.Queue)

    def start(self, rank: int, arguments: list[str], log: IO[str]) -> None:
        process = subprocess.Popen(
            [sys.executable, "-m", *arguments], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log,
            text=True, start_new_session=True,
        )  # fmt: skip
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
def _started(module: str, world_size: int, settings: Any) -> Iterator[_Ranks]:
    ranks = _Ranks()
    with ExitStack() as undo:
        folder = undo.enter_context(tempfile.TemporaryDirectory(prefix="tricomm-ranks-"))
        undo.callback(ranks.end)
        for rank in range(world_size):
            log = undo.enter_context((Path(folder) / f"rank{rank}.log").open("w+"))
            url = f"file://{folder}/meeting"
            ranks.start(rank, [module, str(rank), str(world_size), url, json.dumps(settings)], log)
        yield ranks


def talk(module: str, world_size: int, settings: Any, timeout: float) -> Iterator[tuple[int, Record]]:
    """Run `module` as `world_size` ranks and yield (rank, record); all are ended on whatever way out.

    Raises `RankFailed` with what the ranks said where one fails, or where all are silent for `timeout` seconds.
    """
    with _started(module, world_size, settings) as ranks:
        waiting, done, errors = set(range(world_size)), set[int](), dict[int, Record]()
        limit = time.monotonic() + timeout
        while waiting:
            try:
                rank, line = ranks.lines.get(timeout=max(0.0, limit - time.monotonic()))
            except queue.Empty:
                break
            message: Record = json.loads(line) if line is not None else {"what": "end"}
            if message["what"] == "error":
                errors[rank] = message
            elif message["what"] == "end":
                waiting.discard(rank)
                if rank not in done and rank not in errors:
                    code = ranks.processes[rank].wait()
                    errors[rank] = {"error": "", "text": f"exit code {code}; it said: {_tail(ranks.logs[rank])}"}
            elif message["what"] == "done":
                done.add(rank)
            elif not errors:
                limit = time.monotonic() + timeout
                yield rank, message
            if errors:
                limit = min(limit, time.monotonic() + _GRACE)
        _complain(errors, waiting, timeout)


def _complain(errors: dict[int, Record], waiting: set[int], timeout: float) -> None:
    if errors:
        said = [": ".join(filter(None, (f"rank {r}", e["error"], e["text"]))) for r, e in errors.items()]
        raise RankFailed("\n".join(said), next(iter(errors.values()))["error"] == "ResourceError")
    if waiting:
        silent = ", ".join(str(r) for r in sorted(waiting))
        raise RankFailed(f"rank {silent}: nothing was heard for {timeout:g} s; all ranks have been ended")


def _tail(log: IO[str]) -> str:
    log.seek(0)
    return " | ".join(log.read().strip().splitlines()[-8:]) or "nothing"
