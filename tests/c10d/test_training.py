"""DDP, DTensor, functional collectives, compiled code and custom ops over the backend."""

import shutil
import subprocess
import sys
import weakref
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from tests import ranks
from tests.c10d.bodies import compiled_bodies
from tests.c10d.bodies import train_bodies as bodies
from tests.c10d.bodies.groups import ROUTES
from tricomm.c10d import group_over
from tricomm.c10d.work_handles import FinishedWork

HOWS = ["plain", "static", "unused", "hook", "python hook", "built-in hook"]
CASES = [
    *[(f"ddp, {how}", bodies.ddp, "gloo", how, 4) for how in HOWS],
    *[(f"ddp over the kernels, {how}", bodies.ddp, "kernels", how, 3) for how in ("plain", "hook")],
    ("ddp with uneven inputs", bodies.uneven_join),
    ("ddp with uneven inputs, averaged over the ranks that still have some", bodies.uneven_join, False),
    *[
        (f"{body.__name__}, {route}", body, route)
        for body in (bodies.dtensor, bodies.functionals, bodies.ops)
        for route in ROUTES
    ],
]
WANTED = {bodies.ddp: None, bodies.uneven_join: True}  # the others: []


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """Look up a case's results by its name. Two processes run all cases in turn, because importing torch takes long."""
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


def keeps_the_handle(set_handle):
    """Whether a reducer keeps the Python half of the handle that `set_handle` passes to it; C++ keeps the other one."""
    group = group_over(dist.HashStore(), 0, 1, timedelta(seconds=60))
    reducer = dist.Reducer([torch.nn.Parameter(torch.ones(1))], [[0]], [1 << 20], group)
    work = FinishedWork([])
    alive = weakref.ref(work)
    set_handle(reducer, work, False)
    del work
    kept = alive() is not None
    del reducer
    assert alive() is None
    group.shutdown()
    return kept


def test_a_reducer_keeps_the_handle_of_join_as_long_as_it_lives():
    assert keeps_the_handle(dist.Reducer._set_forward_pass_work_handle)


def test_without_the_wrapper_it_would_wait_for_a_handle_that_is_freed():
    assert not keeps_the_handle(dist.Reducer._set_forward_pass_work_handle.__wrapped__)


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


# Every call and every way to compile DDP and FSDP2

FEW = ["all_reduce async", "broadcast", "batch_isend_irecv", "barrier", "ddp", "fsdp2"]  # Dynamo sees no route
COMPILED = [
    pytest.param("tricomm", "gloo", "eager", None, id="all"),
    pytest.param("tricomm", "kernels", "eager", FEW, id="kernels"),
    *[
        pytest.param(backend, route, compiler, None, id=f"{backend}-{route}-{compiler}", marks=pytest.mark.exhaustive)
        for backend, route, compiler in [
            ("gloo", "gloo", "eager"),
            ("tricomm", "kernels", "eager"),
            ("tricomm", "gloo", "aot_eager"),
            ("tricomm", "gloo", "inductor"),
        ]
    ],
]


@pytest.fixture(scope="module")
def wanted(tmp_path_factory):
    """The results of plain Gloo without a compiler."""
    folder = tmp_path_factory.mktemp("plain")
    folder.chmod(0o700)
    return ranks.run(2, compiled_bodies.table, f"file://{folder}/store", "gloo", "gloo", None, None)


@pytest.mark.parametrize(("backend", "route", "compiler", "only"), COMPILED)
def test_compiled_code_gives_the_results_of_plain_gloo(backend, route, compiler, only, url, wanted):
    if compiler == "inductor" and shutil.which("g++") is None:
        pytest.skip("inductor needs a C++ compiler on the CPU")
    found = ranks.run(2, compiled_bodies.table, url, backend, route, compiler, only, timeout=500)
    for said, want in zip(found, wanted, strict=True):
        assert [(name, got) for name, got in said.items() if got != want[name]] == []
        assert sorted(said) == sorted(only or want)


@pytest.mark.skipif(torch.__version__ < "2.13", reason="Dynamo of older versions traces a barrier without an error")
@pytest.mark.parametrize("route", ["gloo", pytest.param("kernels", marks=pytest.mark.exhaustive)])
def test_the_group_still_works_after_an_error_of_dynamo(route, url):
    """Without the rule Dynamo traces into the backend, and raises its own error from the middle of a call."""
    for error, after in ranks.run(2, compiled_bodies.traced, url, "tricomm", route):
        assert error == "InternalTorchDynamoError" and after == [3.0] * 4


def test_the_group_still_works_after_errors_before_a_call_is_sent(url):
    for found in ranks.run(2, compiled_bodies.fails_early, url, "tricomm", "gloo"):
        errors = {"a dispatch mode": "RuntimeError", "too large": "InvalidArgument", "of one rank": "RuntimeError"}
        assert found == {name: (error, [3.0] * 4) for name, error in errors.items()}


def test_dynamo_does_not_trace_into_the_backend_although_tricomm_does_not_import_it():
    script = """
import tricomm, sys, torch
assert "torch._dynamo" not in sys.modules and hasattr(torch.distributed.Backend, "TRICOMM")
import torch._dynamo.trace_rules as rules
from tricomm.engines import vllm_communicator
modules = tricomm.c10d.process_group, tricomm.communicator, tricomm.kernels, vllm_communicator
assert [rules.check_file(module.__file__).skipped for module in modules] == [True, True, True, False]
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
