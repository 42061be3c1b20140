"""Process groups that shrink: a rank is killed or taken away, and the others go on in a smaller group."""

from __future__ import annotations

import os
import random
import signal
import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed import distributed_c10d

import tricomm
from tests import ranks
from tests.c10d.bodies.groups import default_group, refused
from tests.core.bodies.common_bodies import attempt
from tests.soak import kills
from tests.store.store_ranks import free_port
from tricomm.c10d import group_creation
from tricomm.deadline import Deadline
from tricomm.store.control import ControlPage

WORLD = distributed_c10d._world


def total(group=None, value=1.0):
    x = torch.full((3,), float(value))
    dist.all_reduce(x, group=group)
    return x[0].item()


def until_lost(group=None):
    """Call until the group is lost: the class of its error."""
    try:
        while True:
            total(group)
    except tricomm.TricommError as error:
        return type(error).__name__


def known():
    """How many groups torch knows, in each of its tables."""
    tables = WORLD.pg_map, WORLD.pg_names, WORLD.pg_group_ranks, WORLD.pg_backend_config, WORLD.pg_to_tag
    return {len(table) for table in tables} | {len({id(g) for some in WORLD.tags_to_pg.values() for g in some})}


def goes_on(rank, world_size, tell, url):
    with default_group(rank, world_size, url, "kernels") as old:
        dist.new_group([0, 1])
        done = dist.all_reduce(torch.ones(2), async_op=True)
        done.wait()
        tell(os.getpid())
        kind = until_lost()
        began = time.monotonic()
        new = tricomm.shrink()
        first = total(value=dist.get_rank() + 1)
        seconds = time.monotonic() - began
        assert done.wait() and done.is_completed() and done.result()[0][0] == world_size
        assert new is dist.group.WORLD is not old and known() == {1} and dist.get_backend() == "tricomm"
        assert dist.get_process_group_ranks(new) == [0, 1] and dist.get_world_size() == 2
        refused(lambda: old.allreduce([torch.ones(1)]), "destroyed", kind=tricomm.GroupAborted)
        refused(lambda: tricomm.shrink(old), "destroyed")
        assert functional.all_reduce(torch.ones(2), "sum", new)[0] == 2.0
        assert distributed_c10d._find_pg_by_ranks_and_tag("", [0, 1]) is new and new.getGroupDesc().endswith("shrunk")
        pair, alone = dist.new_group([1, 0]), [dist.new_group([r]) for r in range(2)][dist.get_rank()]
        assert total(pair) == 2.0 and total(alone) == 1.0
        dist.barrier()
        if dist.get_rank() == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        until_lost()
        tricomm.shrink(timeout=30)
        assert (dist.get_rank(), dist.get_world_size(), total(), known()) == (0, 1, 1.0, {1})
    return kind, first, seconds


@pytest.mark.parametrize("victim", [0, 2])
def test_the_survivors_of_a_killed_rank_have_a_smaller_default_group(victim):
    url = f"tcp://127.0.0.1:{free_port()}"  # rank 0 hosts the store
    with ranks.start(3, goes_on, url) as started:
        pids = started.messages()
        os.kill(pids[victim], signal.SIGKILL)
        _, last = left = [rank for rank in range(3) if rank != victim]
        outcomes = started.results(left)
    assert outcomes[left[0]].code == -signal.SIGKILL, outcomes
    assert outcomes[last].error is None, outcomes[last]
    kind, first, seconds = outcomes[last].value
    assert kind == "PeerDied" and first == 3.0 and seconds < 1.0 + ranks.BUSY


def test_ranks_of_a_process_group_are_killed_one_after_another_until_one_is_left():
    seed = random.randrange(1 << 32)
    try:
        kills.run(6, seed, kills.endure_in_groups)
    except BaseException as error:
        error.add_note(f"python -m tests.soak.kills 6 {seed} groups")
        raise


def dies_before_the_first_call(rank, world_size, tell, url):
    """Rank 0 dies, and rank 1 in the smaller group before any call; what ranks 2 and 3 get from the next shrink."""
    with default_group(rank, world_size, url, "kernels"):
        assert total() == 4.0
        ranks.together(url, rank, range(world_size))
        if rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        until_lost()
        tricomm.shrink(timeout=20)
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        until_lost()
        return attempt(lambda: tricomm.shrink(timeout=10))[0], dist.get_world_size(), attempt(total)[0]


def test_a_group_that_has_made_no_call_since_it_shrank_can_shrink_again(url):
    with ranks.start(4, dies_before_the_first_call, url) as started:
        outcomes = started.results([2, 3])
    assert [outcomes[rank].value for rank in (2, 3)] == [("nothing", 2, "nothing")] * 2, outcomes


