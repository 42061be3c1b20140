"""all_reduce + residual + RMSNorm + quantisation in float64, from the definition; shares nothing with the library."""

from __future__ import annotations

import torch

_E4M3 = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
E4M3 = _E4M3[_E4M3.isfinite() & (_E4M3 >= 0)].sort().values
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)


def inputs(rank, rows, hidden, dtype, seed=0):
    """x of `rank`, and residual and weight of all ranks: small integers, so that every sum of them is exact."""
    draw = torch.Generator().manual_seed(1000 * seed + rank)
    common = torch.Generator().manual_seed(1000 * seed + 999)
    x = torch.randint(-4, 5, (rows, hidden), generator=draw).to(dtype)
    residual = torch.randint(-9, 10, (rows, hidden), generator=common).to(dtype)
    weight = (torch.randint(-16, 17, (hidden,), generator=common) / 8).to(dtype)
    return x, residual, weight


def summed(world_size, rows, hidden, dtype, seed=0):
    """The sum of all ranks' x and of the residual; exact."""
    total = inputs(0, rows, hidden, dtype, seed)[1].double()
    for rank in range(world_size):
        total = total + inputs(rank, rows, hidden, dtype, seed)[0].double()
    return total


def norm_of(rows, weight, eps, bias=0.0):
    """The norm in float64."""
    x = rows.double()
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * (weight.double() + bias)


def within_an_ulp(result, exact):
    """Whether each number is within eps times the exact one, which is one to two ulps."""
    step = torch.finfo(result.dtype).eps * exact.abs().clamp(min=torch.finfo(result.dtype).tiny)
    return bool(((result.double() - exact).abs() <= step).all())


def nearest(x, grid):
    """The distance of each magnitude to the nearest number of `grid`, and that number."""
    size = x.abs().clamp(max=grid[-1])
    distance, place = (size[..., None] - grid).abs().min(-1)
    return distance, grid[place]


def rounded(result, exact, grid):
    """Whether each number of `result` is the nearest one of the grid. Ties, and numbers that are ties in fp32, may be
    rounded either way."""
    size = exact.abs().clamp(max=grid[-1])
    best, _ = nearest(exact, grid)
    signs = (result == 0) | (result.sign() == exact.sign())
    return bool((signs & ((result.abs() - size).abs() <= best + size * 1e-6)).all())


def nvfp4(codes, scales, layout):
    """Codes of two a byte as numbers, and the scale of each block of 16, by the layout's own words."""
    rows, half = codes.shape
    both = torch.stack([codes & 15, codes >> 4], -1).view(rows, 2 * half).long()
    values = E2M1[both & 7] * torch.where(both >= 8, -1.0, 1.0)
    blocks = half // 8
    wide = scales.view(-1).view(torch.float8_e4m3fn).double()
    result = torch.empty(rows, blocks, dtype=torch.float64)
    padded = -(-blocks // 4)
    for row in range(rows):
        for block in range(blocks):
            place = row * blocks + block
            if layout == "swizzled_128x4":
                tile = (row // 128) * padded + block // 4
                place = tile * 512 + (row % 32) * 16 + (row % 128 // 32) * 4 + block % 4
            result[row, block] = wide[place]
    return values, result
