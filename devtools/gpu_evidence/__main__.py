"""The driver: runs the steps in order of value, until all have ended or the budget is over."""

from __future__ import annotations

import argparse
import ctypes
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from devtools.gpu_evidence import report
from devtools.gpu_evidence.report import Journal, Record
from devtools.gpu_evidence.steps import PLUGIN, Step, all_steps
from tricomm.errors import InvalidArgument
from tricomm.perf.parsing import parse_budget

ROOT = Path(__file__).parents[2]
OUT = ROOT / "perf" / "results" / "gpu-evidence"
_PDEATHSIG, _CHILD_SUBREAPER = 1, 36  # options of prctl
_POLL = 0.1  # seconds
_WRITE_EVERY = 30.0  # seconds between summaries, so that a killed run leaves one
_FACTS = 120.0  # seconds
_ENDING = 5.0  # seconds that a killed process may take to end
_LAST_WORDS = 1000  # characters of a child's output
_WRITING = 5.0  # seconds of the budget for the last summary
_SEVERAL = 2  # number of GPUs with which --list has all steps
_BUDGET = "the budget is over"


@dataclass
class Driver:
    """Runs steps until `end` (of the monotonic clock). A child starts only if `least` seconds are left."""

    journal: Journal
    steps: Sequence[Step]
    end: float
    least: float = 15.0
    written: float = 0.0

    def run(self) -> bool:
        """Run the steps that have not passed, first each within its share. True if no test and no step failed."""
        _prctl(_CHILD_SUBREAPER, 1)
        try:
            for turn in range(2):
                waiting = [step for step in self.steps if not self._settled(step)]
                for number, step in enumerate(waiting):
                    failed = [each.name for each in self.steps if each.name in step.needs and self._bad(each)]
                    if failed:
                        self._step_ended(step, "skipped", f"needs {failed[0]}, which has not passed", 0.0)
                    else:
                        self._within(step, step.share if turn == 0 else None, waiting[number:])
        finally:
            _kill_descendants()
            report.write(self.journal, self.steps)
        return not any(self._bad(step) for step in self.steps)

    def _outcome(self, step: Step) -> str:
        """The step's outcome in this run."""
        record = self.journal.steps.get(step.name)
        return record["outcome"] if record and record["run"] == self.journal.run else ""

    def _settled(self, step: Step) -> bool:
        """True if the step has passed in any run, or its outcome in this run is decided."""
        passed = self.journal.steps.get(step.name, {"outcome": ""})["outcome"] == "passed"
        return passed or self._outcome(step) in ("failed", "skipped")

    def _bad(self, step: Step) -> bool:
        """True if the step failed, was left out, or was cut off after a failure, in this run."""
        outcome = self._outcome(step)
        return outcome in ("failed", "skipped") or (outcome == "cut" and bool(self.journal.failures(step.name)))

    def _within(self, step: Step, share: float | None, waiting: Sequence[Step]) -> None:
        left = self.end - time.monotonic()
        if left < self.least:
            return
        if share is not None:
            left = max(self.least, left * share / sum(each.share or 0.0 for each in waiting))
        began = time.monotonic()
        outcome, reason = self._until(step, began + left)
        self._step_ended(step, outcome, reason, time.monotonic() - began)

    def _step_ended(self, step: Step, outcome: str, reason: str, seconds: float) -> None:
        record = {"step": step.name, "outcome": outcome, "reason": reason, "seconds": round(seconds, 1)}
        self.journal.write("step", run=self.journal.run, **record)
        print(f"{step.name}: {outcome}, {seconds:.0f} s" + (f": {reason}" if reason else ""), flush=True)
        report.write(self.journal, self.steps)

    def _until(self, step: Step, end: float) -> tuple[str, str]:
        """Run a step's command, and again after a test that crashed or hung. Returns the outcome and the reason."""
        while True:
            code, words = self._child(step, end)
            journal = self.journal
            if time.monotonic() >= end or journal.stopped:
                return "cut", _BUDGET
            if not step.tests:
                return ("passed", "") if code == 0 else ("failed", words)
            running = journal.running
            if running is None:
                break
            journal.write(
                "test",
                run=journal.run,
                test=running,
                outcome="timeout" if code is None else "crashed",
                reason=words,
                seconds=step.limit if code is None else 0.0,
                data={},
            )
        if not journal.selected.get(step.name) or journal.waiting(step.name):
            return "failed", f"exit code {code}, {len(journal.waiting(step.name))} tests have not run: {words}"
        failures = journal.failures(step.name)
        return ("failed", f"{len(failures)} failed; {failures[0]['test']}") if failures else ("passed", "")

    def _child(self, step: Step, end: float) -> tuple[int | None, str]:
        """Run the command once. Returns its exit code (None if it took too long) and the end of its output."""
        journal = self.journal
        journal.stopped, journal.running = False, None
        facts = {"folder": str(journal.folder), "step": step.name, "end": end}
        with _started(step.command, journal.folder / report.LOG, GPU_EVIDENCE=json.dumps(facts)) as (process, log):
            limit, running = time.monotonic() + step.limit, None
            while process.poll() is None and time.monotonic() < min(limit, end):
                time.sleep(_POLL)
                journal.read()
                if journal.running != running:
                    limit, running = time.monotonic() + step.limit, journal.running
                if time.monotonic() - self.written > _WRITE_EVERY:
                    report.write(journal, self.steps)
                    self.written = time.monotonic()
            code = process.poll()
        journal.read()
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - _LAST_WORDS))
            return code, " | ".join(file.read().decode(errors="replace").strip().splitlines()[-6:])


