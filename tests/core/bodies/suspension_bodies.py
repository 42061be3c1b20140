"""Ranks that give their memory back and take it again."""

from __future__ import annotations

import ctypes
import gc
import os
import time

import torch

from tests.core.bodies.common_bodies import communicator, leftovers
from tests.ranks import together
from tricomm.errors import ResourceError, TricommError
from tricomm.store.segments import Segment

_libc = ctypes.CDLL(None, use_errno=True)


def resident(address, nbytes):
    """Pages of a mapping that the system holds for any process."""
    pages = -(-nbytes // 4096)
    there = (ctypes.c_ubyte * pages)()
    assert _libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), there) == 0
    return sum(page & 1 for page in there)


def _right(comm, turn):
    """What is wrong with calls of every kind, with numbers that differ by rank and turn."""
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


def _forked(comm):
    """The exit code of a child that tries to resume its parent's communicator: 0 if that is refused by name."""
    pid = os.fork()
    if pid == 0:
        os._exit(0 if "forked into" in refused(comm.resume) else 1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def refused(action):
    try:
        action()
    except TricommError as error:
        return f"{type(error).__name__}: {error}"
    return "not refused"


def and_left(rank, world_size, tell, body, *args):
    """What a body of this module gives, and what is left in the process after it."""
    before = leftovers()
    value = body(rank, world_size, tell, *args)
    gc.collect()
    after = leftovers()
    return value, {name: sorted(after[name] - before[name]) for name in ("fds", "maps", "threads")}


def round_trip(rank, world_size, tell, url, turns):
    """Suspended and resumed `turns` times: what is wrong, what every call says meanwhile, pages before and after."""
    with communicator(rank, world_size, url) as comm:
        w = comm.symmetric((100,), torch.float32)
        gone = comm.symmetric((5,), torch.float32)
        gone.close()
        facts = comm._internal.peer_ranges, w.local.data_ptr(), w.table.tolist(), comm.group_table.tolist()[:8]
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
            "unread": comm._internal.unread,
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
            results["pages"].append(resident(*comm._internal.peer_ranges[rank]))
            sequence = comm._launcher.sequence
            comm.suspend()
            assert comm.suspended
            results["said"] = {name: refused(call) for name, call in calls.items()}
            results["explained"] = comm.explain("all_reduce", nbytes=4000).reason
            results["stats"].append(comm.stats().memory)
            time.sleep(0.05)
            results["pages"].append(sum(resident(*memory) for memory in comm._internal.peer_ranges))
            results["forked"] = _forked(comm)
            assert comm._launcher.sequence == sequence
            comm.resume()
            assert not comm.suspended
            results["stats"].append(comm.stats().memory)
            if (
                comm._internal.peer_ranges,
                w.local.data_ptr(),
                w.table.tolist(),
                comm.group_table.tolist()[:8],
            ) != facts:
                results["wrong"].append(("addresses", turn))
            results["wrong"] += [] if not w.local.any() else [("contents", turn)]
        results["wrong"] += _right(comm, 99)
    return results


def one_dies(rank, world_size, tell, url, victim):
    """The victim is killed while all sleep; what the others are told without a call, by calls, and how soon."""
    with communicator(rank, world_size, url) as comm:
        comm.all_reduce(torch.ones(10))
        comm.suspend()
        tell(os.getpid())
        if rank == victim:
            time.sleep(60)
        noticed = refused_within(comm.check, 20.0)
        texts = [refused(comm.resume), refused(lambda: comm.all_reduce(torch.ones(3)))]
    return noticed, time.monotonic(), texts


def refused_within(action, seconds):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        said = refused(action)
        if said != "not refused":
            return said
        time.sleep(0.01)
    return "not refused"


def dies_in(rank, world_size, tell, url, where):
    """The last rank dies at a step of suspend or resume; the others' errors, and what is left."""
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


def refuse_once(where):
    """The system refuses the next step `where` of a segment."""
    usual, left = getattr(Segment, where), [1]

    def once(self):
        if left and self.nbytes > 8192 and left.pop():
            raise ResourceError("madvise: made to fail")
        usual(self)

    setattr(Segment, where, once)


def memory_refused(rank, world_size, tell, url, where, victim):
    """A system call is refused on one rank at a step: what is raised, and that the group works on."""
    with communicator(rank, world_size, url) as comm:
        w = comm.symmetric((10,), torch.int64)
        texts = []
        if rank == victim:
            refuse_once(where)
        texts.append(refused(comm.suspend))
        state = comm.suspended
        if state:
            texts.append(refused(comm.resume))
            end = time.monotonic() + 10.0  # the other rank gives its own back after the ranks have agreed
            ranges = comm._internal.peer_ranges
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


def bad_moments(rank, world_size, tell, url):
    """A message that is not received yet, handles closed on one rank, another call on another rank."""
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


def beside_a_message(rank, world_size, tell, url):
    """Rank 0 suspends while rank 1 waits for a message; what each is told."""
    with communicator(rank, world_size, url, timeout=60.0) as comm:
        comm.barrier()
        if rank:
            return refused(lambda: comm.recv(torch.zeros(5), 0, tag=7))
        end = time.monotonic() + 30.0
        while not comm._messages.running(1) and time.monotonic() < end:
            time.sleep(0.005)
        comm._group.timeout = 0.3  # before the time of the receiver is over
        return refused(comm.suspend)
