"""Commands and scripts whose processes a fork server starts: as new Pythons, without seconds of imports in each.

Not for what depends on how a process begins, on its command line, or on its parent.
"""

from __future__ import annotations

import atexit
import io
import multiprocessing as mp
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, redirect_stderr, redirect_stdout
from multiprocessing import reduction
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any
from unittest.mock import patch

from tests import ranks


class _Descriptor:
    """A file descriptor that a new process gets a copy of."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __reduce__(self) -> Any:
        return _received, (reduction.DupFd(self.fd),)


def _received(sent: Any) -> _Descriptor:
    return _Descriptor(sent.detach())


def command(*arguments: str, env: Mapping[str, str] | None = None, started: list[Any] | None = None) -> Any:
    """`tricomm` with these arguments in this process; the fork server starts its ranks. As of `subprocess.run`.

    The ranks are added to `started`.
    """
    from tricomm.cli import main
    from tricomm.perf import workers

    out, err, code = io.StringIO(), io.StringIO(), 0
    with ExitStack() as undo:
        undo.enter_context(patch.object(workers, "subprocess", for_workers(started)))
        undo.enter_context(patch.object(sys, "argv", ["tricomm", *arguments]))
        undo.enter_context(patch.dict(os.environ, env or {}, clear=env is not None))
        undo.enter_context(redirect_stdout(out))
        undo.enter_context(redirect_stderr(err))
        try:
            main()
        except SystemExit as ended:
            code = int(ended.code or 0)
    return subprocess.CompletedProcess(arguments, code, out.getvalue(), err.getvalue())


def script(*arguments: str, env: Mapping[str, str] | None = None, timeout: float = 120.0) -> Any:
    """A file with these arguments, as `python FILE ...` runs it; the Pythons that it starts are forked, too."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = _Process(ranks.CONTEXT, _script, arguments, out.fileno(), err.fileno(), env)
        try:
            code = process.wait(timeout)
        finally:
            process.kill()
        out.seek(0)
        err.seek(0)
        return subprocess.CompletedProcess(arguments, code, out.read(), err.read())


class _Process:
    """What tricomm uses of `subprocess.Popen`, for a process of the fork server."""

    def __init__(
        self, context: Any, body: Callable[[], None], arguments: Sequence[str], out: int, err: int,
        env: Mapping[str, str] | None, stdout: IO[str] | None = None,
    ) -> None:  # fmt: skip
        self.stdout = stdout
        environment = dict(os.environ if env is None else env)
        given = (body, list(arguments), _Descriptor(out), _Descriptor(err), environment, os.getcwd())
        self._process = context.Process(target=_main, args=given)
        self._process.start()
        self.pid = self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("a forked process", timeout or 0.0)
        return int(self._process.exitcode)

    def kill(self) -> None:
        self._process.kill()
        self._process.join(10)


def for_workers(started: list[Any] | None = None) -> SimpleNamespace:
    """In place of the module `subprocess` of tricomm.perf.workers. The processes are added to `started`."""

    def popen(arguments: list[str], *, stderr: Any, **_: Any) -> _Process:
        here, there = os.pipe()
        try:
            given = (arguments[2:], there, stderr.fileno(), None, os.fdopen(here, "r"))
            process = _Process(ranks.CONTEXT, _worker, *given)
        finally:
            os.close(there)
        if started is not None:
            started.append(process)
        return process

    return SimpleNamespace(Popen=popen, DEVNULL=subprocess.DEVNULL, PIPE=subprocess.PIPE)


def _main(
    body: Any, arguments: list[str], out: _Descriptor, err: _Descriptor, env: dict[str, str], folder: str
) -> None:
    os.dup2(out.fd, 1)
    os.dup2(err.fd, 2)
    os.close(out.fd)
    os.close(err.fd)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(folder)
    sys.argv = arguments
    try:
        body()
    finally:
        atexit._run_exitfuncs()  # which a process of multiprocessing ends without


def _worker() -> None:
    from tricomm.perf import workers

    os.setsid()
    raise SystemExit(workers._work())


def _script() -> None:
    import torch.multiprocessing

    torch.set_num_threads(1)  # OMP_NUM_THREADS is read once, by the server

    def spawn(fn: Any, args: Any = (), nprocs: int = 1) -> None:
        torch.multiprocessing.start_processes(fn, args, nprocs, start_method="fork")

    torch.multiprocessing.spawn = spawn
    start = subprocess.Popen

    def popen(asked: Any, *rest: Any, **more: Any) -> Any:
        if asked[0] != sys.executable or rest or more:
            return start(asked, *rest, **more)
        return _Process(mp.get_context("fork"), _script, asked[1:], os.dup(1), os.dup(2), None)

    subprocess.Popen = popen  # type: ignore[assignment, misc]
    sys.path.insert(0, str(Path(sys.argv[0]).resolve().parent))
    runpy.run_path(sys.argv[0], run_name="__main__")
