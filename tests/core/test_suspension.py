"""suspend() frees a communicator's memory and resume() maps it at the same addresses, in real processes on a CPU."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time

import pytest
import torch
from torch.distributed import HashStore

import tricomm
from tests import ranks
from tests.core.bodies.common_bodies import and_left, attempt, communicator, refused
from tests.ranks import together
from tests.store.store_ranks import succeed
from tricomm.errors import ResourceError, TricommError
from tricomm.options import Tuning
from tricomm.store.segments import Segment


def _forked(comm):
    """Fork a child that tries to resume this communicator; return its exit code, 0 if that is refused by name."""
    pid = os.fork()
    if pid == 0:
        os._exit(0 if "forked into" in refused(comm.resume) else 1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _right(comm, turn):
    """Make calls of every kind, with inputs that differ by rank and turn; return the wrong ones."""
    rank, size, wrong = comm.rank, comm.world_size, []
    for count in (1, 1000, 1000, 20_001):
        x = torch.arange(count, dtype=torch.float32) + rank + turn
        comm.all_reduce(x)
        if not torch.equal(x, size * torch.arange(float(count)) + size * turn + sum(range(size))):
            wrong.append(("all_reduce", turn, count))
    y = comm.all_gather(torch.tensor([rank + 10 * turn]))
    wrong += [] if y.tolist() == [r + 10 * turn for r in range(size)] else [("all_gather", turn)]
    for number in range(6):  # more than a channel has slots
        got = torch.full((7,), -1, dtype=torch.int32)
        comm.send(torch.full((7,), rank + number + turn, dtype=torch.int32), (rank + 1) % size, number, async_op=True)
        comm.recv(got, (rank - 1) % size, number)
        if (got != (rank - 1) % size + number + turn).any():
            wrong.append(("recv", turn, number))
    return wrong


_libc = ctypes.CDLL(None, use_errno=True)


def resident(address, nbytes):
    """The resident pages of a mapping, of any process."""
    pages = -(-nbytes // 4096)
    there = (ctypes.c_ubyte * pages)()
    assert _libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), there) == 0
    return sum(page & 1 for page in there)


def round_trip(rank, world_size, tell, url, turns):
    """Suspend and resume `turns` times; return wrong results, the refusals meanwhile, and pages before and after."""
    with communicator(rank, world_size, url) as comm:
        w = comm.symmetric((100,), torch.float32)
        gone = comm.symmetric((5,), torch.float32)
        gone.close()
        facts = comm._internal.group.peer_ranges, w.local.data_ptr(), w.table.tolist(), comm.group_table.tolist()[:8]
        results = {"wrong": [], "said": {}, "pages": [], "stats": []}
        x = torch.ones(1000)
        calls = {
            "all_reduce": lambda: comm.all_reduce(x),
            "barrier": comm.barrier,
            "send": lambda: comm.send(x, (rank + 1) % world_size),
            "recv": lambda: comm.recv(x),
            "symmetric": lambda: comm.symmetric((1,), torch.int8),
            "split": lambda: comm.split([0]),
            "launch": lambda: comm.launch(None, 1),
            "handle": lambda: w.local,
            "gather": lambda: comm.all_reduce(w),
            "suspend": comm.suspend,
            "synchronize": comm.synchronize,
            "unread": comm._messages.unread,
            "register": lambda: comm.register(x),
            "use_table": lambda: comm.use_table([], "none"),
        }
        results["awake"] = refused(comm.resume)
        for turn in range(turns):
            results["wrong"] += _right(comm, turn)
            w.local.fill_(rank + 1.0)
            comm.all_reduce(w)
            results["wrong"] += [] if (w.local == sum(range(world_size + 1))).all() else [("symmetric", turn)]
            comm.barrier()
            results["pages"].append(resident(*comm._internal.group.peer_ranges[rank]))
            sequence = comm._launcher.sequence
            comm.suspend()
            assert comm.suspended
            results["said"] = {name: refused(call) for name, call in calls.items()}
            results["explained"] = comm.explain("all_reduce", nbytes=4000).reason
            results["stats"].append(comm.stats().memory)
            time.sleep(0.05)
            results["pages"].append(sum(resident(*memory) for memory in comm._internal.group.peer_ranges))
            results["forked"] = _forked(comm)
            assert comm._launcher.sequence == sequence
            comm.resume()
            assert not comm.suspended
            results["stats"].append(comm.stats().memory)
            if (
                comm._internal.group.peer_ranges,
                w.local.data_ptr(),
                w.table.tolist(),
                comm.group_table.tolist()[:8],
            ) != facts:
                results["wrong"].append(("addresses", turn))
            results["wrong"] += [] if not w.local.any() else [("contents", turn)]
        results["wrong"] += _right(comm, 99)
    return results


def test_memory_is_freed_and_mapped_again_at_the_same_addresses(url):
    for result, left in ranks.run(3, and_left, round_trip, url, 2):
        assert result["wrong"] == []
        assert left == {}
        before, asleep, before_2, asleep_2 = result["pages"]
        assert before and before_2 and asleep == asleep_2 == 0
        for name, text in result["said"].items():
            assert text.startswith("InvalidArgument: ") and "suspended" in text and "resume()" in text, (name, text)
        assert result["forked"] == 0
        assert "not suspended" in result["awake"] and "suspended" in result["explained"]
        assert [(m.kind, m.nbytes > 0, m.suspended) for m in result["stats"]] == [
            ("posix_shm", False, True),
            ("posix_shm", True, False),
        ] * 2


def refused_within(action, seconds):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        said = refused(action)
        if said != "not refused":
            return said
        time.sleep(0.01)
    return "not refused"


def one_dies(rank, world_size, tell, url, victim):
    with communicator(rank, world_size, url) as comm:
        comm.all_reduce(torch.ones(10))
        comm.suspend()
        tell(os.getpid())
        if rank == victim:
            time.sleep(60)
        noticed = refused_within(comm.check, 20.0)
        texts = [refused(comm.resume), refused(lambda: comm.all_reduce(torch.ones(3)))]
    return noticed, time.monotonic(), texts


def test_a_rank_that_dies_while_all_are_suspended_is_noticed_and_named(url):
    with ranks.start(3, and_left, one_dies, url, 1) as started:
        pids = started.messages()
        time.sleep(0.2)
        os.kill(pids[1], signal.SIGKILL)
        killed = time.monotonic()
        for rank, outcome in enumerate(started.results([0, 2])):
            if rank == 1:
                continue
            (noticed, when, texts), left = outcome.value
            assert when - killed < 2.0 + ranks.BUSY
            for text in (noticed, *texts):
                assert text.startswith("PeerDied") and f"rank 1 (pid {pids[1]}) died" in text, text
            assert left == {}


def dies_in(rank, world_size, tell, url, where):
    with communicator(rank, world_size, url) as comm:
        comm.all_reduce(torch.ones(10))
        if rank == world_size - 1:
            setattr(Segment, where, lambda self: os._exit(7))
        errors = []
        for step in (comm.suspend, comm.resume):
            try:
                step()
            except TricommError as error:
                errors.append((type(error).__name__, str(error)))
                break
    return errors


@pytest.mark.parametrize("where", ["give_back", "take_again"])
def test_a_rank_that_dies_in_the_middle_is_named_and_leaves_nothing(where, url):
    with ranks.start(3, and_left, dies_in, url, where) as started:
        *others, victim = started.results()
        assert victim.code == 7
        for outcome in others:
            [(kind, text)], left = outcome.value
            assert kind == "PeerDied" and "rank 2" in text
            assert left == {}


def refuse_once(where):
    """The next step `where` of a segment fails."""
    usual, left = getattr(Segment, where), [1]

    def once(self):
        if left and self.nbytes > 8192 and left.pop():
            raise ResourceError("madvise: made to fail")
        usual(self)

    setattr(Segment, where, once)


def memory_refused(rank, world_size, tell, url, where, victim):
    """A system call fails on one rank; return the errors, and whether the group still works."""
    with communicator(rank, world_size, url) as comm:
        w = comm.symmetric((10,), torch.int64)
        texts = []
        if rank == victim:
            refuse_once(where)
        texts.append(refused(comm.suspend))
        state = comm.suspended
        if state:
            texts.append(refused(comm.resume))
            end = time.monotonic() + 10.0  # the other rank frees its memory after the agreement
            ranges = comm._internal.group.peer_ranges
            while (pages := sum(resident(*memory) for memory in ranges)) and time.monotonic() < end:
                time.sleep(0.01)
            together(url, rank, range(world_size))
            comm.resume()
        else:
            pages = 0
        wrong = _right(comm, 3)
        w.local.fill_(rank)
        comm.all_reduce(w)
        wrong += [] if (w.local == sum(range(world_size))).all() else ["symmetric"]
    return texts, state, pages, wrong


@pytest.mark.parametrize("where", ["give_back", "take_again"])
def test_a_suspension_that_one_rank_refuses_is_refused_on_all(where, url):
    for texts, suspended, pages, wrong in ranks.run(2, memory_refused, url, where, 1):
        text = texts[-1]
        assert text.startswith("ResourceError") and "rank 1" in text and "made to fail" in text
        assert suspended == (where == "take_again") and ("not suspended" in text) == (where == "give_back")
        assert pages == 0 and wrong == []


def bad_moments(rank, world_size, tell, url):
    """Suspend with a message in flight, with a handle closed on one rank only, and while another rank makes a call."""
    with communicator(rank, world_size, url, timeout=10.0) as comm:
        if rank == 0:
            comm.send(torch.arange(5), 1)
        comm.barrier()
        said = [refused(comm.suspend)]
        if rank == 1:
            got = torch.zeros(5, dtype=torch.int64)
            comm.recv(got, 0)
            assert got.tolist() == [0, 1, 2, 3, 4]
        w = comm.symmetric((4,), torch.int8)
        if rank == 0:
            w.close()
        said.append(refused(comm.suspend))
        w.close()
        comm.suspend()
        comm.resume()
        wrong = _right(comm, 5)
        action = comm.suspend if rank == 0 else lambda: comm.all_reduce(torch.ones(9))
        said.append(refused(action))
    return said, wrong


def test_bad_moments_are_refused_by_name_on_all_ranks(url):
    (first, wrong), (second, wrong_too) = ranks.run(2, bad_moments, url)
    assert wrong == wrong_too == []
    for said in (first, second):
        assert "rank 0: rank(s) [1] have not received all" in said[0]
        assert "rank 0 has no symmetric handle open, rank 1 has symmetric handles [1] open" in said[1]
        assert "suspend" in said[2] and "all_reduce" in said[2]


def beside_a_message(rank, world_size, tell, url):
    with communicator(rank, world_size, url, timeout=60.0) as comm:
        comm.barrier()
        if rank:
            return refused(lambda: comm.recv(torch.zeros(5), 0, tag=7))
        end = time.monotonic() + 30.0
        while not comm._messages.running(1) and time.monotonic() < end:
            time.sleep(0.005)
        comm._group.timeout = 0.3  # before the receiver times out
        return refused(comm.suspend)


def test_a_message_that_prevents_suspension_is_named(url):
    waits, receiver = ranks.run(2, beside_a_message, url)
    for said in (waits, receiver):
        assert "rank(s) [1] did not come although their processes run; rank 1 is in recv from rank 0 (tag 7," in said
    assert waits.startswith("CollectiveTimeout") and receiver.startswith("GroupAborted")


def _beside_a_call(comm):
    """Rank 0 suspends while rank 1 is in a call."""
    return attempt(comm.suspend if comm.rank == 0 else lambda: comm.all_reduce(torch.ones(3)))[:2]


def test_a_call_that_one_rank_has_not_made_is_named_by_suspend_at_once():
    options = tricomm.Options(arena_bytes=1 << 18, timeout=1e6)
    (kind, text), (other, theirs) = tricomm.simulate(_beside_a_call, 2, options=options)
    assert kind == other == "CollectiveMismatch"
    for said in (text, theirs):
        assert "suspend: rank 1 is in all_reduce" in said and "at sequence 1 instead" in said


SMALL = tricomm.Options(arena_bytes=256 << 10, _tuning=Tuning(blocks=2, tile=16))


def _sleeps(comm, begin=True):
    results = []
    for turn in range(3):
        x = torch.arange(20.0) + comm.rank + turn
        comm.all_reduce(x)
        results.append(torch.equal(x, 2 * torch.arange(20.0) + 1 + 2 * turn))
        if not begin:
            comm._group.begin = lambda: None
        comm.suspend()
        comm.resume()
    return results


def test_simulated_ranks_suspend_and_no_schedule_shows_a_race():
    assert tricomm.simulate(_sleeps, 2, options=SMALL) == [[True] * 3] * 2
    assert tricomm.check(_sleeps, 2, schedules=3, options=SMALL).ok


def test_without_cleared_memory_the_next_call_is_wrong():
    with pytest.raises(tricomm.TricommError):
        tricomm.simulate(lambda comm: _sleeps(comm, begin=False), 2, options=SMALL)


def test_without_the_monitors_check_a_death_while_suspended_is_noticed_at_the_next_call_only():
    store, result, looked = HashStore(), [], threading.Barrier(2)

    def rank(number):
        with tricomm.Communicator(store, number, 2, "cpu", 30.0, SMALL) as comm:
            comm.suspend()
            if number == 0:
                monitor = comm._monitor
                for suspended in (False, True):
                    monitor.suspended = suspended
                    monitor._control.alive = lambda peer: False
                    monitor.look(0.02)
                    result.append(monitor.fault)
            looked.wait(30.0)

    succeed(2, rank, 60.0)
    without, with_it = result
    assert without is None and with_it.kind == "PeerDied" and "rank 1" in with_it.text
