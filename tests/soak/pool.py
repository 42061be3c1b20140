"""The processes of a soak: long-lived ranks."""

from __future__ import annotations

import os
import signal
import time
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from tests.ranks import CONTEXT
from tests.soak import worker


class Pool:
    """`size` ranks as processes in slots; `fill` replaces dead ones. On exit all are ended."""

    def __init__(self, size: int, folder: Path) -> None:
        self._folder, self._made = folder, 0
        self.processes: list[Any] = [None] * size
        self.pipes: list[Any] = [None] * size

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        for slot in range(len(self.processes)):
            self.end(slot)

    def fill(self) -> None:
        """Start a rank in every slot that has none."""
        for slot, process in enumerate(self.processes):
            if process is None:
                here, there = CONTEXT.Pipe()
                log = str(self._folder / f"rank-{slot}-{self._made}.log")
                self._made += 1
                process = CONTEXT.Process(target=worker.main, args=(there, log), daemon=True)
                process.start()
                there.close()
                self.processes[slot], self.pipes[slot] = process, here

    def end(self, slot: int, seconds: float = 0.0) -> int | None:
        """Kill the rank in `slot`, unless it ends within `seconds`; returns its exit code, if it had one before."""
        process, pipe = self.processes[slot], self.pipes[slot]
        if process is None:
            return None
        process.join(seconds)
        code = process.exitcode
        process.kill()
        process.join(10)
        process.close()
        pipe.close()
        self.processes[slot] = self.pipes[slot] = None
        return code

    def pid(self, slot: int) -> int:
        return int(self.processes[slot].pid)

    def send(self, slot: int, what: Any) -> None:
        """Send to a rank; if it has just died, the receive of its answer notices."""
        try:
            self.pipes[slot].send(what)
        except OSError:
            pass

    def receive(self, slots: list[int], seconds: float) -> list[tuple[int, Any]]:
        """Receive for at most `seconds`; return pairs of slot and message, or (slot, None) if the process has ended."""
        by_pipe = {self.pipes[slot]: slot for slot in slots}
        results = []
        for pipe in wait(list(by_pipe), max(0.0, seconds)):
            assert isinstance(pipe, Connection)
            try:
                results.append((by_pipe[pipe], pipe.recv()))
            except (EOFError, OSError):
                results.append((by_pipe[pipe], None))
        return results

    def dump(self, slot: int) -> None:
        """Make a rank write its threads' stacks into its log."""
        os.kill(self.pid(slot), signal.SIGCONT)
        os.kill(self.pid(slot), signal.SIGUSR1)
        time.sleep(0.5)
