"""torch.compile over the backend: every call and every way to compile DDP and FSDP2 gives what plain Gloo gives."""

import shutil
import subprocess
import sys

import pytest

from tests import ranks
from tests.c10d.bodies import compiled_bodies as bodies

FEW = ["all_reduce async", "broadcast", "batch_isend_irecv", "barrier", "ddp", "fsdp2"]  # Dynamo sees no route
CASES = [
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
    return ranks.run(2, bodies.table, f"file://{folder}/store", "gloo", "gloo", None, None)


@pytest.mark.parametrize(("backend", "route", "compiler", "only"), CASES)
def test_compiled_code_gives_what_plain_gloo_gives(backend, route, compiler, only, url, wanted):
    if compiler == "inductor" and shutil.which("g++") is None:
        pytest.skip("inductor needs a C++ compiler on the CPU")
    found = ranks.run(2, bodies.table, url, backend, route, compiler, only, timeout=500)
    for said, want in zip(found, wanted, strict=True):
        assert [(name, got) for name, got in said.items() if got != want[name]] == []
        assert sorted(said) == sorted(only or want)


@pytest.mark.parametrize("route", ["gloo", pytest.param("kernels", marks=pytest.mark.exhaustive)])
def test_an_error_of_dynamo_costs_nobody_the_group(route, url):
    """Without the rule Dynamo traces into the backend, and raises its own error from the middle of a call."""
    for error, after in ranks.run(2, bodies.traced, url, "tricomm", route):
        assert error == "InternalTorchDynamoError" and after == [3.0] * 4


def test_errors_before_a_call_is_sent_cost_nobody_the_group(url):
    for found in ranks.run(2, bodies.fails_early, url, "tricomm", "gloo"):
        assert found == {name: ("RuntimeError", [3.0] * 4) for name in [*bodies.EARLY, "of one rank"]}


def test_dynamo_is_kept_out_though_tricomm_does_not_import_it():
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
