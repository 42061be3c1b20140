"""Groups one after another, and ranks that lose time: what outlives a fault, and what is no fault."""

import os
import signal
import time

import pytest

from tests import ranks
from tests.core.bodies import fault_bodies
from tests.core.bodies import life_bodies as bodies


def test_a_rank_that_goes_on_after_a_stop_disturbs_nobody(url, tmp_path):
    limit = 1.5
    with ranks.start(3, bodies.after_a_stop, url, f"file://{tmp_path}/next", limit, 2.0) as started:
        pids = started.messages()
        time.sleep(0.3)
        os.kill(pids[2], signal.SIGSTOP)
        try:
            assert [started.message(rank) for rank in (0, 1)] == ["goes on"] * 2
        finally:
            os.kill(pids[2], signal.SIGCONT)
        outcomes = started.results()
    assert [outcome.error for outcome in outcomes] == [None] * 3, [outcome.text for outcome in outcomes]
    for kind, wrong, untouched in (outcomes[0].value, outcomes[1].value):
        assert kind == "PeerStalled" and wrong == 0 and untouched
    assert outcomes[2].value[0] in ("GroupAborted", "PeerStalled", "PeerDied")


@pytest.mark.parametrize(
    ("limit", "seconds", "times"), [(3.0, 50 * bodies.GAP, 3), (1.0, 4.0, 1)], ids=["below", "beyond the limit"]
)
def test_a_busy_interpreter_is_no_stall(limit, seconds, times, url):
    """It holds its lock for many heartbeats."""
    for result in ranks.run(2, bodies.holds_the_lock, url, limit, seconds, times):
        assert result and all(result)


@pytest.mark.parametrize(
    ("closed", "aborted"), [(20, 5), pytest.param(200, 50, marks=[pytest.mark.soak, pytest.mark.timeout(1200)])]
)
def test_many_groups_one_after_another_leave_nothing(closed, aborted, url):
    assert ranks.run(2, bodies.many_lives, url, closed, aborted, timeout=900) == [{}, {}]


def test_a_communicator_that_is_dropped_gives_its_memory_back(url):
    assert ranks.run(2, bodies.dropped, url, 3) == [{}, {}]


def test_after_a_killed_job_the_next_one_meets_over_the_same_file(url):
    with ranks.start(3, fault_bodies.endless, url, None, None, {}) as started:
        pids = started.messages()
        for pid in pids:
            os.killpg(pid, signal.SIGKILL)
        started.results()
    assert ranks.run(3, bodies.many_lives, url, 2, 0) == [{}] * 3