@contextmanager
def _started(command: Sequence[str], log: Path, **more: str) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """A context manager for a child that prints to `log`. At the end, it and all processes that it started are
    killed."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    # it would refuse kernels
    kept = {name: value for name, value in os.environ.items() if name != "TRICOMM_BATCH_INVARIANT"}
    with log.open("ab") as file:
        file.write(f"\n$ {' '.join(command)}\n".encode())
        file.flush()
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**kept, "PYTHONPATH": path, **more},
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=_end_with_parent,
        )
    try:
        yield process, log
    finally:
        _kill_descendants()
        with suppress(subprocess.TimeoutExpired):
            process.wait(_ENDING)


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value)


def _end_with_parent() -> None:
    _prctl(_PDEATHSIG, signal.SIGKILL)


def _kill_descendants() -> None:
    """Kill all processes below this one; orphans among them have become its children.

    A process that waits for a GPU driver that hangs cannot be killed. It is left alone after `_ENDING` seconds.
    """
    end = time.monotonic() + _ENDING
    while (pids := _descendants()) and time.monotonic() < end:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for pid in pids:
            with suppress(ChildProcessError):  # a grandchild, or a child that `subprocess` waits for
                os.waitpid(pid, os.WNOHANG)
        time.sleep(0.01)


def _descendants() -> list[int]:
    """The processes below this one that have not ended."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, parent = stat.read_text().rpartition(")")[2].split()[:2]
            if state != "Z":
                parents[int(stat.parent.name)] = int(parent)
    below, found = {os.getpid()}, list[int]()
    while more := [pid for pid, parent in parents.items() if parent in below and pid not in below]:
        below.update(more)
        found += more
    return found


def facts() -> Record:
    """Hardware, versions and sources. A child reads them, because this initializes CUDA."""
    done = subprocess.run(
        [sys.executable, "-m", PLUGIN, "facts"], cwd=ROOT, capture_output=True, text=True, timeout=_FACTS
    )
    if done.returncode != 0:
        raise InvalidArgument(f"tricomm cannot be imported here: {done.stderr.strip()[-_LAST_WORDS:]}")
    found: Record = json.loads(done.stdout.splitlines()[-1])
    return found


def run(out: Path, steps: Sequence[Step], environment: Record, end: float, least: float = 15.0) -> bool:
    """Run `steps` until `end` of the monotonic clock, with results in `out`. True if nothing failed."""
    out.mkdir(parents=True, exist_ok=True)
    journal = Journal(out)
    if note := journal.start(environment):
        print(note, flush=True)
    good = Driver(journal, steps, end, least).run()
    left = sum(step.name not in journal.steps or journal.steps[step.name]["outcome"] == "cut" for step in steps)
    print(f"see {out / report.SUMMARY}; {out / report.ARCHIVE} has everything")
    if left:
        print(f"{left} of {len(steps)} steps have not ended; the same command continues with them")
    return good


def _interrupted(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code: 1 if something failed, or there is no GPU. A step for which no time was left is no failure."""
    began = time.monotonic()
    parser = argparse.ArgumentParser("python -m devtools.gpu_evidence", description=__doc__)
    parser.add_argument("--budget", metavar="TIME", help="time for this command, such as 9m, 25m; default: no end")
    parser.add_argument("--step", action="append", metavar="NAME", help="only this step; may be given several times")
    parser.add_argument(
        "--out", type=Path, default=OUT, metavar="DIR", help=f"results; default: {OUT.relative_to(ROOT)}"
    )
    parser.add_argument("--list", action="store_true", help="name the steps")
    asked = parser.parse_args(arguments)
    if asked.list:
        print("\n".join(step.name for step in all_steps(_SEVERAL)))
        return 0
    try:
        budget = parse_budget(asked.budget) if asked.budget is not None else math.inf
        environment = facts()
        steps = all_steps(len(environment["device"]))
        unknown = set(asked.step or ()) - {step.name for step in steps}
        if unknown:
            raise InvalidArgument(f"step {unknown.pop()!r} is unknown here; --list names the steps")
        if not environment["device"]:
            raise InvalidArgument("no CUDA device is visible here; look at nvidia-smi and CUDA_VISIBLE_DEVICES")
    except InvalidArgument as error:
        print(error, file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, _interrupted)
    chosen = [step for step in steps if not asked.step or step.name in asked.step]
    try:
        return 0 if run(asked.out, chosen, environment, began + budget - _WRITING) else 1
    except KeyboardInterrupt:
        print("interrupted; the same command continues", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
