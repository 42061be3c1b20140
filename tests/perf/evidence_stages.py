"""Stages that go well, fail, crash and hang, for `test_evidence`. Each case leaves a line where it was run."""

from __future__ import annotations

import os
import signal
import time

from tricomm.perf.evidence.stage import Case, Skip, Stage, Wrong

HERE = "tests.perf.evidence_stages"


def case(key, settings, act=lambda: None, **more):
    def run():
        with (settings.out / "runs.txt").open("a") as file:
            file.write(f"{key}\n")
        act()
        return {"value_us": 1.5, "key": key}

    return Case(key, run, **more)


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


def crashing(settings):
    yield case("before", settings)
    yield case("crash", settings, killed)
    yield case("after", settings)


def hanging(settings):
    yield case("before", settings)
    yield case("hang", settings, lambda: time.sleep(600), limit=1.5)
    yield case("after", settings)


def slow(settings):
    for number in range(200):
        yield case(f"step {number}", settings, lambda: time.sleep(0.2))


GOOD = Stage("good", "All is well", good, columns=("value_us",))
MIXED = Stage("mixed", "Some of everything", mixed)
PARTLY = Stage("partly", "Something is missing", partly)
CRASHING = Stage("crashing", "One dies", crashing)
HANGING = Stage("hanging", "One never ends", hanging)
SLOW = Stage("slow", "Longer than its limit", slow, limit=6.0)
MISSING = Stage("nothing", "Cannot run here", good, missing=lambda settings: "no GPU of the kind")
