"""Replace: a rank is killed, and a new process takes its place in the communicator of the others, on all or on none."""

from __future__ import annotations

import gc
import os
import pickle
import random
import signal
import time
from multiprocessing.connection import wait
from pathlib import Path

import pytest
import torch

import tricomm
from tests import ranks
from tests.core.bodies.common_bodies import OWN, attempt, leftovers, more_than, right
from tests.core.bodies.replace_bodies import joined, places, stored, use
from tests.core.faults.test_shrink import made, until_fault
from tricomm.store.meetings import Meetings


def stays(rank, world_size, tell, url, which):
    """After a fault: the fault, the time of the call, of the first right result, and what is left over."""
    before = leftovers()
    comm = made(url, rank, world_size)
    work, held, known = comm.all_reduce(torch.ones(4), async_op=True), comm.group_table, places(comm)
    work.wait()
    tell(os.getpid())
    kind, _ = until_fault(comm)
    began = time.monotonic()
    comm.replace(which)
    took = time.monotonic() - began
    right(comm)
    first = time.monotonic()
    assert places(comm) == known and torch.equal(held, comm.group_table)
    assert attempt(work.wait)[0] in ("nothing", "PeerDied", "GroupAborted")
    use(comm)
    sums = comm.stats()
    comm.close()
    del comm, work, held
    gc.collect()
    return kind, took, first, sums.rank, more_than(before, *OWN)


def comes(rank, world_size, tell, url, place, size):
    before = leftovers()
    comm = joined(url, place[rank], size)
    right(comm)
    use(comm)
    comm.close()
    del comm
    gc.collect()
    return more_than(before, *OWN)


@pytest.mark.parametrize(("world_size", "victims"), [(2, [0]), (3, [0]), (3, [2]), (4, [1]), (4, [0, 2])])
@pytest.mark.parametrize("named", [True, False])
def test_a_new_process_takes_the_place_of_a_killed_rank(world_size, victims, named, url):
    which = (victims if len(victims) > 1 else victims[0]) if named else None
    with ranks.start(world_size, stays, url, which) as started:
        pids = started.messages()
        time.sleep(random.uniform(0, 0.2))
        killed = time.monotonic()
        for victim in victims:
            os.kill(pids[victim], signal.SIGKILL)
        with ranks.start(len(victims), comes, url, victims, world_size) as new:
            left = [rank for rank in range(world_size) if rank not in victims]
            outcomes, came = started.results(left), new.results()
        assert [outcomes[rank].error for rank in left] == [None] * len(left), outcomes
        assert [(o.error, o.text, o.value) for o in came] == [(None, "", {})] * len(victims)
        for rank in left:
            kind, took, first, number, more = outcomes[rank].value
            assert kind == "PeerDied" and number == rank and more == {}
            assert first - killed < 4.0 + 2 * ranks.BUSY, (took, first - killed)


@ranks.each(3)
def test_the_same_ranks_make_the_group_again_in_place(rank, world_size, tell, url):
    comm = made(url, rank, world_size)
    known, name = places(comm), comm.group
    assert attempt(lambda: comm.all_reduce(torch.ones(3 + rank)))[0] == "CollectiveMismatch"
    for _ in range(3):
        comm.replace([])
        use(comm, 4)
        assert places(comm) == known and comm.group != name
    comm = comm.shrink([])
    use(comm, 4)
    comm.replace(())
    use(comm, 4)
    comm.close()


def in_turn(rank, world_size, tell, url):
    """Rank 2 is lost, and so is the one that takes its place; then a rank is left out."""
    comm = made(url, rank, world_size)
    tell(os.getpid())
    for _ in range(2):
        until_fault(comm)
        comm.replace()
        use(comm, 4)
    until_fault(comm)
    comm = comm.shrink()
    use(comm, 4)
    size = comm.world_size
    comm.replace([])
    use(comm, 4)
    comm.close()
    return size


def until_killed(rank, world_size, tell, url, place, size):
    comm = joined(url, place, size)
    use(comm, 4)
    tell(os.getpid())
    until_fault(comm)


def test_a_place_is_taken_twice_and_then_the_group_shrinks(url):
    with ranks.start(3, in_turn, url) as started:
        os.kill(started.messages()[2], signal.SIGKILL)
        for _ in range(2):
            with ranks.start(1, until_killed, url, 2, 3) as new:
                [pid] = new.messages()
                os.kill(pid, signal.SIGKILL)
        outcomes = started.results([0, 1])
    assert [(o.error, o.text, o.value) for o in outcomes[:2]] == [(None, "", 2)] * 2, outcomes


