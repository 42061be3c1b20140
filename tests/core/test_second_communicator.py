"""Concurrent calls: over a second communicator of the same ranks, in another thread."""

from __future__ import annotations

import re
import time
from pathlib import Path

import torch

import tricomm
from tests import ranks
from tests.core.bodies.common_bodies import attempt, communicator
from tests.store.store_ranks import succeed
from tricomm.kernels.launch import interpreter

PAGE = Path(__file__).parents[2] / "docs" / "memory.md"


def at_once(*functions):
    """Run each function in a thread; raise the first error."""
    succeed(len(functions), lambda number: functions[number](), 80)


def numbers(rank, number, call, count):
    """Small whole numbers, different for every rank, communicator and call."""
    return (torch.arange(count, dtype=torch.float32) * 7 + 31 * rank + 17 * number + 5 * call) % 101


@ranks.each(3, [])
def test_every_collective_in_two_threads_is_exact(rank, world_size, tell, url):
    """Each rank calls the two communicators in the opposite order to the rank before it."""
    wrong = []

    def use(comm, number):
        me, n = comm.rank, comm.world_size
        for call in range(3):
            total = sum(numbers(r, number, call, 12 * n + 1) for r in range(n))
            x = torch.full((12 * n + 3,), -1.0)
            x[1:-1] = numbers(me, number, call, 12 * n + 1)
            comm.all_reduce(x[1:-1], protocol=("ll", "simple")[call % 2])
            rows = numbers(me, number, call, 12 * n)
            every = [numbers(r, number, call, 12 * n) for r in range(n)]
            whole = sum(every)
            z = rows.clone()
            comm.broadcast(z, n - 1)
            right = {
                "all_reduce": torch.equal(x[1:-1], total) and x[0] == -1 == x[-1],
                "all_gather": torch.equal(comm.all_gather(rows), torch.cat(every)),
                "reduce_scatter": torch.equal(comm.reduce_scatter(rows), whole[12 * me : 12 * me + 12]),
                "broadcast": torch.equal(z, every[-1]),
                "all_to_all": torch.equal(
                    comm.all_to_all(rows), torch.cat([part[12 * me : 12 * me + 12] for part in every])
                ),
            }
            wrong.extend((number, call, name) for name, value in right.items() if not value)

    with communicator(rank, world_size, url) as comm, comm.split(range(world_size)) as second:
        order = [(comm, 0), (second, 1)]
        at_once(*(lambda each=each: use(*each) for each in (order if rank % 2 else order[::-1])))
    return wrong


def in_another_order(rank, world_size, tell, url, turns):
    """Each rank calls a different communicator first, and then the other one while the first call waits.
    `turns`: whether a kernel that waits gives the interpreter to the other thread."""
    if not turns:
        interpreter.triton_adapter.give_way = lambda: False
    sums = [0.0, 0.0]
    try:
        with (
            communicator(rank, world_size, url, timeout=60.0 if turns else 3.0) as comm,
            comm.split(range(world_size)) as second,
        ):

            def use(number, delay):
                time.sleep(delay)
                x = torch.full((100,), float(5 + 10 * number))
                (comm, second)[number].all_reduce(x)
                sums[number] = x[0].item()

            at_once(lambda: use(rank, 0.0), lambda: use(1 - rank, 0.3))
    except tricomm.TricommError as error:
        return f"{type(error).__name__}: {error}"
    return sums


def test_two_communicators_used_in_another_order_on_every_rank_both_progress(url):
    assert ranks.run(2, in_another_order, url, True) == [[10.0, 30.0]] * 2


def test_without_interleaving_in_the_interpreter_they_deadlock(url):
    outcomes = ranks.run(2, in_another_order, url, False)
    assert any("CollectiveTimeout" in str(o) for o in outcomes), outcomes


def one_is_lost(rank, world_size, tell, url):
    with communicator(rank, world_size, url) as comm, comm.split(range(world_size)) as second:
        kind, text, _ = attempt(lambda: second.all_reduce(torch.ones(8 + rank)))
        x = torch.ones(4)
        comm.all_reduce(x)
        return kind, text, x[0].item()


def test_a_fault_of_one_communicator_does_not_affect_the_other(url):
    for kind, text, total in ranks.run(2, one_is_lost, url):
        assert kind == "CollectiveMismatch" and "count=8" in text and "count=9" in text
        assert total == 2.0


def as_documented(rank, world_size, tell, url, example):
    with communicator(rank, world_size, url) as comm:
        names = {"comm": comm, "torch": torch, "other": None}
        names |= {"x": torch.full((2,), rank + 1.0), "y": torch.full((2,), rank + 1.0)}
        exec(example, names)
        names["second"].close()
        return names["x"].tolist(), names["z"].tolist()


def test_the_page_on_second_communicators_is_right(url):
    [example] = re.findall(r"```python\n(second = .*?)```", PAGE.read_text(), re.DOTALL)
    assert ranks.run(2, as_documented, url, example) == [([3.0, 3.0], [1.0, 1.0, 2.0, 2.0])] * 2
