"""Groups of every kind, and every way to begin."""

import os
import socket

import pytest

from tests import forked, ranks
from tests.c10d.bodies import group_bodies as bodies
from tests.c10d.bodies.groups import ROUTES


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


@pytest.mark.parametrize("route", ROUTES)
def test_many_groups(route, url):
    assert ranks.run(4, bodies.many, url, route, timeout=200) == [[]] * 4


def test_destroyed_and_made_again(url):
    assert ranks.run(2, bodies.again, url) == [True, True]


@pytest.mark.parametrize("route", ROUTES)
def test_device_mesh(route, url):
    assert ranks.run(4, bodies.mesh, url, route) == [(2.0, 1.0), (4.0, 1.0), (2.0, 5.0), (4.0, 5.0)]


@pytest.mark.parametrize("how", ["env", "tcp", "file", "store"])
def test_ways_to_begin(how, tmp_path):
    where = str(tmp_path / "store") if how == "file" else free_port()
    assert ranks.run(2, bodies.begins, how, where) == [3.0, 3.0]


def test_two_jobs_and_a_group_across_them():
    results = ranks.run(4, bodies.crosses_jobs, [free_port() for _ in range(3)], timeout=120)
    assert results == [(10.0, 10.0, inside, [0.0, 1.0, 2.0, 3.0]) for inside in (3.0, 3.0, 7.0, 7.0)]


@pytest.mark.parametrize("route", ROUTES)
def test_wrap(route, url):
    assert ranks.run(2, bodies.wrapped, url, route) == [[], []]


def test_a_group_answers_as_gloo_does(url):
    answers = ranks.run(2, bodies.answers, url, "tricomm")
    assert answers == ranks.run(2, bodies.answers, f"{url}2", "gloo") and answers[0]["numbers"] == [4, 4]


def test_each_device_has_its_own_backend(url):
    assert ranks.run(2, bodies.two_devices, url) == [(True, True)] * 2


def torchrun(tmp_path, job, *options):
    """Run the text `job` on two ranks."""
    script = tmp_path / "job.py"
    script.write_text(job)
    command = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", free_port(), *options]
    env = {**os.environ, "PYTHONPATH": forked.python_path(), "OMP_NUM_THREADS": "1"}
    return forked.script(*command, str(script), timeout=200, env=env)


SUM = """
import os, sys, torch, torch.distributed as dist, tricomm
dist.init_process_group("tricomm")
for turn in range(3):
    x = torch.ones(2)
    dist.all_reduce(x)
    if turn == 1 and dist.get_rank() == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] in sys.argv[1:]:
        os._exit(3)
print(f"sum {x[0].item()}\\n", end="", flush=True)
dist.destroy_process_group()
"""


@pytest.mark.exhaustive  # as an example does
def test_torchrun(tmp_path):
    done = torchrun(tmp_path, SUM)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("sum 2.0") == 2


@pytest.mark.soak
def test_a_job_that_torchrun_restarts_meets_again_over_the_same_store(tmp_path):
    job = SUM.replace("sys.argv[1:]", "['0', '1']")
    done = torchrun(tmp_path, job, "--max-restarts", "2")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("sum 2.0") == 2  # of the third attempt alone
    assert torchrun(tmp_path, job, "--max-restarts", "1").returncode != 0


@pytest.mark.soak
def test_five_hundred_new_groups_leave_nothing(url):
    for before, after in ranks.run(2, bodies.loops, url, 500, timeout=300):
        assert before == after


@pytest.mark.parametrize("route", ROUTES)
def test_memory_goes_and_comes_back(route, url):
    assert ranks.run(2, bodies.sleeps, url, route) == [[], []]
