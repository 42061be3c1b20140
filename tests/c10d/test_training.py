"""DDP, FSDP2, DTensor, functional collectives, compiled code and custom ops over the backend."""

import shutil

import pytest

from tests import ranks
from tests.c10d.bodies import train_bodies as bodies
from tests.c10d.bodies.groups import ROUTES

HOWS = ["plain", "static", "unused", "hook", "python hook", "built-in hook"]
CASES = [
    *[(f"ddp, {how}", bodies.ddp, "gloo", how, 4) for how in HOWS],
    *[(f"ddp over the kernels, {how}", bodies.ddp, "kernels", how, 3) for how in ("plain", "hook")],
    ("ddp with uneven inputs", bodies.uneven_join),
    *[
        (f"{body.__name__}, {route}", body, route)
        for body in (bodies.fsdp2, bodies.dtensor, bodies.functionals, bodies.ops, bodies.power_sgd)
        for route in ROUTES
    ],
]
WANTED = {bodies.ddp: None, bodies.uneven_join: True, bodies.fsdp2: True, bodies.power_sgd: "same"}  # the others: []


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """What the ranks said of a case: two processes make all of them in turn, because each imports much of torch."""
    said = {}
    folder = tmp_path_factory.mktemp("training")
    folder.chmod(0o700)
    with ranks.start(2, bodies.in_turn, f"file://{folder}/store", CASES, timeout=900) as started:

        def of(name):
            while name not in said:
                (results, mine), (same, others) = (started.message(rank) for rank in range(2))
                assert results == same
                said[results] = [mine, others]
            return said[name]

        yield of


@pytest.mark.parametrize("name", [case[0] for case in CASES])
def test_in_turn(name, outcomes):
    (body,) = (case[1] for case in CASES if case[0] == name)
    assert outcomes(name) == [WANTED.get(body, [])] * 2


def test_ddp_does_not_deadlock(url):
    """The loop that hangs where one collective is inherited, or runs C++ with the GIL held."""
    assert ranks.run(2, bodies.ddp, url, "gloo", "plain", 150, timeout=200) == [None, None]


@pytest.mark.soak
@pytest.mark.parametrize("turn", range(12))
def test_ddp_does_not_deadlock_for_long(turn, url):
    assert ranks.run(3, bodies.ddp, url, "gloo", "python hook", 500, timeout=600) == [None] * 3


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.exhaustive)])
def test_compiled_whole(backend, url):
    if backend == "inductor" and shutil.which("g++") is None:
        pytest.skip("inductor needs a C++ compiler on the CPU")
    assert ranks.run(2, bodies.compiled, url, backend, timeout=250) == [[], []]


def test_distributed_checkpoint(url, tmp_path):
    assert ranks.run(2, bodies.checkpoint, url, str(tmp_path / "saved"), timeout=120) == [True, True]
