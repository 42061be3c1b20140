"""The processes of a soak: long-lived ranks, a store's server, and a watchdog that outlives everything else."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from tests.ranks import CONTEXT
from tests.soak import worker

# Kills what it was told of when its input ends or its time is up, also after a SIGKILL of the soak itself.
_WATCHDOG = """
import os, select, signal, sys, time
end, pids = time.monotonic() + float(sys.argv[1]), set()
signal.signal(signal.SIGINT, signal.SIG_IGN)
rest = b""
while time.monotonic() < end:
    if select.select([0], [], [], 1.0)[0]:
        data = os.read(0, 4096)
        if not data:
            break
        *lines, rest = (rest + data).split(b"\\n")
        for line in lines:
            (pids.add if line[:1] == b"+" else pids.discard)(int(line[1:]))
for pid in pids:
    try:
        os.kill(pid, signal.SIGKILL)
    except OSError:
        pass
"""


class Pool:
    """`size` ranks as processes in slots; a dead one is replaced by `fill`. Leaves nothing behind on exit."""

    def __init__(self, size: int, folder: Path, limit: float) -> None:
        self._folder, self._made = folder, 0
        self._watchdog = subprocess.Popen(
            [sys.executable, "-S", "-c", _WATCHDOG, str(limit)], stdin=subprocess.PIPE, start_new_session=True
        )
        self.processes: list[Any] = [None] * size
        self.pipes: list[Any] = [None] * size
        self._server: Any = None

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        for slot in range(len(self.processes)):
            self.end(slot)
        self.end_server()
        if self._watchdog.stdin is not None:
            self._watchdog.stdin.close()
        self._watchdog.wait(10)

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
                self._tell(f"+{process.pid}")
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
        self._tell(f"-{process.pid}")
        process.close()
        pipe.close()
        self.processes[slot] = self.pipes[slot] = None
        return code

    def pid(self, slot: int) -> int:
        return int(self.processes[slot].pid)

    def send(self, slot: int, what: Any) -> None:
        """Send to a rank; one that has just died is noticed by who waits for its answer."""
        try:
            self.pipes[slot].send(what)
        except OSError:
            pass

    def receive(self, slots: list[int], seconds: float) -> list[tuple[int, Any]]:
        """What ranks say within `seconds`, as pairs of slot and message; (slot, None) for one whose process ended."""
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
        """Make a rank write where its threads are into its log."""
        os.kill(self.pid(slot), signal.SIGCONT)
        os.kill(self.pid(slot), signal.SIGUSR1)
        time.sleep(0.5)

    def serve(self) -> int:
        """Start a store's server in a process of its own; returns its port."""
        here, there = CONTEXT.Pipe()
        self._server_pipe = here  # the server ends with it
        self._server = CONTEXT.Process(target=_serve, args=(there,), daemon=True)
        self._server.start()
        there.close()
        self._tell(f"+{self._server.pid}")
        if not here.poll(60):
            raise TimeoutError("the store's server did not start within 60 s")
        return int(here.recv())

    def end_server(self) -> None:
        if self._server is not None:
            self._server.kill()
            self._server.join(10)
            self._tell(f"-{self._server.pid}")
            self._server.close()
            self._server = None

    def _tell(self, line: str) -> None:
        if self._watchdog.stdin is not None:
            self._watchdog.stdin.write(line.encode() + b"\n")
            self._watchdog.stdin.flush()


def _serve(pipe: Connection) -> None:
    from datetime import timedelta

    from torch.distributed import TCPStore

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(64)
        port = listener.getsockname()[1]
        store = TCPStore(
            "127.0.0.1",
            port,
            None,
            True,
            timedelta(seconds=60),
            wait_for_workers=False,
            master_listen_fd=os.dup(listener.fileno()),
            use_libuv=True,
        )
        pipe.send(port)
        while not pipe.poll(1.0):
            pass
        del store
