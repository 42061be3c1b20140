"""Random calls and faults on 3 and 4 ranks without a GPU: every rank's errors, and resources that grow."""

from __future__ import annotations

import os
import random

import pytest

from tests.soak import growth
from tests.soak.calls import CALLS
from tests.soak.faults import FAULTS, Outcome, judge
from tests.soak.growth import MEBIBYTE
from tests.soak.soak import Soak
from tests.soak.worker import Report


@pytest.mark.exhaustive  # tests/core/faults and tests/c10d also cause each of them
def test_one_of_each_fault(tmp_path):
    soak = Soak(tmp_path, 14, 180.0, 1.0, len(FAULTS))
    soak.run()
    assert soak.problems == [] and soak.faults == dict.fromkeys(FAULTS, 1)
    assert set(soak.calls) >= {call.__name__ for call in CALLS} | {"backward", "sub-group"}


@pytest.mark.soak
def test_random_calls_and_faults_for_minutes(tmp_path):
    """SOAK_MINUTES of rounds. SOAK_SEED repeats groups, calls and faults; their timing depends on the machine."""
    seed = int(os.environ.get("SOAK_SEED") or random.SystemRandom().randrange(1 << 31))
    soak = Soak(tmp_path, seed, 60.0 * float(os.environ.get("SOAK_MINUTES", "10")), 30.0)
    soak.run()
    print(f"seed {seed}: {soak.calls.total()} calls, faults {dict(soak.faults)}")
    assert soak.problems == [], f"seed {seed}; logs of the ranks: {tmp_path}"


def error(kind, named=True, at=10.0):
    return Report(error=(kind, named, "words", at))


replaced = Report(error=("TypeError", False, "expected a sequence of integers or a single integer, got '(8)'", 10.0))


def quoted(kind):
    """The error of a signal handler that raises `kind` in Python code called from torch's C++."""
    return Report(error=("RuntimeError", False, f"Cannot extract tensors from value: {kind}: sent by the soak", 10.0))


@pytest.mark.parametrize(
    ("fault", "reports", "kinds"),
    [
        (None, [Report(), Report(), Report()], []),
        (None, [error("PeerStalled"), Report(), Report()], ["unexpected"]),
        (None, [None, Report(), Report()], ["lost"]),
        (None, [Report(wrong=["all_reduce"]), Report(), Report()], ["wrong"]),
        ("kill", [error("PeerDied"), error("GroupAborted"), None], []),
        ("kill", [error("PeerDied"), None, None], ["lost"]),
        ("kill", [error("GroupAborted"), error("GroupAborted"), None], ["unexpected"]),
        ("kill", [error("PeerDied"), Report(), None], ["unexpected"]),
        ("kill", [error("PeerDied"), error("RuntimeError", False), None], ["unnamed"]),
        ("kill", [error("PeerDied"), error("PeerDied", at=17.0), None], ["late"]),
        ("wrong", [error("CollectiveMismatch")] * 3, []),
        ("wrong", [error("CollectiveMismatch"), error("PeerDied"), error("CollectiveMismatch")], ["unexpected"]),
        ("interrupt", [error("PeerDied"), error("GroupAborted"), error("KeyboardInterrupt", False)], []),
        ("interrupt", [error("PeerDied"), error("KeyboardInterrupt", False), Report()], ["unnamed", "unexpected"]),
        ("raise", [error("PeerDied"), error("GroupAborted"), quoted("Injected")], []),
        ("raise", [error("PeerDied"), quoted("Injected"), error("Injected", False)], ["unnamed"]),
        ("raise", [error("PeerDied"), error("GroupAborted"), quoted("PeerDied")], ["unnamed"]),
        ("raise", [error("PeerDied"), error("GroupAborted"), replaced], []),
        ("raise", [error("PeerDied"), replaced, error("Injected", False)], ["unnamed"]),
        ("pause", [Report(), error("PeerStalled"), Report()], ["unexpected"]),
    ],
)
def test_each_round_is_judged(fault, reports, kinds):
    result = judge(Outcome("communicator", fault, 2, 9.0, reports), 5.0)
    assert [kind for kind, _ in result] == kinds, result


@pytest.mark.parametrize("name", [*growth.COUNTS, "memory"])
def test_growth_is_distinguished_from_one_time_costs(name):
    def samples(values):
        return [{**dict.fromkeys((*growth.COUNTS, "memory"), 10 * MEBIBYTE), name: v * MEBIBYTE} for v in values]

    flat = dict.fromkeys((*growth.COUNTS, "memory"), 0)
    for steady in ([5] * 9, [5, 6, 6, 7, 6, 7, 6, 6, 6], [1, 9, 2, 9, 1, 9, 2, 9, 1], list(range(5))):
        assert growth.grown(samples(steady), 4 * MEBIBYTE) == flat
    assert growth.grown(samples(range(0, 27, 3)), 4 * MEBIBYTE)[name] > 0


def test_a_name_that_no_process_holds_is_an_orphan():
    before = set(os.listdir("/dev/shm"))
    name = f"soak-test-{os.getpid()}"
    with open(f"/dev/shm/{name}", "w"):
        assert name not in growth.orphans(before)
    try:
        assert name in growth.orphans(before)
    finally:
        os.unlink(f"/dev/shm/{name}")
