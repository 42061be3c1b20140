"""Uneven rows whose lengths change with every call: exact, and without more host work than even ones."""

from __future__ import annotations

import random
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest
import torch
from torch._C._distributed_c10d import HashStore

import tricomm
from tests.core.bodies.common_bodies import over
from tests.core.operations import Operations
from tests.kernels.fake_launch import FakeGpu
from tricomm import Communicator
from tricomm.core import launch_plan, planner
from tricomm.core.group import Runtime
from tricomm.kernels import layout
from tricomm.kernels.launch import compiler, cuda_launcher
from tricomm.options import Tuning

SMALL = tricomm.Options(arena_bytes=128 << 10, _tuning=Tuning(blocks=2, tile=32))
PROTOCOLS = ("ll", "simple")


def lengths(world_size: int, number: int) -> list[list[int]]:
    """At [s][d] the number of rows that rank s sends to rank d in call `number`: none, few, more than a chunk."""
    draw = random.Random(number)
    return [[draw.choice((0, 0, 1, 2, 5, 37, 200)) for _ in range(world_size)] for _ in range(world_size)]


def sent(rank: int, to: int, number: int, rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    first = 7 * rank + 13 * to + 29 * number
    return ((torch.arange(rows * width) + first) % 101).view(rows, width).to(dtype)


@pytest.mark.parametrize("world_size", [2, 3, pytest.param(8, marks=pytest.mark.soak)])
def test_lengths_that_change_with_every_call_are_right_and_share_one_plan(world_size):
    def body(comm):
        wrong = []
        for number in range(8):
            rows, protocol = lengths(world_size, number), PROTOCOLS[number % 2]
            dtype, width = ((torch.int8, 3), (torch.float32, 5))[number // 2 % 2]
            into, takes = rows[comm.rank], [row[comm.rank] for row in rows]
            x = torch.cat([sent(comm.rank, to, number, n, width, dtype) for to, n in enumerate(into)])
            y = torch.full((sum(takes), width), -99, dtype=dtype)
            want = torch.cat([sent(r, comm.rank, number, n, width, dtype) for r, n in enumerate(takes)])
            comm.all_to_all_v(x, into, takes, y, protocol=protocol)
            wrong += [] if torch.equal(y, want) else [(number, rows)]
        return wrong, len(comm._planner.plans), {s.collective for s in comm.stats().calls}

    for wrong, plans, called in tricomm.simulate(body, world_size, options=SMALL):
        # One for each type and protocol, and two where an address is no multiple of 16: tensors may begin anywhere.
        assert wrong == [] and 4 <= plans <= 8 and called == {"all_to_all_v"}


class FakeRuntime(Runtime):
    """Ranks whose kernels are compiled for a fake GPU that records its launches."""

    def __init__(self, gpu):
        self.fake = gpu

    def bind(self, kernel, blocks, constexprs, bits, aligned, more, group, timeout):
        gpu = {**constexprs, **compiler.COMPILE_OPTIONS, "LANES": 256, "PTX": True, "BLOCK": 512}
        return cuda_launcher.make_launcher(kernel, blocks, gpu, bits, aligned, more, group, self.fake)


@pytest.fixture(scope="module")
def device():
    return FakeGpu("fake of test_uneven")


@pytest.fixture
def comm(device):
    """Rank 0 of two, over a GPU that launches nothing; rank 1 makes no calls."""
    device.launches.clear()
    store, options = HashStore(), tricomm.Options(arena_bytes=1 << 20, timeout=60.0)

    def join(rank):
        return over(FakeRuntime(device), store, rank, 2, options)

    with ThreadPoolExecutor(2) as ranks, ExitStack() as undo:
        comms = list(ranks.map(join, range(2)))
        undo.callback(lambda: list(ranks.map(Communicator.close, comms)))
        yield comms[0]


X, Y = torch.zeros(64, 4), torch.zeros(64, 4)


def words(launch):
    """(x, y, elements of a row, rows to each rank, rows from each rank) of a launch for two ranks."""
    x, y, numel, _, *rows = (*launch.words[:2], *launch.words[2 + layout.group_words(2) :][:6])
    return x, y, numel, tuple(rows[:2]), tuple(rows[2:])


def test_a_call_with_other_lengths_makes_no_plan_and_no_memory_and_no_copy(comm, device, monkeypatch):
    made, make = [], launch_plan.make
    monkeypatch.setattr(launch_plan, "make", lambda *facts: made.append(facts) or make(*facts))
    want, operations = [], Operations()
    for number in range(50):
        own, goes, comes = 1 + number % 3, number % 7, 11 * number % 13
        x, y = X[: own + goes], Y[: own + comes]
        with operations:
            comm.all_to_all_v(x, [own, goes], [own, comes], y)
        want.append((X.data_ptr(), Y.data_ptr(), 4, (own, goes), (own, comes)))
    assert [words(launch) for launch in device.launches] == want
    assert len(made) == 1 and len(comm._planner.plans) == 1 and operations.seen == []
    with operations:  # they record the copy of a tensor that is not contiguous
        comm.all_to_all_v(torch.zeros(4, 6).t(), [3, 3], [3, 1])
    assert operations.seen != []


def test_lengths_do_not_evict_cached_plans(comm, monkeypatch):
    monkeypatch.setattr(planner, "_MOST_PLANS", 3)
    comm.all_reduce(X[0])
    (kept,) = comm._planner.plans.values()
    for number in range(9):
        comm.all_to_all_v(X[:number], [0, number], [0, 9 - number], Y[: 9 - number])
    assert kept in comm._planner.plans.values() and len(comm._planner.plans) == 2


def test_bytes_and_times_are_those_of_each_call(comm):
    comm.time_calls(2)
    for rows in (1, 2, 64, 3):
        comm.all_to_all_v(X[:rows], [0, rows], [0, 0], Y[:0])
    result = comm.stats()
    assert {c.bucket: (c.calls, c.nbytes, c.timed) for c in result.calls} == {
        16: (1, 16, 1),
        32: (1, 32, 0),
        1024: (1, 1024, 1),
        64: (1, 48, 0),
    }
    assert [span.nbytes for span in result.spans] == [16, 1024]


def test_lengths_are_kept_apart_by_stream_and_graph(comm, device, monkeypatch):
    """A graph keeps the parameters of its capture by value, so later calls do not change them."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    comm._group.simulated = False
    comm._planner.plan(launch_plan.Request("all_to_all_v"), torch.float32, 4, True)
    comm._group.simulated = True
    modes = {made.mode: made for made in comm._planner.plans.values()}
    assert set(modes) == {"eager", "graph"} and modes["eager"].fingerprint != modes["graph"].fingerprint
    want = []
    for raw, mode, rows in ((7, "graph", 5), (7, "graph", 6), (9, "eager", 1), (11, "eager", 2), (7, "graph", 0)):
        device.raw = raw
        modes[mode].run(X, Y, 4, 1, ((1, rows), (1, rows + 3)))
        want.append((raw, (1, rows), (1, rows + 3)))
    device.raw = 0
    assert [(launch.stream, *words(launch)[3:]) for launch in device.launches] == want


def test_lengths_are_kept_apart_by_thread(comm, device, monkeypatch):
    """The second thread calls after the first has packed its parameters and before it launches."""
    first, second = ((1, 2), (1, 4)), ((5, 6), (5, 8))
    others, ways = [], [comm.all_to_all_v]

    def call(rows):
        ways[-1](X[: sum(rows[0])], *rows, Y[: sum(rows[1])])

    def between():
        if others == [None]:
            others[0] = threading.Thread(target=call, args=(second,))
            others[0].start()
            others[0].join(0.2)
        return 0

    monkeypatch.setattr(device, "stream", between)  # called after the parameters are packed
    call(first)  # makes the plan
    (chosen,) = comm._planner.plans.values()
    for want in ([first, second], [second, second]):
        device.launches.clear()
        others[:] = [None]
        call(first)
        others[0].join()
        assert [words(launch)[3:] for launch in device.launches] == want
        ways.append(lambda x, into, takes, y: chosen.run(x, y, 4, 1, (into, takes)))  # without taking turns