def in_a_subgroup(rank, world_size, tell, url):
    with default_group(rank, world_size, url, "kernels") as world:
        sub = dist.new_group([0, 2, 3])
        if rank == 1:
            tell(None)
            return "not in it"
        assert total(sub) == 3.0
        name = sub.group_name
        tell(os.getpid())
        until_lost(sub)
        new = tricomm.shrink(sub, [2])
        assert dist.group.WORLD is world and dist.get_rank() == rank and known() == {2}
        assert dist.get_process_group_ranks(new) == [0, 2] and dist.get_rank(new) == rank // 2
        assert total(new, rank) == 2.0 and new.group_name != name
        x = torch.full((2,), float(rank))
        dist.broadcast(x, src=2, group=new)  # by its number in the job
        assert x[0] == 2.0
        dist.destroy_process_group(new)
        assert known() == {1}
    return "goes on"


def test_a_subgroup_shrinks_and_the_others_stay(url):
    with ranks.start(4, in_a_subgroup, url) as started:
        pids = started.messages()
        time.sleep(0.1)
        os.kill(pids[3], signal.SIGKILL)
        outcomes = started.results([0, 2])
    assert [outcomes[rank].value for rank in (0, 2)] == ["goes on"] * 2, outcomes


@pytest.mark.parametrize("abort", [False, True])
@ranks.each(3)
def test_torch_shrinks_by_its_own_name(rank, world_size, tell, url, abort):
    with default_group(rank, world_size, url, "kernels") as old:
        assert total() == 3.0
        ranks.together(url, rank, range(world_size))
        if rank == 1:
            kind, text, _ = attempt(until_lost)
            assert until_lost() in ("GroupAborted", "PeerDied") or text, (kind, text)
            return
        assert old._get_backend(torch.device("cpu")).supports_shrinking
        refused(lambda: dist.shrink_group([1], pg_options=object()), "pg_options")
        refused(lambda: dist.shrink_group([1], shrink_flags=7), "shrink_flags")
        refused(lambda: dist.shrink_group([rank]), "this is rank")
        refused(lambda: dist.shrink_group.__wrapped__([1]), "tricomm.shrink", kind=TypeError)  # as it was imported
        flags = distributed_c10d.SHRINK_ABORT if abort else distributed_c10d.SHRINK_DEFAULT
        new = distributed_c10d.shrink_group([1], old, flags)
        assert new is dist.group.WORLD and total() == 2.0 and known() == {1}


@ranks.each(2)
def test_groups_that_cannot_shrink_are_refused_with_a_remedy(rank, world_size, tell, url):
    with default_group(rank, world_size, url, "gloo") as world:
        assert total() == 2.0
        refused(tricomm.shrink, "TRICOMM_CPU=kernels")
        other = dist.new_group(backend="gloo")
        refused(lambda: tricomm.shrink(other), "a group of tricomm's")
        refused(lambda: tricomm.shrink(tricomm.wrap(other)), "wraps a group of another backend")
        with pytest.raises(TypeError, match="does not support shrinking"):
            dist.shrink_group([1 - rank], other)  # torch's own
        sub = dist.new_group([0, 1])
        dist.destroy_process_group(sub)
        refused(lambda: tricomm.shrink(sub), "destroyed")
        assert dist.group.WORLD is world and total() == 2.0


def loses_a_message(rank, world_size, tell, url, group):
    with default_group(rank, world_size, url, "gloo" if group == "gloo" else "kernels"):
        pg = dist.group.WORLD if group != "wrapped" else tricomm.wrap(dist.new_group(backend="gloo"))
        if group in ("kernels", "wrapped"):
            assert total(pg) == 2.0
        ranks.together(url, rank, range(world_size))
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        lost = total if group == "wrapped" else lambda pg: dist.recv(torch.ones(1), 1, group=pg)
        texts = [attempt(lambda: lost(pg))[:2] for _ in "ab"]
        return texts, attempt(lambda: tricomm.shrink(pg))[0]


@pytest.mark.parametrize("group", ["kernels", "kernels, no call", "gloo", "wrapped"])
def test_a_lost_message_names_shrink_where_it_works(group, url):
    with ranks.start(2, loses_a_message, url, group) as started:
        outcome = started.results([0])[0]
    works = group == "kernels"
    assert outcome.error is None, outcome
    texts, shrunk = outcome.value
    assert [kind for kind, _ in texts] == ["PeerDied", "GroupAborted"], texts
    for _, text in texts:
        assert "make a new one" in text and ("shrink it by tricomm.shrink(group), or" in text) is works, text
    assert shrunk == ("nothing" if works else "InvalidArgument")


