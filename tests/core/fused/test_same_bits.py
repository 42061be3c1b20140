"""Fused kernels have the bits of the all-reduce and torch operations that run without a fused kernel."""

from __future__ import annotations

import itertools

import pytest
import torch

import tricomm
from tests.core.fused import fused_reference as reference
from tests.core.fused.test_fused import ROUTES, on_all
from tests.marks import some
from tricomm.policy import row_shapes


@pytest.mark.parametrize("dtype", [torch.float32, *some([torch.bfloat16], lambda *_: False)])
@ROUTES
def test_tiny_rows_and_weights_near_the_bias_stay_within_an_ulp(dtype, protocol):
    draw = torch.Generator().manual_seed(5)
    size = torch.tensor([1e-30, 1e-26, 1e-24, 1e-22, 1e-20])[:, None]
    rows = (torch.randn(5, 200, generator=draw) * size).to(dtype)
    weight = (torch.randn(200, generator=draw) * 0.01).to(dtype)

    def body(comm):
        ones = torch.ones_like(weight)
        tiny = [comm.all_reduce_rms_norm(rows, None, ones, eps, protocol=protocol)[0] for eps in (0.0, 1e-42, 1e-30)]
        return tiny, comm.all_reduce_rms_norm(rows, None, weight, 0.0, weight_bias=0.125, protocol=protocol)[0]

    ((tiny, biased),) = on_all(body, 1)
    for norm, eps in zip(tiny, (0.0, 1e-42, 1e-30), strict=True):
        assert reference.within_an_ulp(norm, reference.norm_of(rows, torch.ones(200), torch.tensor(eps).double()))
    exact = reference.norm_of(rows, weight, 0.0, 0.125)
    assert reference.within_an_ulp(biased, exact)
    if dtype == torch.float32:  # rounded once: within half a unit
        assert bool(((biased.double() - exact).abs() <= 0.6 * torch.finfo(dtype).eps * exact.abs()).all())


def test_squares_are_added_by_words_both_fused_and_unfused():
    """Rows whose norm has other bits if squares are truncated one by one and not a word at a time."""

    def body(comm):
        x = torch.cat([torch.randn(8, 512, generator=torch.Generator().manual_seed(n)).half() for n in (40, 166)])
        ones = torch.ones(512, dtype=x.dtype)
        return [comm.all_reduce_rms_norm(x, None, ones, 0.0, protocol=protocol)[0] for protocol in (None, "simple")]

    ((fused, unfused),) = on_all(body, 1)
    assert torch.equal(fused, unfused)


def test_an_infinite_norm_has_an_infinite_scale_and_a_nan_one_code():
    def body(comm):
        x, weight = torch.ones(2, 32), torch.ones(32)
        x[1, 4], weight[3] = -float("nan"), torch.inf
        return [
            comm.all_reduce_rms_norm_quantized(x, None, weight, quantize="fp8_per_token", protocol=protocol)
            for protocol in (None, "simple")
        ]

    for codes, scales, _, _ in on_all(body, 1)[0]:
        rows = codes.view(torch.uint8).tolist()
        assert scales[0, 0] == torch.inf and rows == [[0] * 3 + [0x7F] + [0] * 28, [0x7F] * 32]


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float32, marks=pytest.mark.exhaustive)])
def test_fused_and_unfused_calls_have_the_same_bits(dtype):
    """Rows of many magnitudes, special values and infinite norms; every NaN has the same code."""

    def body(comm):
        own, common = (torch.Generator().manual_seed(seed) for seed in (comm.rank, 99))
        size = torch.logspace(-9, 9, 7)[:, None]
        x = (torch.randn(7, 64, generator=own) * size).to(dtype)
        residual = (torch.randn(7, 64, generator=common) * size).to(dtype)
        weight = torch.randn(64, generator=common).to(dtype)
        x[2, 5], x[3, 7], x[4], residual[4] = float("nan"), float("inf"), 0, 0
        weight[40], x[6, 9] = float("nan"), -float("nan")
        infinite = torch.where(torch.arange(64) == 3, torch.inf, weight)
        results = []
        forms = (("fp8", {"scale": 0.3}), ("fp8_per_token", {}), ("nvfp4", {"scale": 37.5}))
        for (quantize, more), gain in itertools.product(forms, (weight, infinite)):
            results.append(
                [
                    comm.all_reduce_rms_norm_quantized(
                        x, residual, gain, quantize=quantize, norm_out=torch.empty_like(x), protocol=protocol, **more
                    )
                    for protocol in (None, "simple")
                ]
            )
        return results

    for results in on_all(body):
        for fused, unfused in results:
            for one, other in zip(fused, unfused, strict=True):
                if one is not None and one.dtype == dtype:  # a NaN may have any bits
                    one, other = (torch.where(y.float().isnan(), 1e30, y.float()) for y in (one, other))
                assert one is other is None or torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def test_rows_keep_their_bits_where_a_longer_call_is_not_fused(monkeypatch):
    """As on a GPU above a certain size."""
    choose = row_shapes.choose

    def short_alone(facts, collective, bits, hidden, rows, *more):
        return "too long" if rows > 2 else choose(facts, collective, bits, hidden, rows, *more)

    monkeypatch.setattr(row_shapes, "choose", short_alone)

    def body(comm):
        x = torch.randn(5, 72, generator=torch.Generator().manual_seed(comm.rank)).bfloat16()
        residual, weight = (torch.randn(n, 72, generator=torch.Generator().manual_seed(9)).bfloat16() for n in (5, 1))
        long = comm.all_reduce_rms_norm(x, residual, weight[0])
        short = comm.all_reduce_rms_norm(x[2:4].clone(), residual[2:4].clone(), weight[0])
        return long, short, [c.algorithm for c in comm.stats().calls]

    for long, short, algorithms in on_all(body, options=tricomm.Options(batch_invariant=True)):
        assert all(torch.equal(a[2:4], b) for a, b in zip(long, short, strict=True))
        assert algorithms[0].startswith("unfused_") and not algorithms[1].startswith("unfused_")