@ranks.each(3)
def test_wrong_arguments_are_refused_before_anything_is_said(rank, world_size, tell, url):
    comm = made(url, rank, world_size)
    for which in (rank, 3, -1, True, [1, 1], "1", 1.0, [None], [rank]):
        assert attempt(lambda which=which: comm.replace(which))[0] == "InvalidArgument", which
    for given in ({"timeout": 0}, {"timeout": "1"}, {"store": "store"}):
        assert attempt(lambda given=given: comm.replace([], **given))[0] == "InvalidArgument", given
    right(comm)
    comm.close()


@ranks.each(3)
def test_a_rank_that_runs_is_not_replaced_and_the_group_goes_on(rank, world_size, tell, url):
    comm = made(url, rank, world_size)
    if rank < 2:
        kind, text, seconds = attempt(lambda: comm.replace(2))
        assert kind == "InvalidArgument" and "rank(s) 2 (pid" in text and "still run" in text, (kind, text)
        assert seconds < 1 + ranks.BUSY
    right(comm)
    comm.close()


@ranks.each(4)
def test_ranks_that_ask_for_different_things_are_all_told(rank, world_size, tell, url):
    comm = made(url, rank, world_size)
    if rank == 3:
        return comm.close()
    assert until_fault(comm)[0] == "PeerDied"
    for turn, asks in enumerate(
        (
            {0: lambda: comm.replace(3), 1: lambda: comm.replace([2, 3]), 2: lambda: comm.replace()},
            {0: lambda: comm.replace(3), 1: lambda: comm.shrink([3]), 2: lambda: comm.shrink()},
        )
    ):
        kind, text, _ = attempt(asks[rank])
        words = ("replaces [3]", "leaves out") if turn else ("2 (pid", "still run")
        assert kind == "InvalidArgument" and all(word in text for word in words), (turn, kind, text)
        ranks.together(url, 10 * turn + 10 + rank, range(10 * turn + 10, 10 * turn + 13))
    comm = comm.shrink()
    right(comm)
    comm.close()


@ranks.each(3)
def test_a_rank_that_is_interrupted_at_the_end_is_told_who_went_on(rank, world_size, tell, url):
    comm = made(url, rank, world_size)

    def interrupt(made_again):
        raise KeyboardInterrupt

    if rank == 1:
        comm._become = interrupt
        with pytest.raises(KeyboardInterrupt):
            comm.replace([])
        assert "rank(s) [0, 2] have made the group again, without this rank" in attempt(comm.shrink)[1]
        return comm.close()
    comm.replace([])
    assert attempt(lambda: right(comm))[0] == "GroupAborted"
    comm = comm.shrink([1])
    right(comm)
    comm.close()


@ranks.each(3)
def test_symmetric_handles_are_closed_before_a_replace(rank, world_size, tell, url):
    comm = made(url, rank, world_size)
    handles = [comm.symmetric((8,), torch.float32), comm.register(torch.ones(2048).share_memory_())]
    if rank == 2:
        handles.pop().close()
    kind, text, _ = attempt(lambda: comm.replace([]))
    assert kind == "InvalidArgument" and "are open: close them" in text, (kind, text)
    right(comm)
    for handle in handles:
        handle.close()
    comm.replace([])
    use(comm, 2)
    handle = comm.symmetric((8,), torch.float32)
    handle.local.fill_(rank)
    comm.all_reduce(handle)
    assert torch.equal(handle.local, torch.full((8,), 3.0))
    comm.close()


@ranks.each(3)
def test_nobody_comes_and_the_call_can_be_repeated(rank, world_size, tell, url):
    comm = made(url, rank, world_size)
    if rank == 2:
        comm.close()
        ranks.together(url, 7, [3, 4])
        comm = joined(url, 2, 3)
    else:
        assert until_fault(comm)[0] == "PeerDied"
        kind, text, seconds = attempt(lambda: comm.replace(2, timeout=0.5))
        assert kind == "RendezvousError" and "rank(s) [2] did not come" in text and seconds < 2 + ranks.BUSY, text
        assert attempt(lambda: right(comm))[0] == attempt(comm.suspend)[0] == "PeerDied"
        ranks.together(url, 3 + rank, [3, 4])
        comm.replace(2)
    use(comm, 4)
    comm.close()


def refused_newcomer(rank, world_size, tell, url, given):
    """A process that does not fit: its error; then, as one that fits, the others' group."""
    token, options, size, hurt = given
    if token:
        os.environ["TRICOMM_TOKEN"] = token
    if hurt:
        hurt()
    first = attempt(lambda: joined(url, 1, size, **options))[:2]
    os.environ.pop("TRICOMM_TOKEN", None)
    tell(first)
    return first


def told(rank, world_size, tell, url):
    comm = made(url, rank, world_size)
    if rank == 1:
        return comm.close()
    assert until_fault(comm)[0] == "PeerDied"
    first = attempt(lambda: comm.replace(1, timeout=20))[:2]
    comm.replace(1)
    right(comm)
    use(comm)
    comm.close()
    return first


def other_version():
    from tricomm.store import records

    records._VERSION += 1


