"""NVLS kernels under many schedules, interpreted and compiled."""

import re

import pytest
import torch

import tricomm
from tests.explorer.compiled import ptx_mutants
from tests.marks import some
from tricomm.explorer import shipped
from tricomm.kernels import multimem
from tricomm.kernels.collectives import registry

KERNELS = some(registry.MULTICAST, lambda number, kernel: kernel.reduces)
ALL_REDUCE = "all_reduce", "multicast", "simple"
_FENCE = re.compile(r"@p fence\.proxy\.alias;")
COMPILED = pytest.mark.skipif(multimem.why_not(90) is not None, reason="this Triton is refused multimem")


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_any_order_of_events_is_right(kernel):
    report = tricomm.check(shipped.body(kernel), 3, 4, options=shipped.options(3))
    assert report.ok, report


@COMPILED
@pytest.mark.parametrize("kernel", some(registry.MULTICAST, 9), ids=lambda kernel: kernel.name)
def test_the_compiled_form_is_exact(kernel):
    report = ptx_mutants.explore((kernel.collective, kernel.algorithm, kernel.protocol), 2)
    assert report.ok, report


@COMPILED
@pytest.mark.parametrize("kernel", some(registry.MULTICAST, 9), ids=lambda kernel: kernel.name)
def test_the_alias_fence_of_the_barriers_is_needed(kernel):
    """Three or more chunks, so that a mailbox is reused within the call, and two blocks."""
    key, name = (kernel.collective, kernel.algorithm, kernel.protocol), kernel.function.__name__
    settings = {"sizes": (1600,), "blocks": 2}
    text = ptx_mutants.text_of(key, sizes=(1600,), blocks=2)
    assert len(_FENCE.findall(text)) == 1 and text.count("fence.proxy") == 1
    assert ptx_mutants.explore(key, 2, **settings).ok
    with ptx_mutants.changed("no alias fence", lambda code: _FENCE.sub("", code), name):
        report = ptx_mutants.explore(key, 1, **settings)
    assert report.findings and all("put fence.proxy.alias" in finding.advice for finding in report.findings), report


MISTAKES = {
    "the header before the stage is complete": lambda text: text.replace("st.release.sys", "st.relaxed.sys"),
    "no acquire after the headers": lambda text: text.replace("ld.acquire.sys", "ld.relaxed.sys"),
    "the sum of another word": lambda text: re.sub(r"(ld_reduce\S* b, \[%rd\d+ \+ )8", r"\g<1>24", text),
}


@COMPILED
@pytest.mark.parametrize("name", some(MISTAKES, 2))
def test_mistakes_in_the_compiled_form_are_seen(name):
    with ptx_mutants.changed(name, MISTAKES[name], "all_reduce_multicast"):
        report = ptx_mutants.explore(ALL_REDUCE, 4)
    assert {finding.kind for finding in report.findings} & {"race", "wrong_result"}, report


@COMPILED
def test_older_gpus_are_refused_by_name():
    with pytest.raises(tricomm.InvalidArgument, match="sm_80 has no multimem instructions"):
        tricomm.simulate(lambda comm: comm.explain("all_reduce", 64, algorithm="multicast"), 2, compiled="sm_80")


def test_reductions_that_nvls_lacks_are_refused_by_name_before_anything_is_sent():
    def body(comm):
        x = torch.full((5,), float(comm.rank))
        with pytest.raises(tricomm.InvalidArgument, match="the switch has no avg of float32"):
            comm.all_reduce(x, "avg", algorithm="multicast")
        assert comm.explain("all_reduce", 20, algorithm="multicast").protocol == "simple"
        return comm.all_reduce(x, algorithm="multicast")

    assert all(torch.equal(y, torch.full((5,), 3.0)) for y in tricomm.simulate(body, 3))
