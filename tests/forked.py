"""Commands and scripts that a fork server starts like new Python processes, without seconds of imports in each.

Not for tests that depend on how a process starts, on its command line, or on its parent, which is the fork server. Only
Python processes that such a process starts are its children.
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
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, redirect_stderr, redirect_stdout
from multiprocessing import reduction
from pathlib import Path
from types import SimpleNamespace
from typing import Any
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
    """Run `python ARGUMENTS` like `subprocess.run`, but forked, as are the Python processes that it starts."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        with Popen([sys.executable, *arguments], stdout=out, stderr=err, env=env) as process:
            code = process.wait(timeout)
        out.seek(0)
        err.seek(0)
        return subprocess.CompletedProcess(arguments, code, out.read(), err.read())


def python_path() -> str:
    """`PYTHONPATH` with this checkout first: what else is on it stays, such as another version of Triton."""
    return os.pathsep.join([str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])])


def for_workers(started: list[Any] | None = None) -> SimpleNamespace:
    """Replaces the module `subprocess` in tricomm.perf.workers. The processes are added to `started`."""

    def popen(arguments: Sequence[str], **given: Any) -> Popen:
        process = Popen(arguments, **given)
        if started is not None:
            started.append(process)
        return process

    return SimpleNamespace(Popen=popen, DEVNULL=subprocess.DEVNULL, PIPE=subprocess.PIPE)


class Popen:
    """The part of `subprocess.Popen` that tricomm and the tests use, for a forked Python."""

    def __init__(
        self,
        args: Sequence[str],
        *,
        stdin: Any = None,
        stdout: Any = None,
        stderr: Any = None,
        env: Mapping[str, str] | None = None,
        start_new_session: bool = False,
        text: bool = True,
        context: Any = None,
    ) -> None:
        self.stdin = self.stdout = None
        ends = [os.open(os.devnull, os.O_RDONLY), _opened(stdout, 1), _opened(stderr, 2)]
        if stdin == subprocess.PIPE:
            os.close(ends[0])
            ends[0], mine = os.pipe()
            self.stdin = os.fdopen(mine, "w")
        if stdout == subprocess.PIPE:
            os.close(ends[1])
            mine, ends[1] = os.pipe()
            self.stdout = os.fdopen(mine, "r")
        if stderr == subprocess.STDOUT:
            os.dup2(ends[1], ends[2])
        try:
            given = ([_Descriptor(fd) for fd in ends], dict(os.environ if env is None else env), os.getcwd())
            self._process = (context or ranks.CONTEXT).Process(target=_main, args=(args[1:], *given, start_new_session))
            self._process.start()
        finally:
            for fd in ends:
                os.close(fd)
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("a forked process", timeout or 0.0)
        return int(self._process.exitcode)

    def terminate(self) -> None:
        if self._process.exitcode is None:
            self._process.terminate()

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self._process.kill()
        self._process.join(10)

    def __enter__(self) -> Popen:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        for pipe in (self.stdin, self.stdout):
            if pipe is not None:
                pipe.close()


def _opened(stream: Any, default: int) -> int:
    if stream == subprocess.DEVNULL:
        return os.open(os.devnull, os.O_WRONLY)
    if stream is None or stream in (subprocess.PIPE, subprocess.STDOUT):
        stream = default
    return os.dup(stream if isinstance(stream, int) else stream.fileno())


def _main(
    arguments: Sequence[str], streams: list[_Descriptor], env: dict[str, str], folder: str, own_session: bool
) -> None:
    if own_session:
        os.setsid()
    for number, stream in enumerate(streams):
        os.dup2(stream.fd, number)
    for stream in streams:
        os.close(stream.fd)
    sys.stdin = open(0, closefd=False)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(folder)
    try:
        _python(list(arguments))
    finally:
        atexit._run_exitfuncs()  # a process of multiprocessing exits without it


def _python(words: list[str]) -> None:
    """Be `python WORDS`: `-m MODULE`, `-c CODE` or a file; with the Pythons forked that it starts."""
    import torch.multiprocessing

    torch.set_num_threads(1)  # OMP_NUM_THREADS is read once, by the server

    def spawn(fn: Any, args: Any = (), nprocs: int = 1) -> None:
        torch.multiprocessing.start_processes(fn, args, nprocs, start_method="fork")

    torch.multiprocessing.spawn = spawn
    start = subprocess.Popen

    def popen(args: Any, *rest: Any, **given: Any) -> Any:
        if args[0] == sys.executable and not rest:
            return Popen(args, context=mp.get_context("fork"), **given)
        return start(args, *rest, **given)

    subprocess.Popen = popen  # type: ignore[assignment, misc]
    words = [word for word in words if word != "-u"]
    if words[0] == "-m":
        sys.argv = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    elif words[0] == "-c":
        sys.argv = ["-c", *words[2:]]
        exec(words[1], {"__name__": "__main__"})
    else:
        sys.argv = words
        sys.path.insert(0, str(Path(words[0]).resolve().parent))
        runpy.run_path(words[0], run_name="__main__")
