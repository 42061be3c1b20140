"""The calls of vLLM's adapter find their kernels in the set of `tricomm compile --for vllm`, without a compiler."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch

from tests.core.bodies.common_bodies import communicator
from tests.engines.test_vllm_fakes import LOG, _made, _pretending
from tests.perf.machine_code.test_prebuild import _form_of
from tricomm.core import cubins, machine_code
from tricomm.core.cubins import Metadata, Prebuilt
from tricomm.engines.engine_group import Engine
from tricomm.errors import ResourceError
from tricomm.kernels import collective_specs
from tricomm.kernels.launch import compiler
from tricomm.perf.machine_code import prebuild
from tricomm.perf.machine_code.prebuild import Order

# Of one type of those that are reduced, and of the widths of the others.
ORDER = Order("sm_90", 8, "vllm", dtypes=("bfloat16", "uint8", "int64"))
# Tokens times hidden size: decode and prefill, an odd count, and up to the adapter's largest call of 8 MiB.
SHAPES = ((1, 7), (1, 128), (1, 4096), (3, 4097), (16, 5120), (64, 8192), (256, 8192), (512, 4096))
CALLS = [("all_reduce",), *product(("all_gather", "reduce_scatter"), (0, -1))]


@pytest.fixture(scope="module")
def planned(tmp_path_factory):
    """The requests that the adapter's calls make to the planner: (request, whether the tensors are aligned)."""
    group, _ = _pretending(Engine("vLLM", LOG))
    adapter = _made()(object(), torch.device("cpu"), unique_name="tp:0")
    adapter.tricomm, asked = group, {}
    with communicator(0, 1, f"file://{tmp_path_factory.mktemp('store') / 'store'}") as group.comm:
        planner = group.comm._internal.planner
        plan = planner.plan

        def record(request, dtype, elements, aligned):
            asked[request.sized(dtype, elements), aligned] = None
            return plan(request, dtype, elements, aligned)

        planner.plan = record
        for shape, (collective, *dim) in product(SHAPES, CALLS):
            getattr(adapter, collective)(torch.ones(shape, dtype=torch.bfloat16), *dim)
        for dtype in (torch.uint8, torch.int64, torch.float8_e4m3fn):
            adapter.all_gather(torch.ones((8, 16)).to(dtype), 0)
        group.comm = None
    assert adapter.own == [], "the adapter has left a call to vLLM"
    return tuple(asked)


@pytest.fixture
def prebuilt(monkeypatch):
    """Takes the compiler away; a kernel is found if the set that is returned has its key."""
    keys = {key for key, _ in prebuild.ordered(ORDER)}

    def find(name, key, capability):
        return Prebuilt({"cubin": b""}, Metadata(name, 8, 64)) if key in keys else None

    monkeypatch.setattr(cubins, "find", find)
    monkeypatch.setattr(compiler, "compile_kernel", lambda *given: pytest.fail("something is compiled"))
    return keys


def launch(request, aligned, site, mode):
    rows = collective_specs.COLLECTIVES[request.collective].rows_in(ORDER.world_size)
    nbytes = rows * request.elements * request.dtype.itemsize
    kernel, constexprs, bits, aligned = _form_of(site, request, nbytes, mode, aligned)
    return machine_code.get(kernel, dict(constexprs), bits, aligned, ORDER.capability, refused="a test refuses it")


def test_every_call_of_the_adapter_finds_its_kernel(planned, prebuilt):
    assert {request.collective for request, _ in planned} == {"all_reduce", "all_gather", "reduce_scatter"}
    assert {aligned for _, aligned in planned} == {False, True}
    sites = [site for site in ORDER.sites() if not site.topology]
    for (request, aligned), site, mode in product(planned, sites, ("eager", "graph")):
        assert launch(request, aligned, site, mode).metadata is not None


def test_without_the_calls_of_a_collective_one_would_be_compiled(planned, prebuilt):
    prebuilt -= {key for key, _ in prebuild.ordered(replace(ORDER, collectives=("reduce_scatter",)))}
    request, aligned = next(each for each in planned if each[0].collective == "reduce_scatter")
    with pytest.raises(ResourceError, match="reduce_scatter_one_shot for sm_90 would have to be compiled"):
        launch(request, aligned, next(ORDER.sites()), "graph")
