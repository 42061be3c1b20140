"""The programs of the call order model on real ranks of different speed: every call sums the values of its pair."""

import random
import time

import pytest
import torch
import torch.distributed as dist

from devtools.call_order_model.random_programs import random_program
from devtools.call_order_model.ranks import All, Call, Destroy, Then
from devtools.call_order_model.scenarios import PROGRAMS
from tests import ranks
from tests.c10d.bodies.groups import ROUTES, default_group


class Run:
    """Run a program on one rank: each call is an all_reduce whose values identify the call and the rank."""

    def __init__(self, program, rank, rng):
        self.program, self.rank, self.rng = program, rank, rng
        self.pause = rng.choice((0.0, 0.002, 0.01))
        names = sorted(s.name for body in program.values() for s in body if isinstance(s, Call))
        self.values = {name: float(number) for number, name in enumerate(names, 1)}
        self.tensors, self.futures = {}, {}

    def future(self, name):
        end = time.monotonic() + 30
        while name not in self.futures:  # made in another callback
            assert time.monotonic() < end, f"no rank makes {name}"
            time.sleep(0.0005)
        return self.futures[name]

    def body(self, name):
        for statement in self.program[name]:
            time.sleep(self.rng.choice((0.0, self.pause * self.rng.random())))
            if isinstance(statement, Call):
                x = self.tensors[statement.name] = torch.full((5,), self.values[statement.name] * 100**self.rank)
                self.futures[statement.name] = dist.all_reduce(x, async_op=True).get_future()
            elif isinstance(statement, Then):
                callback = statement.body
                then = self.future(statement.future).then
                self.futures[statement.child] = then(lambda _, callback=callback: self.body(callback))
            elif isinstance(statement, All):
                self.futures[statement.child] = torch.futures.collect_all([self.future(f) for f in statement.futures])
            else:
                self.future(statement.future).wait()

    def wrong(self, world_size):
        """The calls with a wrong sum."""
        self.body("main")
        for name in self.values:
            self.future(name).wait()
        factor = sum(100**rank for rank in range(world_size))
        return [
            name for name, x in self.tensors.items() if not torch.equal(x, torch.full((5,), self.values[name] * factor))
        ]


def run_programs(rank, world_size, tell, url, route, programs, seed):
    rng = random.Random(f"{seed} {rank}")
    with default_group(rank, world_size, url, route):
        return [found for program in programs if (found := Run(program, rank, rng).wrong(world_size))]


def without_destroy(programs):
    return [p for p in programs if not any(isinstance(s, Destroy) for body in p.values() for s in body)]


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("size", (2, 3))
def test_the_model_s_programs(route, size, url):
    assert ranks.run(size, run_programs, url, route, 3 * without_destroy(PROGRAMS.values()), 1) == [[]] * size


@pytest.mark.parametrize(
    ("programs", "seed"), [(20, 1), *(pytest.param(500, seed, marks=pytest.mark.soak) for seed in range(2, 6))]
)
@pytest.mark.parametrize("route", ROUTES)
def test_random_programs(route, programs, seed, url):
    made = [random_program(1000 * seed + number, calls=10, callbacks=8) for number in range(programs)]
    assert ranks.run(2, run_programs, url, route, made, seed, timeout=600.0) == [[], []]
