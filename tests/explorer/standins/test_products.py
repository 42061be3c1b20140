"""A matrix product whose kernel also sums its parts over the ranks, like public fused kernels."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
import triton
import triton.language as tl

import tricomm
from tests.explorer.standins.all_reduces import barrier

SIZE = 32


@triton.jit
def product_kernel(
    x, y, peers, pads, out, RANK: tl.constexpr, WORLD_SIZE: tl.constexpr, SIZE: tl.constexpr, SAFE: tl.constexpr
):
    places = tl.arange(0, SIZE)[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    tl.store(peers[RANK] + places, tl.dot(tl.load(x + places), tl.load(y + places)))
    barrier(pads, RANK, WORLD_SIZE, SAFE, True)
    total = tl.zeros([SIZE, SIZE], tl.float32)
    for peer in tl.static_range(WORLD_SIZE):
        total += tl.load(peers[peer] + places)
    tl.store(out + places, total)
    barrier(pads, RANK, WORLD_SIZE, True, False)


def program(safe):
    def body():
        rank, size = dist.get_rank(), dist.get_world_size()
        part = symm_mem.empty(SIZE, SIZE, dtype=torch.float32, device="cuda")
        handle = symm_mem.rendezvous(part, dist.group.WORLD)
        peers = tuple(handle.get_buffer(peer, (SIZE, SIZE), part.dtype) for peer in range(size))
        x = (torch.arange(SIZE * SIZE, device="cuda").reshape(SIZE, SIZE) % 13 - 6).bfloat16()
        for call in (1, 2):
            y, out = (x.T * call).contiguous(), torch.full((SIZE, SIZE), float("nan"), device="cuda")
            mine, pads = (x * (rank + 1)).contiguous(), handle.signal_pad_ptrs_dev
            product_kernel[(1,)](mine, y, peers, pads, out, rank, size, SIZE=SIZE, SAFE=safe)
            assert torch.equal(out, x.float() @ y.float() * sum(range(1, size + 1)))

    return body


@pytest.mark.parametrize(("architecture", "world_size"), [("sm_90", 2), ("sm_80", 4)])
def test_a_right_product_is_exact_and_clean(architecture, world_size):
    report = tricomm.check(program(True), world_size, 4, compiled=architecture)
    assert report.ok and report.steps, report


def test_a_barrier_that_does_not_release_the_product_is_a_race():
    report = tricomm.check(program(False), 2, 4)
    assert [finding.kind for finding in report.findings[:1]] == ["race"], report
    assert "test_products.py" in report.findings[0].where[0] and "make it sem='release'" in report.findings[0].advice
