"""A rank or a new process ends itself in a step of replace: the others have the group, or can replace it again."""

from __future__ import annotations

import os
import random
import signal
import statistics

import pytest

from tests import ranks
from tests.core.bodies.replace_bodies import comes_at_last, lasts
from tests.soak import replacements
from tricomm.core import recovery
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
