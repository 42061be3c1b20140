"""Forks two ranks from a process that has imported tricomm; each starts and exits like a new interpreter.

    python -m tests.c10d.bodies.fresh_ranks

It reads jobs as lines of JSON, [script, arguments, folder], and answers each with the ranks' exit codes. The script is
run as `python -c SCRIPT RANK ARGUMENTS` does, also at the end of the interpreter; what it says is in `folder`.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

SECONDS = 100  # that a rank has


class FreshRanks:
    def __init__(self, process):
        self._process = process

    def run(self, folder, script, *arguments):
        """(exit code, output, errors) of each of the two ranks."""
        folder.chmod(0o700)
        self._process.stdin.write(json.dumps([script, arguments, str(folder)]) + "\n")
        self._process.stdin.flush()
        codes = json.loads(self._process.stdout.readline())
        said = [[(folder / f"{name}{rank}").read_text() for name in ("out", "err")] for rank in range(2)]
        return [(code, *texts) for code, texts in zip(codes, said, strict=True)]


@contextmanager
def fresh_ranks():
    command = [sys.executable, "-W", "ignore", "-m", __name__]
    root = Path(__file__).parents[3]
    with subprocess.Popen(command, cwd=root, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield FreshRanks(process)
        process.stdin.close()


def begin(rank, arguments, folder):
    """Be the rank: what its script finds."""
    signal.alarm(SECONDS)
    null = os.open(os.devnull, os.O_RDONLY)
    files = [os.open(f"{folder}/{name}{rank}", os.O_WRONLY | os.O_CREAT) for name in ("out", "err")]
    for number, file in enumerate((null, *files)):
        os.dup2(file, number)
        os.close(file)
    sys.argv = ["-c", str(rank), *arguments]


if __name__ == "__main__":
    import tricomm.c10d  # noqa: F401

    _script = None
    for _line in iter(sys.stdin.readline, ""):
        _script, _arguments, _folder = json.loads(_line)
        _pids = []
        for _rank in range(2):
            _pids.append(os.fork())
            if _pids[-1] == 0:
                break
        if 0 in _pids:
            begin(_rank, _arguments, _folder)
            break
        _codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in _pids]
        print(json.dumps(_codes), flush=True)
        _script = None
    if _script is not None:
        exec(_script)  # in this module, so that its globals are freed when the interpreter exits
