"""A rank or a new process ends itself in a step of replace: the others have the group, or can replace it again."""

from __future__ import annotations

import os
import random
import signal
import statistics
import time

import pytest

from tests import ranks
from tests.core.bodies.common_bodies import attempt, right
from tests.core.bodies.replace_bodies import comes_at_last, lasts, use
from tests.core.faults.test_shrink import made
from tests.soak import replacements
from tricomm.core import recovery
from tricomm.core.calls import recovery_methods
from tricomm.store.shrink import Shrink


@pytest.mark.parametrize("step", ["met", "after met", "settle", "after settle", "after decide"])
def test_a_new_rank_that_dies_in_a_step_is_followed_by_another(step, url):
    with ranks.start(3, lasts, url, None, None, "") as started:
        os.kill(started.messages()[1], signal.SIGKILL)
        with ranks.start(1, comes_at_last, url, [1], 3, step) as first:
            assert first.results()[0].code == -signal.SIGKILL
        with ranks.start(1, comes_at_last, url, [1], 3) as second:
            outcomes = started.results([0, 2])
            assert second.results()[0].error is None
    for rank in (0, 2):
        assert outcomes[rank].error is None, outcomes[rank]
        failed, more = outcomes[rank].value
        assert len(failed) == 1 and more == {}, (failed, more)


STEPS = [(recovery.Survivor, name) for name in ("met", "after met", "settle", "after settle", "decide", "after decide")]
STEPS += [(Shrink, name) for name in ("agree", "after agree", "_pass_ballot", "after decide")]


@pytest.mark.parametrize(("owner", "step"), STEPS)
@pytest.mark.parametrize("victim", [0, 2])
def test_a_second_death_in_a_step_of_replace(owner, step, victim, url):
    if victim and owner is Shrink:
        pytest.skip("as the leader")
    with ranks.start(3, lasts, url, victim, owner, step) as started:
        os.kill(started.messages()[1], signal.SIGKILL)
        with ranks.start(1, comes_at_last, url, [1], 3) as new:
            started.processes[victim].join(60)
            with ranks.start(1, comes_at_last, url, [victim], 3) as other:
                left = 2 - victim
                outcome = started.results([left])[left]
                assert [each.results()[0].error for each in (new, other)] == [None] * 2
    assert outcome.error is None, outcome
    failed, more = outcome.value
    assert len(failed) <= 2 and more == {}, (failed, more)


def test_ranks_are_killed_and_replaced_at_random_moments():
    seed = random.randrange(1 << 32)
    try:
        found = replacements.run(20, seed)
    except BaseException as error:
        error.add_note(f"python -m tests.soak.replacements 20 {seed}")
        raise
    assert statistics.median(found.seconds) < 1.0 + ranks.BUSY, found.text()


def hurries(rank, world_size, tell, url, seconds):
    """Replace rank 2 while it still runs."""
    recovery_methods._ENDING_SECONDS = seconds
    comm = made(url, rank, world_size)
    tell(os.getpid())
    if rank == 2:
        time.sleep(60)
    kind, text, _ = attempt(lambda: comm.replace(2))
    if kind == "nothing":
        right(comm)
        use(comm, 4)
    comm.close()
    return kind, text


def test_a_rank_may_be_replaced_before_its_process_has_ended(url):
    with ranks.start(3, hurries, url, 20.0) as started, ranks.start(1, comes_at_last, url, [2], 3) as new:
        pids = started.messages()
        time.sleep(0.3)
        os.kill(pids[2], signal.SIGKILL)
        outcomes = started.results([0, 1])
        assert [outcomes[rank].value for rank in (0, 1)] == [("nothing", "")] * 2, outcomes
        assert new.results()[0].error is None


def test_without_waiting_for_its_end_the_call_is_refused(url):
    with ranks.start(3, hurries, url, 0.0) as started:
        started.messages()
        outcomes = started.results([0, 1])
        kinds = [outcomes[rank].value[0] for rank in (0, 1)]
        assert kinds == ["InvalidArgument"] * 2, outcomes
