"""The results that the collectives promise, in plain torch: rows, order of reduction and rounding."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

_FLOATS = {torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2}
_SMALL = {**dict.fromkeys(_FLOATS, torch.float32), **dict.fromkeys((torch.int16, torch.int8, torch.uint8), torch.int32)}


def expected(
    collective: str,
    op: str,
    parts: list[torch.Tensor],
    rank: int = 0,
    root: int = -1,
    quads: Sequence[Sequence[int]] = (),
    wire: str = "",
) -> torch.Tensor:
    """The output that the kernels promise to `rank`; `parts` are all ranks' flat inputs. `quads`: the quads of a cube
    mesh, if it is reduced over one; `wire`: how an all-reduce is quantised on the links."""
    if wire:
        return quantised(wire, op, parts)
    if collective in ("all_gather", "gather"):
        return torch.cat(parts)
    if collective == "broadcast":
        return parts[root]
    if collective == "scatter":
        return parts[root].chunk(len(parts))[rank]
    if collective in ("all_to_all", "all_to_all_v"):  # the latter with even rows
        return torch.cat([part.chunk(len(parts))[rank] for part in parts])
    if collective == "reduce_scatter":
        parts = [part.chunk(len(parts))[rank] for part in parts]
    return reduced(op, parts, quads)


def reduced(op: str, parts: list[torch.Tensor], quads: Sequence[Sequence[int]] = ()) -> torch.Tensor:
    """The reduction in rank order (with `quads` each quad in rank order, then the two sums), in 32 bits for narrower
    types, rounded once."""
    if parts[0].is_complex() and op in ("sum", "avg"):  # torch would make NaNs next to infinities
        return torch.view_as_complex(reduced(op, [torch.view_as_real(part) for part in parts], quads))
    dtype, count = parts[0].dtype, len(parts)
    if dtype == torch.bool:
        op = {"sum": "bor", "max": "bor", "prod": "band", "min": "band"}.get(op, op)
    two = functools.partial(_two, op)
    parts = [part.to(_SMALL.get(dtype, dtype)) for part in parts]
    if quads:
        parts = [functools.reduce(two, [parts[rank] for rank in quad]) for quad in quads]
    total = functools.reduce(two, parts)
    if op == "avg":
        whole = not (dtype.is_floating_point or dtype.is_complex)
        total = torch.div(total, count, rounding_mode="trunc") if whole else total / count
    return (total.clamp(-448, 448) if dtype == torch.float8_e4m3fn else total).to(dtype)


def quantised(wire: str, op: str, parts: list[torch.Tensor]) -> torch.Tensor:
    """The sum or average of flat `parts` as `all_reduce(wire=)` computes it."""
    if parts[0].is_complex():
        return torch.view_as_complex(
            quantised(wire, op, [torch.view_as_real(x).reshape(-1) for x in parts]).view(-1, 2)
        )
    codes = wire.removesuffix("_gather")
    given = [part.float() if wire != codes else coded(part.float(), codes) for part in parts]
    total = functools.reduce(torch.add, given)
    return coded(total / len(parts) if op == "avg" else total, codes).to(parts[0].dtype)


def coded(values: torch.Tensor, codes: str) -> torch.Tensor:
    """Flat fp32 `values` after one leg in `codes`, fp8 or int8: quantised and dequantised."""
    blocks = torch.nn.functional.pad(values, (0, -len(values) % 128)).view(-1, 128)
    finite = blocks.isfinite()
    most = torch.where(finite, blocks, 0.0).abs().amax(1, keepdim=True)
    fraction, exponent = torch.frexp(most / 127 if codes == "int8" else most)
    if codes == "int8":  # rounded up to eight bits
        scale = torch.ldexp(torch.ceil(fraction * 256) / 256, exponent)
    else:  # 448 is 0.875 * 2^9
        scale = torch.ldexp(torch.ones_like(most), exponent - torch.where(fraction > 0.875, 8, 9))
    scale = torch.where(most > 0, scale, 0.0).clamp(min=2.0**-126)
    scaled = torch.where(finite, blocks, torch.nan) * (1 / scale)
    rounded = scaled.round() + 0.0 if codes == "int8" else scaled.to(torch.float8_e4m3fn).float()
    return (rounded * scale).view(-1)[: len(values)]


def _two(op: str, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    if op in ("band", "bor", "bxor"):
        return a & b if op == "band" else a | b if op == "bor" else a ^ b
    if op in ("min", "max"):  # torch may return either of two zeros with different signs
        negative = torch.signbit(a)
        equal = torch.where(negative, a, b) if op == "min" else torch.where(negative, b, a)
        return torch.where(a == b, equal, torch.minimum(a, b) if op == "min" else torch.maximum(a, b))
    return a * b if op == "prod" else a + b
