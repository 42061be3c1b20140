"""Statistics of a live communicator: every call is counted in its row, timed only if enabled, and published."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import tricomm
from devtools.null_launch import communicator as null_communicator
from tests import forked, ranks
from tests.core.bodies.common_bodies import communicator
from tricomm.core.watch import in_flight
from tricomm.errors import InvalidArgument
from tricomm.kernels import layout
from tricomm.metrics.counters import Activity, Clock, Tally, bucket, count_fallback, fallback_by_size, weight
from tricomm.options import Tuning

SMALL = tricomm.Options(arena_bytes=128 << 10, _tuning=Tuning(blocks=2, tile=32))


def _counted(statistics: tricomm.Statistics) -> dict[tuple[str, int], tuple[int, int]]:
    return {(c.collective, c.bucket): (c.calls, c.nbytes) for c in statistics.calls}


def test_calls_and_bytes_by_collective_and_bucket() -> None:
    def body(comm: tricomm.Communicator) -> dict[tuple[str, int], tuple[int, int]]:
        for count in (1, 60, 64, 0):
            comm.all_reduce(torch.ones(count))
        comm.all_gather(torch.ones(5))
        comm.all_to_all_v(torch.ones(3), [1, 2], [1 + comm.rank] * 2)
        comm.barrier()
        if comm.rank == 0:
            comm.send(torch.ones(2, dtype=torch.complex64), 1)
        else:
            comm.recv(torch.empty(2, dtype=torch.complex64), 0)
        return _counted(comm.stats())

    for rank, result in enumerate(tricomm.simulate(body, 2, options=SMALL)):
        assert result == {
            ("all_reduce", 4): (1, 4),
            ("all_reduce", 256): (2, 496),
            ("all_gather", 32): (1, 20),
            ("all_to_all_v", 16): (1, 12),
            ("barrier", 0): (1, 0),
            (("send", "recv")[rank], 16): (1, 16),
        }


def test_a_failed_call_is_not_counted_and_evicted_plans_are() -> None:
    comm = null_communicator()
    with comm:
        x = torch.ones(8)
        comm.all_reduce(x)
        comm._planner.forget()  # as for a new table, or after 1024 shapes
        comm.all_reduce(x)
        with pytest.raises(InvalidArgument):
            comm.all_reduce(x, op="mean")
        assert _counted(comm.stats()) == {("all_reduce", 32): (2, 64)}


def test_one_addition_counts_calls_and_bytes_beyond_64_bits() -> None:
    activity = Activity("g", 0, 1, torch.device("cpu"), {})
    tally = activity.tally("all_reduce", "one_shot", "ll", 1 << 40)
    assert tally is activity.tally("all_reduce", "one_shot", "ll", (1 << 39) + 1)
    for _ in range(1000):
        tally.total += weight(1 << 60)
    (calls,) = activity.statistics().calls
    assert (calls.calls, calls.nbytes, calls.timed, calls.p50_us) == (1000, 1000 << 60, 0, None)


def test_buckets() -> None:
    assert [bucket(n) for n in (0, 1, 2, 3, 4, 5, 1024, 1025)] == [0, 1, 2, 4, 4, 8, 1024, 2048]


def test_quantiles_are_of_the_latest() -> None:
    activity = Activity("g", 0, 1, torch.device("cpu"), {})
    tally: Tally = activity.tally("barrier", "one_shot", "simple", 0)
    for microseconds in (*[1e6] * 600, *range(1, 513)):
        tally.took(microseconds / 1e6)
    tally.total = weight(0)
    (calls,) = activity.statistics().calls
    assert (calls.timed, calls.p50_us, calls.p99_us) == (1112, pytest.approx(256), pytest.approx(507))


def test_calls_are_timed_only_if_enabled_and_at_the_given_interval() -> None:
    with null_communicator(gpu=False) as comm:
        x = torch.ones(8)
        comm.all_reduce(x)
        assert comm.stats().spans == () and comm.stats().calls[0].timed == 0
        comm.time_calls(3)
        for _ in range(7):
            comm.all_reduce(x)
        result = comm.stats()
        assert (result.calls[0].timed, result.calls[0].calls, len(result.spans)) == (3, 8, 3)
        assert result.calls[0].seconds == pytest.approx(sum(s.time_us for s in result.spans) / 1e6)
        assert abs(result.spans[0].start_us / 1e6 - time.time()) < 60
        comm.time_calls(0)
        comm.all_reduce(x)
        assert comm.stats().calls[0].timed == 3
        with pytest.raises(InvalidArgument, match="every=-1"):
            comm.time_calls(-1)


def test_a_late_peer_is_named(tmp_path: Path) -> None:
    result = ranks.run(2, _late, f"file://{tmp_path}/store")
    assert result[0] > 0.3 and result[1] < 0.3, result


def _late(rank: int, world_size: int, tell: object, url: str) -> float:
    with communicator(rank, world_size, url) as comm:
        comm.barrier()
        before = comm.stats().waited[1 - rank]
        if rank == 1:
            time.sleep(0.8)
        comm.barrier()
        return comm.stats().waited[1 - rank] - before


def test_bytes_sent_to_peers_are_counted_by_size() -> None:
    before = fallback_by_size().get(("gloo", "all_reduce", 4096), (0, 0))
    for _ in range(2):
        count_fallback("gloo", "all_reduce", 4000)
    after = fallback_by_size()["gloo", "all_reduce", 4096]
    assert (after[0] - before[0], after[1] - before[1]) == (2, 8000)


_JOB = """
import torch
from devtools.null_launch import communicator
comm = communicator(gpu=False)
comm.all_reduce(torch.ones(8))
comm.all_reduce(torch.ones(8))
comm.close()
"""


def _job(folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    names = {"TRICOMM_STATS": "60", "TRICOMM_STATS_EVERY": "2", "TRICOMM_STATS_DIR": str(folder), **variables}
    with tempfile.NamedTemporaryFile("w", suffix=".py") as file:
        file.write(_JOB)
        file.flush()
        return forked.script(file.name, env={**os.environ, **names})


def test_a_job_leaves_its_statistics(tmp_path: Path) -> None:
    done = _job(tmp_path / "live")
    assert done.returncode == 0, done.stderr
    (file,) = (tmp_path / "live").iterdir()
    result = json.loads(file.read_text())
    (comm,) = result["communicators"]
    assert comm["calls"][0]["calls"] == 2 and comm["calls"][0]["timed"] == 1 and len(comm["spans"]) == 1
    assert file.name == f"{result['pid']}-{result['started']}.json" and comm["simulated"] is True


def test_nothing_is_written_unless_asked_and_a_job_never_fails_for_it(tmp_path: Path) -> None:
    assert _job(tmp_path / "live", TRICOMM_STATS="").returncode == 0 and not (tmp_path / "live").exists()
    (tmp_path / "file").write_text("")
    done = _job(tmp_path / "file" / "live")
    assert done.returncode == 0 and done.stderr.count("statistics cannot be written") == 1
    done = _job(tmp_path / "live", TRICOMM_STATS="often")
    assert done.returncode == 1 and "TRICOMM_STATS='often'" in done.stderr


class _Event:
    """A fake CUDA event: passes when the test says so, at its number in milliseconds."""

    made: list[_Event] = []

    def __init__(self, timing: bool) -> None:
        self.passed, self.at = False, float(len(self.made))
        self.made.append(self)

    def query(self) -> bool:
        return self.passed

    def elapsed_time(self, other: _Event) -> float:
        return other.at - self.at


def test_on_a_gpu_events_tell_the_time_when_they_have_passed() -> None:
    capturing = [False]
    gpu: Any = SimpleNamespace(here=nullcontext, capturing=lambda: capturing[0], recorded=_Event)
    _Event.made.clear()
    clock, told = Clock(2, gpu), list[float]()
    call = clock.timed(lambda number: number, lambda x: (told.append, ("all_reduce", "one_shot", "ll", 8)))
    assert [call(n) for n in range(4)] == [0, 1, 2, 3] and len(_Event.made) == 5  # the first one belongs to the clock
    clock.collect()
    assert clock.spans() == () and told == []
    _Event.made[2].passed = True  # the end of the first timed call
    assert clock.spans() == ()  # spans() itself queries no event
    capturing[0] = True
    clock.collect()
    assert clock.spans() == ()  # nor while a graph is captured
    capturing[0] = False
    clock.collect()
    (span,) = clock.spans()
    assert (span.time_us, told) == (1000.0, [0.001]) and span.nbytes == 8
    _Event.made[4].passed = True
    call(4)  # the next timed call queries as well
    assert len(clock.spans()) == 2 and clock.spans()[1].start_us - span.start_us == pytest.approx(2000.0)


def test_calls_that_were_timed_last_are_in_the_statistics_of_a_closed_communicator(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpu: Any = SimpleNamespace(here=nullcontext, capturing=lambda: False, recorded=_Event)
    _Event.made.clear()
    with null_communicator() as comm:
        activity = comm._activity
        monkeypatch.setattr(activity, "_gpu", gpu)
        comm.time_calls(1)
        comm.all_reduce(torch.ones(8))
        for event in _Event.made:
            event.passed = True
        assert not any(calls.timed for calls in activity.statistics().calls)
    (calls,) = activity.statistics().calls
    assert (calls.calls, calls.timed) == (1, 1) and len(activity.statistics().spans) == 1

    def broken() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with null_communicator() as comm:
        comm.time_calls(1)
        monkeypatch.setattr(comm._activity.clock, "collect", broken)


@pytest.mark.parametrize(
    ("theirs", "started", "entered"),
    [
        (0, 5, False),  # no call yet
        (4, 5, False),
        (5, 5, True),
        (6, 5, True),
        (layout.EPOCH_LIMIT - 1, 1, False),  # epochs wrap
        (1, layout.EPOCH_LIMIT - 1, True),
        (0, layout.EPOCH_LIMIT - 1, False),
    ],
)
def test_whether_a_rank_has_entered_an_epoch(theirs: int, started: int, entered: bool) -> None:
    assert in_flight._entered(theirs, started) is entered
