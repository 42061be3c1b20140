"""Stages that succeed, fail, crash and hang, for `test_evidence`. Each case writes a line when it runs.

`rank_main` is a rank that makes every collective, by the kernels, whose bytes it counts, and by a baseline.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import torch

from tricomm.kernels.collectives import registry
from tricomm.kernels.launch import interpreter
from tricomm.perf.bench.baselines import ComparedCall
from tricomm.perf.evidence import comparison, stage_process
from tricomm.perf.evidence.comparison import Comparison
from tricomm.perf.evidence.stage import EvidenceSettings, Skip, Stage, StageCase, Wrong
from tricomm.perf.evidence.stage_process import CaseOutcome
from tricomm.perf.evidence.stages import device_time

HERE = "tests.perf.evidence.evidence_stages"


def case(key, settings, act=lambda: None, **more):
    def run():
        with (settings.out.parent / "runs.txt").open("a") as file:
            file.write(f"{key}\n")
        act()
        return {"value_us": 1.5, "key": key}

    return StageCase(key, run, **more)


def raising(error):
    def act():
        raise error

    return act


def killed():
    os.kill(os.getpid(), signal.SIGKILL)


def good(settings):
    return [case(key, settings) for key in "abc"]


def mixed(settings):
    yield case("fine", settings)
    yield case("wrong", settings, raising(Wrong("3 is not 4")))
    yield case("missing", settings, raising(Skip("no such library")))
    yield case("last", settings)


def partly(settings):
    yield case("fine", settings)
    yield case("missing", settings, raising(Skip("no such library")))


def dying(settings):
    yield case("before", settings)
    yield case("crash", settings, killed)
    yield case("hang", settings, lambda: time.sleep(600), limit=1.5)
    yield case("after", settings, lambda: print(os.environ["KIT"], os.environ["PYTHONPATH"]))


def slow(settings):
    for number in range(200):
        yield case(f"step {number}", settings, lambda: time.sleep(0.2))


def broken(settings):
    if "stage_process" in sys.argv[0]:
        raise Wrong("no such machine")
    yield case("never", settings)
    yield case("neither", settings)


GOOD = Stage("good", "All is well", good, columns=("value_us",))
MIXED = Stage("mixed", "Some of everything", mixed)
PARTLY = Stage("partly", "Something is missing", partly)
DYING = Stage("dying", "One dies and one never ends", dying, environment={"KIT": "set"})
SLOW = Stage("slow", "Longer than its budget", slow)
BROKEN = Stage("broken", "Its process does not start", broken)
MISSING = Stage("nothing", "Cannot run here", good, missing=lambda settings: "no GPU of the kind")


class InThisProcess:
    """Stands for `StageProcesses`: cases run in this process."""

    def __init__(self, settings):
        self.ended = []

    def run(self, stage, case, left):
        return CaseOutcome(**stage_process.run_case(case, EvidenceSettings(Path(), dry_run=True)))

    def update(self, settings):
        pass

    def end(self, stage):
        self.ended.append(stage.name)

    def close(self):
        pass


def rank_main(emit, rank, world_size, url, nbytes):
    torch.set_num_threads(1)
    data = {"dry_run": True, "one_gpu": False, "peers": None}
    with comparison.bench_context(rank, world_size, url, data) as here:
        for kernel in registry.KERNELS:
            if kernel.collective != "barrier" and not kernel.needs_cube:
                emit("moved", kernel=kernel.name, moved=counted(device_time.repeating(here.comm, kernel, nbytes)))
        for collective in dict.fromkeys(kernel.collective for kernel in registry.KERNELS):
            count = 0 if collective == "barrier" else 5
            for root in range(world_size):
                call = ComparedCall(here, collective, torch.float32, count, root)
                compared = Comparison(call, 2, False, lambda *a, **k: None)
                makers = comparison.offered(collective, world_size, True)
                compared.prepare((name, makers[name]) for name in ("tricomm", "gloo"))
                emit("compared", collective=collective, ready=list(compared.ready), missing=compared.missing)


def counted(run):
    """Bytes of all accesses of the kernels that `run` launches, without polls of headers, which depend on the wait."""
    sizes = []
    with interpreter.observe(lambda kind, addresses, itemsize: sizes.append((addresses.size, itemsize))):
        run()
    return sum(count * itemsize for count, itemsize in sizes if count > 64)
