"""Kernels through a switch under many schedules, interpreted and compiled."""

import pytest
import torch

import tricomm
from tests.explorer.compiled import ptx_mutants
from tests.marks import some
from tricomm.explorer import shipped
from tricomm.kernels import multimem
from tricomm.kernels.collectives import registry

KERNELS = some(registry.MULTICAST, lambda number, kernel: kernel.reduces)
COMPILED = pytest.mark.skipif(multimem.why_not(90) is not None, reason="this Triton is refused multimem")


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_any_order_of_events_is_right(kernel):
    report = tricomm.check(shipped.body(kernel), 3, 4, options=shipped.options(3))
    assert report.ok, report


@COMPILED
@pytest.mark.parametrize("kernel", some(registry.MULTICAST, 9), ids=lambda kernel: kernel.name)
def test_the_compiled_form_is_right_too(kernel):
    report = ptx_mutants.explore((kernel.collective, kernel.algorithm, kernel.protocol), 2)
    assert report.ok, report


@COMPILED
def test_older_gpus_are_refused_by_name():
    with pytest.raises(tricomm.InvalidArgument, match="sm_80 has no multimem instructions"):
        tricomm.simulate(lambda comm: comm.explain("all_reduce", 64, algorithm="multicast"), 2, compiled="sm_80")


def test_what_the_switch_does_not_reduce_is_refused_by_name_and_nothing_was_sent():
    def body(comm):
        x = torch.full((5,), float(comm.rank))
        with pytest.raises(tricomm.InvalidArgument, match="the switch has no avg of float32"):
            comm.all_reduce(x, "avg", algorithm="multicast")
        assert comm.explain("all_reduce", 20, algorithm="multicast").protocol == "simple"
        return comm.all_reduce(x, algorithm="multicast")

    assert all(torch.equal(y, torch.full((5,), 3.0)) for y in tricomm.simulate(body, 3))
