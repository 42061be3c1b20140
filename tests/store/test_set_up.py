"""Groups that are made over one store for ever: after restarts, after faults, and after a death at any step."""

import random
import signal

import pytest
import torch.distributed as dist

from tests import ranks
from tests.c10d.bodies import set_up_bodies as bodies
from tests.c10d.bodies.groups import ROUTES
from tests.c10d.bodies.set_up_bodies import KERNELS, STEPS, UNKNOWN


@pytest.fixture
def server():
    """A store that outlives the ranks, as torchrun's does."""
    return dist.TCPStore("127.0.0.1", 0, 1, True, wait_for_workers=False)


def walk(server, folder, route, steps, timeout=300.0):
    """The errors of the survivors if rank 1 dies at each of `steps`, and the group is made again with a new process."""
    with ranks.start(2, bodies.survives, server.port, route, str(folder), list(steps), timeout=timeout) as others:
        before = ""
        for step in [*steps, ""]:
            with ranks.start(1, bodies.dies, server.port, route, str(folder), before, step, timeout=60.0) as victim:
                (outcome,) = victim.results()
            if outcome != ranks.Outcome(code=-signal.SIGKILL if step else None, seconds=outcome.seconds):
                raise AssertionError(f"step {step!r} after {before!r}: {outcome}, {others.results()}")
            if step:
                others.messages()
            before = step
        return others.results()


def check(outcomes):
    for outcome in outcomes:
        assert outcome.error is None, outcome
        for step, kind, text, seen in outcome.value:
            if kind == "again":
                assert seen == [6.0] * 3, step
            elif step in UNKNOWN:
                assert kind == "RendezvousError" and "rank(s) [1] did not come" in text, (step, kind, text)
                assert seen < 5.0 + ranks.BUSY, (step, text, seen)
            else:
                assert "[1] (pid" in text and "has ended" in text or "rank 1 (pid" in text, (step, kind, text)
                assert seen < 2.0 + ranks.BUSY, (step, text, seen)


SHORT = ["with a record", "before it listens", "with all addresses", "while it connects", "when it is set up"]


def test_a_death_in_the_set_up_is_named_and_the_group_made_again(server, tmp_path):
    check(walk(server, tmp_path, "gloo", SHORT))


@pytest.mark.exhaustive
@pytest.mark.parametrize("route", ROUTES)
def test_a_death_at_every_step_is_named_and_the_group_made_again(route, server, tmp_path):
    check(walk(server, tmp_path, route, KERNELS if route == "kernels" else [s for s in STEPS if s not in SHORT]))


@pytest.mark.soak
@pytest.mark.parametrize("route", ROUTES)
def test_a_death_at_any_moment_is_named_and_the_group_made_again(route, server, tmp_path):
    chance = random.Random(1)
    longest = 0.1 if route == "gloo" else 0.4
    moments = list(dict.fromkeys(f"{chance.uniform(0, longest):.5f} s" for _ in range(100)))
    for outcome in walk(server, tmp_path, route, moments, 1200.0):
        assert outcome.error is None, outcome
        for moment, kind, text, seen in outcome.value:
            if kind == "again":
                assert seen == [6.0] * 3, moment
            elif kind != "nothing":  # the calls of the group had ended
                unknown = "rank(s) [1] did not come" in text
                assert unknown or "rank(s) [1] (pid" in text or "rank 1 (pid" in text, (moment, kind, text)
                assert seen < (5.0 if unknown else 2.0) + ranks.BUSY, (moment, text, seen)


def test_without_a_look_at_processes_a_death_is_not_named(server, tmp_path):
    with ranks.start(2, bodies.survives, server.port, "gloo", str(tmp_path), SHORT[1:2], False) as others:
        with ranks.start(1, bodies.dies, server.port, "gloo", str(tmp_path), "", SHORT[1]) as victim:
            victim.results()
        assert {kind for _, kind, _ in others.messages()} == {"RendezvousError"}


@pytest.mark.parametrize("route", ROUTES)
def test_processes_that_come_after_others_over_one_store(route, server):
    keys = []
    for _ in range(3):
        assert ranks.run(2, bodies.restarted, server.port, route) == [[3.0] * 3] * 2
        keys.append(sorted(server.list_keys()))
    assert keys[0] == keys[1] == keys[2]


@pytest.mark.parametrize("route", ROUTES)
def test_groups_begin_and_end_again_and_again_in_one_process(route, server):
    first, last = ranks.run(2, bodies.begins_again, server.port, route, 6)
    assert first == last and first[0] == first[1]


@pytest.mark.soak
@pytest.mark.parametrize("route", ROUTES)
def test_five_hundred_groups_begin_and_end(route, server):
    first, last = ranks.run(2, bodies.begins_again, server.port, route, 500, timeout=3600)
    assert first == last and first[0] == first[1]


def test_a_rank_that_is_stopped_while_it_connects_costs_the_limit(server):
    for rank, outcome in enumerate(ranks.run(3, bodies.stops, server.port, 3.0)):
        kind, text, seconds = outcome
        assert kind == "RendezvousError" and "timeout after 3 s" in text and "[1]" in text, (rank, outcome)
        assert 2.0 < seconds < 4.0 + ranks.BUSY, (rank, outcome)


def test_a_rank_that_ends_before_a_new_group_is_named_at_once(url):
    with ranks.start(3, bodies.ends_before_new_group, url) as started:
        outcomes = started.results([0, 2])
        pid = started.pids[1]
    for rank in (0, 2):
        kind, text, seconds = outcomes[rank].value
        assert kind == "PeerDied" and f"[1] (pid {pid}) has ended" in text and seconds < 2.0 + ranks.BUSY, outcomes


def test_strangers_that_connect_are_turned_away(server):
    assert ranks.run(3, bodies.strangers, server.port) == [("nothing", "")] * 3


def test_without_the_key_a_stranger_is_taken_for_a_rank(server):
    results = ranks.run(3, bodies.strangers, server.port, True)
    assert any(kind != "nothing" for kind, _ in results), results


def test_two_threads_make_groups_in_another_order_on_each_rank(server):
    assert ranks.run(2, bodies.crosswise, server.port) == [[[3.0] * 3] * 2] * 2


def test_a_rank_without_a_usable_interface_says_so_and_the_others_hear_it(url):
    own, other = ranks.run(2, bodies.wrong_interface, url)
    assert own.startswith("InvalidArgument") and "nosuch0" in own and "GLOO_SOCKET_IFNAME" in own and "lo" in own
    assert other.startswith("RendezvousError") and "rank 0" in other and "nosuch0" in other
