"""DDP, FSDP2, DTensor, functional collectives, compiled code and custom ops over the backend."""

import shutil

import pytest

from tests import ranks
from tests.c10d import train_bodies as bodies
from tests.c10d.groups import ROUTES


@pytest.fixture
def url(tmp_path):
    tmp_path.chmod(0o700)
    return f"file://{tmp_path}/store"


HOWS = ["plain", "static", "unused", "hook", "python hook", "built-in hook"]


@pytest.mark.parametrize("how", HOWS)
def test_ddp(how, url):
    assert ranks.run(2, bodies.ddp, url, "gloo", how, 4, timeout=120) == [None, None]


@pytest.mark.parametrize("how", ["plain", "hook"])
def test_ddp_over_the_kernels(how, url):
    assert ranks.run(2, bodies.ddp, url, "kernels", how, 3, timeout=120) == [None, None]


def test_ddp_does_not_deadlock(url):
    """The loop that hangs where one collective is inherited, or runs C++ with the GIL held."""
    assert ranks.run(2, bodies.ddp, url, "gloo", "plain", 150, timeout=200) == [None, None]


@pytest.mark.soak
@pytest.mark.parametrize("turn", range(12))
def test_ddp_does_not_deadlock_for_long(turn, url):
    assert ranks.run(3, bodies.ddp, url, "gloo", "python hook", 500, timeout=600) == [None] * 3


def test_ddp_with_uneven_inputs(url):
    assert ranks.run(2, bodies.uneven_join, url, timeout=120) == [True, True]


@pytest.mark.parametrize("route", ROUTES)
def test_fsdp2(route, url):
    assert ranks.run(2, bodies.fsdp2, url, route, timeout=120) == [True, True]


@pytest.mark.parametrize("route", ROUTES)
def test_dtensor(route, url):
    assert ranks.run(2, bodies.dtensor, url, route, timeout=120) == [[], []]


@pytest.mark.parametrize("route", ROUTES)
def test_functional_collectives(route, url):
    assert ranks.run(2, bodies.functionals, url, route, timeout=120) == [[], []]


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_whole(backend, url):
    if backend == "inductor" and shutil.which("g++") is None:
        pytest.skip("inductor needs a C++ compiler on the CPU")
    assert ranks.run(2, bodies.compiled, url, backend, timeout=250) == [[], []]


@pytest.mark.parametrize("route", ROUTES)
def test_ops(route, url):
    assert ranks.run(2, bodies.ops, url, route, timeout=120) == [[], []]


def test_distributed_checkpoint(url, tmp_path):
    assert ranks.run(2, bodies.checkpoint, url, str(tmp_path / "saved"), timeout=120) == [True, True]


@pytest.mark.parametrize("route", ROUTES)
def test_power_sgd(route, url):
    """Callbacks that make calls have an order that all ranks share."""
    assert ranks.run(2, bodies.power_sgd, url, route, timeout=120) == ["same", "same"]
