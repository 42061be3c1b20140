"""The steps after the all-reduce of a fused call, in torch: for calls without a fused kernel, and as a reference.

The arithmetic follows the fused kernels step by step, and each step is exact or rounded as IEEE 754 says. So a call
gives the same bits fused and unfused. On a GPU nothing here waits for the device, so a graph can hold it.
"""

from __future__ import annotations

import torch

from tricomm import arguments
from tricomm.core.fused.fused_call import FP8_MAX, FUSED, LEAST_FP8_SCALE, NVFP4_BLOCK, Epilogue, FusedCall
from tricomm.kernels.specialization import group_of

_E2M1_MIDPOINTS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)  # between 0, 0.5, 1, 1.5, 2, 3, 4 and 6
_NAN_CODE = 7  # what a GPU converts a NaN to
_INFINITE = 0x7F800000  # fp32's bits of infinity
_ROOT = 127 - 22  # as in kernels/device/epilogue.py


def total_of(call: FusedCall) -> torch.Tensor:
    """Memory for the sum over the ranks: an output of the call, unless a later step reads it as an input."""
    if call.residual is None or call.residual_out.data_ptr() != call.residual.data_ptr():
        return call.residual_out
    return arguments.allocated(FUSED, torch.empty_like, call.x) if call.norm_out is None else call.norm_out


def finish(call: FusedCall, total: torch.Tensor) -> None:
    """Fill the outputs of `call` from `total`, the sum over the ranks, which may be one of them."""
    out = call.residual_out
    if call.residual is not None:
        torch.add(total, call.residual, out=out)
    elif out is not total:
        out.copy_(total)
    norm = normalized(out, call.weight, call.epilogue)
    if call.norm_out is not None:
        call.norm_out.copy_(norm)
    quantize(call, norm)


def quantize(call: FusedCall, norm: torch.Tensor) -> None:
    """Fill codes and scales of `call`, if it has any, from its norm."""
    if call.quant_out is not None and call.epilogue.quantize is not None:
        _QUANTIZED.get(call.epilogue.quantize, _fp8_per_group)(call, norm.float(), call.quant_out)


def normalized(x: torch.Tensor, weight: torch.Tensor, epilogue: Epilogue) -> torch.Tensor:
    """The norm of each row of `x`, in its type, in the steps of `kernels/device/epilogue.py`."""
    wide = x.float()
    scale, factor = _factor(wide, x.dtype == torch.float32, epilogue)
    gain = weight.to(factor.dtype)
    if epilogue.weight_bias:
        gain = gain + _number(epilogue.weight_bias, wide).to(factor.dtype)
    return ((wide * scale).to(factor.dtype) * factor).mul_(gain).float().to(x.dtype)


def _factor(wide: torch.Tensor, double: bool, epilogue: Epilogue) -> tuple[torch.Tensor, torch.Tensor]:
    """(scale, factor) of each row: an element of the norm is (element * scale) * factor.

    The scale is a power of two. The squares of a word's elements are added first, in their order; the words' sums are
    added as integers, so that their order does not matter.
    """
    eps = _number(epilogue.eps, wide)
    largest = (wide.view(torch.int32) & 0x7FFFFFFF).amax(-1, keepdim=True)  # NaN above all
    bits = eps.view(torch.int32) & 0x7FFFFFFF
    root = torch.where(bits == 0, 0, (bits >> 23) + _ROOT >> 1)
    exponent = torch.maximum(largest >> 23, root).clamp_(23, 253)
    up = 22 - max(0, (epilogue.hidden - 1).bit_length() - 13) // 2  # rows that no kernel takes have fewer bits
    scale, lower = ((254 + n - exponent << 23).view(torch.float32) for n in (up, 0))
    pack = 2 if double else 4  # elements of a word
    value = (wide * scale).to(torch.float64 if double else torch.float32)
    square = torch.nn.functional.pad(value * value, (0, -epilogue.hidden % pack)).view(len(wide), -1, pack)
    words = square[..., 0]
    for j in range(1, pack):
        words = words + square[..., j]
    mean = words.to(torch.int64).sum(-1, keepdim=True).to(value.dtype) * 4.0**-up / _number(epilogue.hidden, value)
    mean = mean + eps.to(value.dtype) * lower.to(value.dtype) * lower.to(value.dtype)
    wide_root = mean.double().sqrt().to(value.dtype)  # torch's root of an fp32 is not always the nearest
    factor = (mean * 0.0 + 1.0) / wide_root * 2.0**-up
    factor = torch.where(largest == _INFINITE, 0.0, factor)
    return scale, torch.where(largest > _INFINITE, torch.nan, factor)


