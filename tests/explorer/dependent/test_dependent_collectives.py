"""Shipped kernels as dependent launches: no finding with their wait, and one if an access is before it."""

import pytest

from tests.explorer.dependent import chains
from tests.marks import compiles, some
from tricomm.core.fused.fused_call import FUSED
from tricomm.kernels.collectives import registry

KERNELS = [
    kernel
    for kernel in (*registry.KERNELS, *registry.MULTICAST, *registry.ZERO_COPY, *registry.MULTICAST_ZERO_COPY)
    if compiles(kernel)
]
KERNELS += [k for k in (*registry.of(FUSED, 2), *registry.MESSAGES) if compiles(k)]


def named(kernel):
    return kernel.name


@pytest.mark.parametrize("kernel", some(KERNELS, 4), ids=named)
def test_a_chain_of_dependent_launches_is_clean(kernel):
    found = chains.explored(kernel, 6)
    assert found.ok, found


@pytest.mark.soak
@pytest.mark.parametrize("kernel", KERNELS, ids=named)
def test_a_long_campaign_is_clean(kernel):
    found = chains.explored(kernel, 60)
    assert found.ok, found


@pytest.mark.parametrize("kernel", some(KERNELS, 4), ids=named)
def test_a_kernel_without_its_wait_is_reported(kernel):
    assert chains.kinds(kernel, chains.without_wait)


@pytest.mark.parametrize("kernel", some([k for k in KERNELS if not k.pairwise and not k.needs_cube], 6), ids=named)
def test_each_access_before_the_wait_is_reported(kernel):
    """Before the first branch. Messages, and ranks in a cube mesh, load words there that never change."""
    numbers = range(len(chains.accesses(chains.text_of(kernel))))
    missed = [number for number in numbers if not chains.kinds(kernel, chains.waiting_after(number))]
    assert not missed and (numbers or kernel.collective == "all_to_all_v")
