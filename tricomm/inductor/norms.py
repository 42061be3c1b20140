"""Finds RMSNorms in Inductor's graphs: `torch.ops.tricomm.rms_norm` and norms written in torch.

Norms written in torch differ in their casts:

    wide = x.float()
    normed = wide * rsqrt(mean(wide ** 2, -1) + eps)
    norm = (normed * weight).to(x.dtype)              torch.nn.RMSNorm, torch.nn.functional.rms_norm
    norm = weight * normed.to(x.dtype)                Llama
    norm = (normed * (1 + weight.float())).to(x.dtype)    Gemma
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
from torch.fx import Node

aten, prims = torch.ops.aten, torch.ops.prims

_ADD = (aten.add.Tensor, aten.add.Scalar)
_MUL = (aten.mul.Tensor,)
_SUFFIXES = ("", "_fp8", "_fp8_per_token", "_nvfp4")


class Norm(NamedTuple):
    """A norm of the rows of a node.

    out       the node whose value is the norm, or the operator's node
    suffix    of the operator's name, empty without quantisation; None if the norm is written in torch
    residual  the residual that the operator adds first, or None
    tail      the arguments of the fused operator after the residual, without the group
    """

    out: Node
    suffix: str | None
    residual: Any
    tail: tuple[Any, ...]


_OPERATORS = {getattr(torch.ops.tricomm, f"rms_norm{suffix}").default: suffix for suffix in _SUFFIXES}


def of(rows: Node) -> Norm | None:
    """The first norm of `rows`, or None."""
    for user in rows.users:
        suffix = _OPERATORS.get(user.target)
        if suffix is not None and not user.kwargs and user.args[0] is rows:
            return Norm(user, suffix, user.args[1], tuple(user.args[2:]))
    return _spelled(rows)


def value(node: Any) -> Any:
    """The fake tensor of a node."""
    return node.meta.get("val") if isinstance(node, Node) else None


def _spelled(rows: Node) -> Norm | None:
    dtype = value(rows).dtype
    wide: Any = rows if dtype == torch.float32 else _user(rows, lambda u: _is_cast(u, torch.float32))
    square = wide and _user(wide, lambda u: _is_square(u, wide))
    mean = square and _user(square, lambda u: _is_mean(u, value(rows).dim()))
    stable = mean and _user(mean, lambda u: _is(u, _ADD) and _is_number(u.args[1]) and u.args[1] >= 0)
    root = stable and _user(stable, lambda u: _is(u, (aten.rsqrt.default,)))
    normed = root and _user(root, lambda u: _is(u, _MUL) and set(u.args) == {wide, root})
    if not normed:
        return None
    early = _user(normed, lambda u: _is_cast(u, dtype)) if dtype != torch.float32 else None
    factor = early or normed
    out = _user(factor, lambda u: _is(u, _MUL) and _gain(_other(u, factor), rows) is not None)
    if out is None:
        return None
    weight, bias = _gain(_other(out, factor), rows) or (None, 0.0)
    if value(out).dtype != dtype:
        out = _user(out, lambda u: _is_cast(u, dtype))
    return out and Norm(out, None, None, (weight, float(stable.args[1]), bias))


def _gain(factor: Any, rows: Node) -> tuple[Node, float] | None:
    """Weight and bias of the factor `weight`, or `weight + bias`, of `rows`."""
    bias: Any = 0.0
    if isinstance(factor, Node) and _is(factor, _ADD) and _is_number(factor.args[1]):
        factor, bias = cast(tuple[Any, Any], factor.args)
        if value(factor).dtype != torch.float32:  # a 16-bit sum is rounded
            return None
    if isinstance(factor, Node) and _is_cast(factor, torch.float32):
        factor = factor.args[0]
    given, x = value(factor), value(rows)
    if not isinstance(given, torch.Tensor) or given.dtype not in (x.dtype, torch.float32):
        return None
    return (factor, float(bias)) if tuple(given.shape) == (x.shape[-1],) and given.numel() else None


def _user(node: Node, fits: Callable[[Any], bool]) -> Any:
    return next((user for user in node.users if fits(user)), None)


def _other(product: Node, factor: Node) -> Any:
    return product.args[1] if product.args[0] is factor else product.args[0]


def _is(node: Node, targets: tuple[Any, ...]) -> bool:
    return node.op == "call_function" and node.target in targets and not node.kwargs


def _is_number(value: Any) -> bool:
    return isinstance(value, float | int) and math.isfinite(value)


def _is_cast(node: Node, dtype: torch.dtype) -> bool:
    return _is(node, (prims.convert_element_type.default,)) and node.args[1] == dtype


def _is_square(node: Node, wide: Any) -> bool:
    if _is(node, _MUL):
        return node.args == (wide, wide)
    return _is(node, (aten.pow.Tensor_Scalar,)) and node.args[1:] == (2,)


def _is_mean(node: Node, dims: int) -> bool:
    return _is(node, (aten.mean.dim,)) and node.args[1:] in (([-1], True), ([dims - 1], True))
