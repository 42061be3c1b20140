"""The soak itself: a short one, and each of its checks against a mistake that it has to find."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.marks import some
from tests.soak import growth, soak
from tests.soak.__main__ import main
from tests.soak.calls import CALLS
from tests.soak.faults import FAULTS, Outcome, judge
from tests.soak.growth import MEBIBYTE
from tests.soak.worker import Report

ROOT = Path(__file__).parents[2]


def run(tmp_path, *arguments):
    """The exit code and the figures of a soak."""
    file = tmp_path / "soak.json"
    code = main(["--json", str(file), *arguments])
    return code, json.loads(file.read_text())


@pytest.mark.exhaustive  # tests/core/faults and tests/c10d make each of them, too
def test_one_of_each_fault(tmp_path):
    code, result = run(tmp_path, "--minutes", "3", "--every", "1", "--rounds", str(len(FAULTS)), "--seed", "14")
    assert code == 0, result["problems"]
    assert result["faults by kind"] == dict.fromkeys(FAULTS, 1)
    assert set(result["calls by kind"]) >= {call.__name__ for call in CALLS} | {"backward", "sub-group"}


def test_mistakes_are_found(tmp_path, capfd):
    """Wrong results, errors without a name and everything that can grow; each round ends at the error."""
    mistakes = ("wrong", "unnamed", "descriptors", "threads", "memory", "names")
    code, result = run(
        tmp_path, "--minutes", "3", "--every", "1", "--rounds", "7", "--faults", "pause", "--routes", "communicator",
        "--memory", "16", "--inject", ",".join(mistakes),
    )  # fmt: skip
    for name in result["names"]:
        os.unlink(f"/dev/shm/{name}")
    assert code == 1
    assert result["wrong"] >= 7 and result["unnamed"] == 7 and result["names in /dev/shm"] >= 3
    assert min(result[f"growth of {name}"] for name in ("descriptors", "threads")) >= 2
    assert result["growth of memory"] > 16 * MEBIBYTE
    assert "memory (MiB)" in capfd.readouterr().out


@pytest.mark.parametrize("mistake", some(["hang", "lost"], 2))
def test_a_rank_that_hangs_or_is_lost_is_found(mistake, tmp_path, monkeypatch):
    monkeypatch.setattr(soak, "ENDING", 6.0)
    monkeypatch.setattr(soak, "TIMEOUT", 3.0)
    code, result = run(
        tmp_path, "--minutes", "2", "--every", "1", "--rounds", "1", "--faults", "pause", "--routes", "communicator",
        "--inject", mistake,
    )  # fmt: skip
    assert code == 1 and result[mistake] == 1
    assert "ranks [1] did not end" in str(result["problems"]) or mistake == "lost"


def error(kind, named=True, at=10.0):
    return Report(error=(kind, named, "words", at))


def quoted(kind):
    """`kind`, raised by a signal's handler in Python that torch's C++ has called."""
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
        ("pause", [Report(), error("PeerStalled"), Report()], ["unexpected"]),
    ],
)
def test_each_round_is_judged(fault, reports, kinds):
    result = judge(Outcome("communicator", fault, 2, 9.0, reports), 5.0)
    assert [kind for kind, _ in result] == kinds, result


@pytest.mark.parametrize("name", [*growth.COUNTS, "memory"])
def test_growth_is_told_from_what_comes_once(name):
    def samples(values):
        return [{**dict.fromkeys((*growth.COUNTS, "memory"), 10 * MEBIBYTE), name: v * MEBIBYTE} for v in values]

    flat = dict.fromkeys((*growth.COUNTS, "memory"), 0)
    for steady in ([5] * 9, [5, 6, 6, 7, 6, 7, 6, 6, 6], [1, 9, 2, 9, 1, 9, 2, 9, 1], list(range(5))):
        assert growth.grown(samples(steady), 4 * MEBIBYTE) == flat
    assert growth.grown(samples(range(0, 27, 3)), 4 * MEBIBYTE)[name] > 0


def test_a_name_that_nobody_holds_is_an_orphan():
    before = set(os.listdir("/dev/shm"))
    name = f"soak-test-{os.getpid()}"
    with open(f"/dev/shm/{name}", "w"):
        assert name not in growth.orphans(before)
    try:
        assert name in growth.orphans(before)
    finally:
        os.unlink(f"/dev/shm/{name}")
