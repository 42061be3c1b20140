"""The distance of norm and codes from exact arithmetic; docs/fused.md has the numbers."""

from __future__ import annotations

import pytest
import torch

import tricomm
from tests.core.fused import fused_reference as reference
from tests.marks import some

ROWS, HIDDEN = 48, 512
_GRID = torch.cat([-reference.E4M3.flip(0)[:-1], reference.E4M3])  # all numbers of e4m3
_BETWEEN = (_GRID[1:] + _GRID[:-1]) / 2


def special(dtype):
    """Rows of many magnitudes, with one dominant element, of equal elements, and of tiny elements."""
    draw = torch.Generator().manual_seed(11)
    x = torch.randn(ROWS, HIDDEN, generator=draw)
    x[8:16] *= torch.logspace(-6, 3, 8)[:, None]
    x[16:24] *= torch.logspace(-4, 4, HIDDEN)
    x[24], x[25], x[26] = 0, 1, torch.finfo(dtype).tiny
    x[25, 7] = 100
    return x.to(dtype)


# `most` is the share of codes that may differ from the codes of the exact norm.
@pytest.mark.parametrize(
    ("dtype", "most"), [(torch.bfloat16, 0.02), *some([(torch.float16, 0.003), (torch.float32, 0.0)], lambda *_: False)]
)
@pytest.mark.parametrize("quantize", ["fp8", "fp8_per_token"])
def test_norm_and_codes_are_close_to_exact_ones(dtype, most, quantize):
    rows = special(dtype)
    weight = torch.linspace(-2, 2, HIDDEN).to(dtype)
    scale = {"scale": 0.013} if quantize == "fp8" else {}

    def body(comm):
        return comm.all_reduce_rms_norm_quantized(
            rows, None, weight, 1e-5, quantize=quantize, norm_out=torch.empty_like(rows), **scale
        )

    ((codes, scales, residual, norm),) = tricomm.simulate(body, 1)
    assert torch.equal(residual, rows)
    eps = torch.tensor(1e-5).double()  # rounded to fp32
    exact = reference.norm_of(rows, weight, eps)
    assert reference.within_an_ulp(norm, exact)
    factors = scales.double() if scales is not None else torch.tensor(0.013).double()
    wanted = (exact / factors).clamp(-448, 448)
    at = torch.searchsorted(_BETWEEN, wanted)
    other = codes.double() != _GRID[at]
    # A code that differs is the next one, and the exact norm is within half an ulp of the norm's type of the tie.
    tie = torch.where(codes.double() > _GRID[at], _BETWEEN[at.clamp(max=len(_BETWEEN) - 1)], _BETWEEN[at - 1])
    unit = torch.finfo(dtype).eps * exact.abs().clamp(min=torch.finfo(dtype).tiny) / factors
    unit += torch.finfo(torch.float32).eps * wanted.abs()
    assert bool(((wanted - tie).abs() <= unit)[other].all())
    assert other.double().mean().item() <= most