def _fp8(call: FusedCall, norm: torch.Tensor, out: torch.Tensor) -> None:
    assert call.scale is not None, "checked before the call"
    out.copy_(_e4m3(norm * (1.0 / call.scale)))


def _fp8_per_token(call: FusedCall, norm: torch.Tensor, out: torch.Tensor) -> None:
    assert call.scale_out is not None, "checked before the call"
    scale = (_largest(norm) / _number(FP8_MAX, norm)).clamp_(min=LEAST_FP8_SCALE)
    call.scale_out.copy_(scale)
    out.copy_(_e4m3(norm / scale))


def _nvfp4(call: FusedCall, norm: torch.Tensor, out: torch.Tensor) -> None:
    assert call.scale is not None and call.scale_out is not None, "checked before the call"
    rows, hidden = norm.shape
    blocks = norm.view(rows, hidden // NVFP4_BLOCK, NVFP4_BLOCK)
    scales = _e4m3(call.scale * (_largest(blocks) * _number(1 / 6, norm)))
    wide = scales.float()
    codes = _e2m1(blocks * torch.where(wide != 0, call.scale / wide, 0.0)).view(rows, hidden)
    out.copy_(codes[:, ::2] | codes[:, 1::2] << 4)
    scales = scales.view(torch.uint8).view(rows, hidden // NVFP4_BLOCK)
    if call.epilogue.scale_layout == "linear":
        call.scale_out.copy_(scales)
    else:
        call.scale_out.view(-1)[swizzled(rows, hidden // NVFP4_BLOCK, norm.device)] = scales


def _fp8_per_group(call: FusedCall, norm: torch.Tensor, out: torch.Tensor) -> None:
    assert call.scale_out is not None and call.epilogue.quantize is not None, "checked before the call"
    rows, hidden = norm.shape
    groups = norm.view(rows, -1, group_of(call.epilogue.quantize))
    scale = (_largest(groups) / _number(FP8_MAX, norm)).clamp_(min=1e-10)
    exponent = (scale.view(torch.int32) + 0x7FFFFF) >> 23  # rounded up
    out.copy_(_e4m3(groups / (exponent << 23).view(torch.float32)).view(rows, hidden))
    exponents = torch.nn.functional.pad(exponent.view(rows, -1).to(torch.uint8), (0, -groups.shape[1] % 4))
    columns = torch.nn.functional.pad(exponents.view(torch.int32).t(), (0, -rows % 4))
    call.scale_out.copy_(columns.reshape(-1)[: len(call.scale_out)])


_QUANTIZED = {"fp8": _fp8, "fp8_per_token": _fp8_per_token, "nvfp4": _nvfp4}


def _number(value: float, like: torch.Tensor) -> torch.Tensor:
    """`value` as a tensor: instead of dividing by a Python number, torch multiplies by its reciprocal on a GPU."""
    return torch.full((), value, dtype=like.dtype, device=like.device)


def _largest(x: torch.Tensor) -> torch.Tensor:
    """The largest magnitude of each row, ignoring NaN."""
    return torch.nan_to_num(x.abs(), nan=0.0, posinf=torch.inf).amax(-1, keepdim=True)


def _e4m3(x: torch.Tensor) -> torch.Tensor:
    """Rounded to nearest even, at most 448; every NaN becomes the positive one, as on a GPU."""
    return torch.where(x.isnan(), torch.nan, x.clamp(-FP8_MAX, FP8_MAX)).to(torch.float8_e4m3fn)


def _e2m1(x: torch.Tensor) -> torch.Tensor:
    """The codes of four bits, in a byte each: rounded to nearest, ties to an even code, at most 6."""
    size = x.abs()
    code = torch.zeros_like(x, dtype=torch.uint8)
    for number, midpoint in enumerate(_E2M1_MIDPOINTS):  # a tie goes up if the code below is odd
        code += size >= midpoint if number % 2 else size > midpoint
    code = torch.where(x.isnan(), _NAN_CODE, code)
    return code | (x.signbit() & ~x.isnan()).to(torch.uint8) << 3


def swizzled(rows: int, blocks: int, device: torch.device) -> torch.Tensor:
    """[rows, blocks]: the byte of each block's scale in layout swizzled_128x4."""
    row = torch.arange(rows, device=device)[:, None]
    block = torch.arange(blocks, device=device)[None, :]
    tile = (row // 128) * -(-blocks // 4) + block // 4
    return tile * 512 + row % 32 * 16 + row // 32 % 4 * 4 + block % 4