@ranks.each(2)
def test_wrong_arguments_and_callbacks_are_refused_and_the_group_stays(rank, world_size, tell, url):
    with default_group(rank, world_size, url, "kernels"):
        assert total() == 2.0
        for exclude in ([rank], [2], "1", [1 - rank, 1 - rank]):
            refused(lambda exclude=exclude: tricomm.shrink(None, exclude), "exclude")
        refused(lambda: tricomm.shrink(timeout=-1), "timeout")
        future = dist.all_reduce(torch.ones(2), async_op=True).get_future().then(lambda done: tricomm.shrink())
        with pytest.raises(tricomm.InvalidArgument, match="callback"):
            future.wait()
        assert total() == 2.0
        tricomm.shrink(exclude=[])  # the same ranks again
        assert total() == 2.0


def stopped_in_make(rank, world_size, tell, url, how, limit):
    """Rank 1 dies, or is refused something, while the smaller group is made; then the ranks that are left try again."""
    with default_group(rank, world_size, url, "kernels"):
        assert total() == 4.0
        ranks.together(url, rank, range(world_size))
        if rank == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        making = group_creation.make

        def make(config, *more, **given):
            group_creation.make = making
            if how in ("kill", "host"):
                os.kill(os.getpid(), signal.SIGKILL)
            if how == "after":
                making(config, *more, **given)
            raise tricomm.ResourceError("refused")

        if rank == (0 if how == "host" else 1):
            group_creation.make = make
        until_lost()
        first = attempt(lambda: tricomm.shrink(timeout=limit))
        assert known() == {1}
        tricomm.shrink(timeout=20)
        return first[:2], dist.get_world_size(), total()


@pytest.mark.parametrize("how", ["kill", "host", "before", "after"])
def test_all_have_the_smaller_group_or_all_raise(how, url):
    with ranks.start(4, stopped_in_make, url, how, 20) as started:
        left = {"kill": [0, 2], "host": [1, 2]}.get(how, [0, 1, 2])
        outcomes = started.results(left)
    for rank in left:
        assert outcomes[rank].error is None, outcomes[rank]
        (kind, text), size, result = outcomes[rank].value
        assert (size, result) == (len(left), float(len(left)))
        assert kind == ("PeerDied" if how in ("kill", "host") else "ResourceError"), text


def deaf(*given):
    ControlPage.give_up_if_refused = lambda control: None
    return stopped_in_make(*given)


def test_without_a_look_at_the_others_a_refusal_costs_the_whole_time_limit(url):
    with ranks.start(4, deaf, url, "before", 3.0) as started:
        outcomes = started.results([0, 1, 2])
    assert {outcome.value[0][0] for outcome in outcomes[:3]} & {"CollectiveTimeout", "RendezvousError"}, outcomes


@pytest.mark.parametrize("short", [True, False])
def test_the_end_of_a_host_is_seen_while_its_store_is_joined(short, monkeypatch):
    """Without short attempts it would be seen when the time is up."""
    if not short:
        monkeypatch.setattr(group_creation, "_STORE_SECONDS", 60.0)
    control = SimpleNamespace(give_up_if_refused=lambda: None, alive=lambda rank: False)
    kind, text, seconds = attempt(lambda: group_creation._joined(control, free_port(), Deadline(6.0)))
    assert kind == "PeerDied" and "hosts the store" in text and (seconds < 5.0) is short


@ranks.each(2)
def test_an_interrupt_in_the_wait_for_earlier_calls_is_told(rank, world_size, tell, url):
    with default_group(rank, world_size, url, "kernels") as old:
        assert total() == 2.0
        calls = old._dispatcher._cpu
        if rank == 0:

            def interrupted(*given):
                del calls.drain
                raise KeyboardInterrupt

            calls.drain = interrupted
            with pytest.raises(KeyboardInterrupt):
                tricomm.shrink()
        else:
            kind, text, seconds = attempt(lambda: tricomm.shrink(timeout=60))
            assert kind == "GroupAborted" and "rank 0 was stopped by KeyboardInterrupt" in text, (kind, text)
            assert seconds < 1.0 + ranks.BUSY
        ranks.together(url, rank, range(world_size))
        tricomm.shrink(exclude=[])
        assert total() == 2.0


@ranks.each(2)
def test_an_interrupt_at_the_end_leaves_a_group(rank, world_size, tell, url):
    with default_group(rank, world_size, url, "kernels") as old:
        assert total() == 2.0
        end = group_creation._end

        def interrupted(group):
            group_creation._end = end
            raise KeyboardInterrupt

        group_creation._end = interrupted
        with pytest.raises(KeyboardInterrupt):
            tricomm.shrink(exclude=[])
        assert dist.group.WORLD is not old and total() == 2.0
        dist.destroy_process_group(old)
        assert dist.group.WORLD is not old and total() == 2.0 and known() == {1}