OTHERS = {
    "options": (("", {"arena_bytes": 1 << 20}, 3, None), "has other options"),
    "token": (("secret", {}, 3, None), "bad MAC"),
    "size": (("", {}, 4, None), "world size"),
    "version": (("", {}, 3, other_version), "bad version"),
}


@pytest.mark.parametrize("what", OTHERS)
def test_a_new_rank_that_does_not_fit_is_named_on_all_ranks(what, url):
    given, words = OTHERS[what]
    with ranks.start(3, told, url) as started, ranks.start(1, refused_newcomer, url, given) as wrong:
        kind, text = wrong.message(0)
        assert kind == "RendezvousError" and words in text, (kind, text)
        with ranks.start(1, comes, url, [1], 3) as new:
            outcomes, came = started.results(), new.results()
        for rank in (0, 2):
            assert outcomes[rank].error is None, outcomes[rank]
            kind, text = outcomes[rank].value
            assert kind == "RendezvousError" and words in text, (kind, text)
        assert came[0].value == {}, came


def sleeps(rank, world_size, tell, url):
    comm = made(url, rank, world_size)
    known = places(comm)
    comm.suspend()
    tell(os.getpid())
    kind, text = "nothing", ""
    while kind == "nothing":
        kind, text, _ = attempt(comm.check)
        time.sleep(0.01)
    assert kind == "PeerDied", text
    comm.replace(1)
    assert comm.suspended and attempt(lambda: right(comm))[0] == "InvalidArgument"
    comm.resume()
    assert places(comm) == known
    use(comm, 4)
    comm.close()


def wakes(rank, world_size, tell, url):
    comm = joined(url, 1, 3)
    assert comm.suspended and attempt(lambda: right(comm))[0] == "InvalidArgument"
    comm.resume()
    use(comm, 4)
    comm.suspend()
    comm.close()


def test_a_suspended_group_gets_a_new_rank_and_resumes(url):
    with ranks.start(3, sleeps, url) as started:
        os.kill(started.messages()[1], signal.SIGKILL)
        with ranks.start(1, wakes, url) as new:
            outcomes = [*started.results([0, 2]), *new.results()]
    assert [(o.error, o.text) for n, o in enumerate(outcomes) if n != 1][:2] == [(None, "")] * 2, outcomes


@ranks.each(2)
def test_processes_that_are_all_new_are_told_to_make_a_group(rank, world_size, tell, url):
    Meetings(stored(url, rank, 2)).call(bytes(16), [0, 1], rank == 0, 10)
    kind, text, _ = attempt(lambda: joined(url, rank, 2))
    assert kind == "InvalidArgument" and "all ranks are new" in text, (kind, text)


@ranks.each(3)
def test_statistics_and_dumps_say_what_happened(rank, world_size, tell, url):
    comm = made(url, rank, world_size)
    name = comm.group
    if rank == 1:
        comm.close()
        comm = joined(url, 1, 3)
        said = "joined in place of a lost rank"
    else:
        until_fault(comm)
        comm.replace()
        said = f"group {name} with new rank(s) [1]"
    right(comm)
    assert comm.stats().origin == said and f"simulated, {said}: " in str(comm.stats()), str(comm.stats())
    [path] = tricomm.dump(Path(url.removeprefix("file://")).parent / f"dump{rank}-")
    dumped = pickle.loads(path.read_bytes())["pg_config"].values()
    assert f"tricomm, {said}" in {config["desc"] for config in dumped}, dumped
    comm.replace([])
    comm.barrier()
    assert comm.stats().origin.endswith(" again")
    comm.close()


def loses_twice(rank, world_size, tell, url):
    comm = made(url, rank, world_size)
    tell(os.getpid())
    for _ in range(2):
        until_fault(comm)
        comm.replace()
        right(comm)
    comm.barrier()
    comm.close()


def spare(rank, world_size, tell, url):
    comm = joined(url, 1, 3)
    right(comm)
    tell(os.getpid())
    if not Path(url.removeprefix("file://")).with_name("killed").exists():
        time.sleep(60)  # until it is killed
    comm.barrier()
    comm.close()


def test_of_two_spares_for_one_place_each_takes_it_in_turn(url):
    with ranks.start(3, loses_twice, url) as started, ranks.start(2, spare, url) as spares:
        pids = started.messages()
        time.sleep(1.0)  # both wait
        os.kill(pids[1], signal.SIGKILL)
        [pipe] = wait(spares.pipes, 60)
        taker = spares.pipes.index(pipe)
        Path(url.removeprefix("file://")).with_name("killed").touch()
        os.kill(spares.message(taker), signal.SIGKILL)
        assert spares.message(1 - taker)
        outcomes = started.results([0, 2])
        assert spares.results([1 - taker])[1 - taker].error is None
    assert [outcomes[rank].error for rank in (0, 2)] == [None] * 2, outcomes
