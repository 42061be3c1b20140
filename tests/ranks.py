"""Runs ranks as real processes, each with a time limit, after which it is killed.

A fork server that has imported tricomm, and what DDP imports, once (tests/preloaded.py) makes a rank in some 50 ms.
A rank's return value is sent over a pipe; an exception becomes an `Outcome` with its class name and text.
"""

from __future__ import annotations

import functools
import inspect
import multiprocessing as mp
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

_SOCKETS = "TRICOMM_SOCKET_DIR"
BUSY = 4.0  # seconds that a busy machine may add to a limit of one or two
CONTEXT = mp.get_context("forkserver")  # one server in a process
CONTEXT.set_forkserver_preload(["tests.preloaded", "tests.ranks", "tests.soak.worker"])


@dataclass
class Outcome:
    """How a rank ended: `value`, or `error` (class name) and `text`; `code`: its exit code if it sent neither."""

    value: Any = None
    error: str | None = None
    text: str = ""
    seconds: float = 0.0
    code: int | None = None


@dataclass
class Ranks:
    """Running ranks: `pids` to hurt them, `results()` to collect what they returned."""

    processes: list[Any]
    pipes: list[Connection]
    deadline: float

    @property
    def pids(self) -> list[int]:
        return [p.pid for p in self.processes]

    def message(self, rank: int) -> Any:
        """The next message that `rank` sent with its `tell` function."""
        if not self.pipes[rank].poll(max(0.0, self.deadline - time.monotonic())):
            raise TimeoutError(f"rank {rank} said nothing in time")
        kind, value = self.pipes[rank].recv()
        if kind != "tell":
            raise AssertionError(f"rank {rank} ended before it said anything: {value}")
        return value

    def messages(self) -> list[Any]:
        """The next message of every rank."""
        return [self.message(rank) for rank in range(len(self.processes))]

    def results(self, of: list[int] | None = None) -> list[Outcome]:
        """How the ranks `of` (default: all) ended; one `Outcome` a rank, empty for the others."""
        outcomes = [Outcome(code=None) for _ in self.processes]
        waiting = {r: pipe for r, pipe in enumerate(self.pipes) if of is None or r in of}
        while waiting:
            left = self.deadline - time.monotonic()
            ready = wait(list(waiting.values()), max(0.0, left)) if left > 0 else []
            if not ready:
                raise TimeoutError(f"ranks {sorted(waiting)} did not end in time")
            for rank, pipe in list(waiting.items()):
                if pipe in ready:
                    try:
                        kind, value = pipe.recv()
                    except EOFError:
                        self.processes[rank].join(5)
                        outcomes[rank].code = self.processes[rank].exitcode
                        del waiting[rank]
                        continue
                    if kind == "end":
                        outcomes[rank] = value
                        del waiting[rank]
        return outcomes

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            if process.is_alive():
                process.kill()
        for process, pipe in zip(self.processes, self.pipes, strict=True):
            process.join(10)
            pipe.close()
            process.close()


def start(world_size: int, body: Callable[..., Any], *args: Any, timeout: float = 90.0) -> Ranks:
    """Start `body(rank, world_size, tell, *args)` in `world_size` processes; `tell(value)` sends a message here."""
    processes, pipes = [], []
    for rank in range(world_size):
        here, there = CONTEXT.Pipe()
        sockets = os.environ.get(_SOCKETS)  # the current one, not that of the fork server
        process = CONTEXT.Process(target=_main, args=(there, sockets, body, rank, world_size, args), daemon=True)
        process.start()
        there.close()
        processes.append(process)
        pipes.append(here)
    return Ranks(processes, pipes, time.monotonic() + timeout)


def run(world_size: int, body: Callable[..., Any], *args: Any, timeout: float = 90.0) -> list[Any]:
    """Run `body(rank, world_size, tell, *args)` on every rank; returns the values, raises where a rank failed."""
    with start(world_size, body, *args, timeout=timeout) as ranks:
        outcomes = ranks.results()
    failed = [(rank, at) for rank, at in enumerate(outcomes) if at.error is not None or at.code is not None]
    if failed:
        told = (f"rank {rank}: {at.error} {at.text} (exit code {at.code})" for rank, at in failed)
        raise AssertionError("\n".join(told))
    return [outcome.value for outcome in outcomes]


def each(world_size: int, expected: Any = None, timeout: float = 90.0) -> Callable[[Callable[..., Any]], Any]:
    """Run the test, `test(rank, world_size, tell, ...)`, on `world_size` ranks; each of them has to return `expected`.

    The parameters after those three are fixtures and parameters of the test.
    """

    def made(body: Callable[..., Any]) -> Any:
        @functools.wraps(body)
        def test(**given: Any) -> None:
            results = run(world_size, test, given, timeout=timeout)
            assert results == [expected] * world_size, f"each rank has to return {expected!r}: {results}"

        test.__signature__ = inspect.Signature(list(inspect.signature(body).parameters.values())[3:])  # type: ignore
        test.in_rank = lambda rank, size, tell, given: body(rank, size, tell, **given)  # type: ignore
        return test

    return made


def together(url: str, rank: int, members: Sequence[int]) -> None:
    """Return when all `members` are here, by files next to that of `url`, without a call among them."""
    folder = Path(url.removeprefix("file://")).parent
    (folder / f"rank{rank}").touch()
    while not all((folder / f"rank{member}").exists() for member in members):
        time.sleep(0.01)


def _main(
    pipe: Connection, sockets: str | None, body: Callable[..., Any], rank: int, world_size: int, args: tuple[Any, ...]
) -> None:
    os.setsid()
    os.environ.pop(_SOCKETS, None)
    os.environ |= {} if sockets is None else {_SOCKETS: sockets}
    began = time.monotonic()

    def tell(value: Any) -> None:
        pipe.send(("tell", value))

    try:
        outcome = Outcome(value=getattr(body, "in_rank", body)(rank, world_size, tell, *args))
    except BaseException as error:
        outcome = Outcome(error=type(error).__name__, text=str(error))
    outcome.seconds = time.monotonic() - began
    pipe.send(("end", outcome))
    pipe.close()
