"""Checks the arguments of an all-reduce with an epilogue, and allocates the outputs that are missing.

Bad arguments are refused before anything is sent: `InvalidArgument` says which tensor, what it is, and what is needed.
"""

from __future__ import annotations

import ctypes
import math
from typing import Any, NamedTuple

import torch

from tricomm import arguments
from tricomm.core.fused.fused_call import FUSED, NVFP4_BLOCK, QUANTIZATIONS, SCALE_LAYOUTS, Epilogue, FusedCall
from tricomm.errors import InvalidArgument

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_FP8 = (torch.float8_e4m3fn,)
_BYTES = (torch.uint8, torch.int8, torch.int32, torch.float8_e4m3fn, getattr(torch, "float4_e2m1fn_x2", torch.uint8))

_scales: dict[tuple[float, torch.device], torch.Tensor] = {}  # kept for ever: a graph may read them
_MOST_SCALES = 4096


class FusedArguments(NamedTuple):
    """The unchecked arguments of a call. Outputs that are None are allocated; `norm_out` only without `quantize`."""

    x: Any
    residual: Any
    weight: Any
    eps: Any
    weight_bias: Any = 0.0
    residual_out: Any = None
    norm_out: Any = None
    quantize: Any = None
    scale: Any = None
    scale_layout: Any = None
    quant_out: Any = None
    scale_out: Any = None


def checked(given: FusedArguments, device: torch.device) -> FusedCall:
    """The call, in rows.

    Raises `InvalidArgument` for tensors of other types, shapes, devices or strides than `FusedCall` says, for outputs
    that overlap in other ways, and for impossible numbers.
    """
    x = given.x
    arguments.check_tensor(x, device, f"{FUSED} x")
    if x.dtype not in DTYPES:
        raise InvalidArgument(f"{FUSED} x: {x.dtype} is not normalised; there is {_names(DTYPES)}")
    if not x.dim() or not x.shape[-1]:
        raise InvalidArgument(f"{FUSED} x: shape {tuple(x.shape)}; [..., hidden] is needed, hidden 1 or more")
    _check_contiguous(x, "x")
    shape, hidden, same = tuple(x.shape), x.shape[-1], (x.dtype,)
    rows = x.numel() // hidden
    epilogue = _epilogue(given, hidden)
    _check(given.weight, "weight", device, (hidden,), (x.dtype, torch.float32))
    if given.residual is not None:
        _check(given.residual, "residual", device, shape, same)
    residual_out = _output(given.residual_out, "residual_out", x, shape, same)
    norm_out = _output(given.norm_out, "norm_out", x, shape, same) if epilogue.norm else None
    call = FusedCall(
        epilogue._replace(weight=given.weight.dtype),
        x.view(rows, hidden),
        None if given.residual is None else given.residual.view(rows, hidden),
        given.weight,
        residual_out.view(rows, hidden),
        None if norm_out is None else norm_out.view(rows, hidden),
        *_quantized(given, epilogue, x, rows),
    )
    _check_apart(call)
    return call


def _epilogue(given: FusedArguments, hidden: int) -> Epilogue:
    quantize, layout = given.quantize, given.scale_layout
    if quantize is not None and quantize not in QUANTIZATIONS:
        raise InvalidArgument(f"{FUSED}: quantize={quantize!r}; there is {', '.join(QUANTIZATIONS)}")
    if quantize == "nvfp4":
        layout = SCALE_LAYOUTS[0] if layout is None else layout
        if layout not in SCALE_LAYOUTS:
            raise InvalidArgument(f"{FUSED}: scale_layout={layout!r}; there is {', '.join(SCALE_LAYOUTS)}")
    check_row(hidden, quantize)
    unused = {
        "scale": quantize in (None, "fp8_per_token"),
        "scale_layout": quantize != "nvfp4",
        "quant_out": quantize is None,
        "scale_out": quantize in (None, "fp8"),
    }
    for name, useless in unused.items():
        if useless and getattr(given, name) is not None:
            raise InvalidArgument(f"{FUSED}: {name} means nothing with quantize={quantize!r}; leave it out")
    eps, bias = _number(given.eps, "eps"), _number(given.weight_bias, "weight_bias")
    if eps < 0:
        raise InvalidArgument(f"{FUSED}: eps={eps!r}: 0 or more is needed")
    norm = quantize is None or given.norm_out is not None
    return Epilogue(hidden, torch.float32, eps, bias, given.residual is not None, norm, quantize, layout or "")


def check_row(hidden: int, quantize: str | None) -> None:
    """Raises `InvalidArgument` for rows that are not whole blocks of codes."""
    if quantize == "nvfp4" and hidden % NVFP4_BLOCK:
        raise InvalidArgument(f"{FUSED}: rows of {hidden} elements; nvfp4 needs a multiple of {NVFP4_BLOCK}")


def _number(value: Any, name: str) -> float:
    if not isinstance(value, bool) and isinstance(value, int | float) and math.isfinite(_single(value)):
        return float(value)
    raise InvalidArgument(f"{FUSED}: {name}={value!r}: a finite number is needed, in fp32 too")


def _single(value: float) -> float:
    """As fp32, in which the kernels take it: infinite if it is beyond."""
    try:
        return ctypes.c_float(value).value
    except OverflowError:  # an integer beyond what a float holds
        return math.inf


def _quantized(
    given: FusedArguments, epilogue: Epilogue, x: torch.Tensor, rows: int
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """`scale`, `quant_out` and `scale_out` of the call."""
    quantize, hidden = epilogue.quantize, epilogue.hidden
    if quantize is None:
        return None, None, None
    if quantize == "fp8_per_token":
        codes = _output(given.quant_out, "quant_out", x, tuple(x.shape), _FP8)
        scales = _output(given.scale_out, "scale_out", x, (*x.shape[:-1], 1), (torch.float32,))
        return None, codes.view(rows, hidden), scales.view(rows, 1)
    scale = _static(given.scale, x.device)
    if quantize == "fp8":
        return scale, _output(given.quant_out, "quant_out", x, tuple(x.shape), _FP8).view(rows, hidden), None
    codes = _bytes(given.quant_out, "quant_out", x, (*x.shape[:-1], hidden // 2), exact=True)
    scales = _bytes(given.scale_out, "scale_out", x, scale_shape(rows, hidden, epilogue.scale_layout), exact=False)
    return scale, codes.view(rows, hidden // 2), scales


def _static(scale: Any, device: torch.device) -> torch.Tensor:
    """A static scale as a tensor of one element; a number as the same tensor in every call, which graphs may read."""
    if isinstance(scale, torch.Tensor) and scale.numel() == 1:
        _check(scale, "scale", device, tuple(scale.shape), (torch.float32,))
        return scale.view(1)
    if isinstance(scale, torch.Tensor | None) or _single(_number(scale, "scale")) <= 0:
        raise InvalidArgument(f"{FUSED}: scale={scale!r}: a number over 0 or a tensor of one fp32 element is needed")
    made = _scales.get((scale, device))
    if made is None:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise InvalidArgument(
                f"{FUSED}: scale={scale!r} is new, and cannot be copied to the GPU in a capture; run this call once "
                "before it, or pass a tensor"
            )
        made = arguments.allocated(FUSED, lambda: torch.tensor([scale], dtype=torch.float32, device=device))
        if len(_scales) < _MOST_SCALES:
            _scales[scale, device] = made
    return made


def scale_shape(rows: int, hidden: int, layout: str) -> tuple[int, int]:
    """Rows and columns of the bytes of nvfp4's block scales, including padding."""
    blocks = hidden // NVFP4_BLOCK
    if layout == "linear":
        return rows, blocks
    return (rows + 127) // 128 * 128, (blocks + 3) // 4 * 4


def _output(given: Any, name: str, x: torch.Tensor, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...]) -> Any:
    if given is None:
        return arguments.allocated(f"{FUSED} {name}", torch.empty, shape, dtype=dtypes[0], device=x.device)
    _check(given, name, x.device, shape, dtypes)
    return given


def _bytes(given: Any, name: str, x: torch.Tensor, shape: tuple[int, ...], exact: bool) -> torch.Tensor:
    """An output as bytes of `shape`; unless `exact`, its own shape may differ, because frameworks have their own."""
    if given is None:  # zeroed, because matrix multiplications read the padding of the scales
        return arguments.allocated(f"{FUSED} {name}", torch.zeros, shape, dtype=torch.uint8, device=x.device)
    arguments.check_tensor(given, x.device, f"{FUSED} {name}")
    needed = math.prod(shape)
    if given.dtype not in _BYTES or given.nbytes != needed or (exact and given.shape[:-1] != shape[:-1]):
        raise InvalidArgument(
            f"{FUSED} {name}: {given.dtype} of shape {tuple(given.shape)}; {needed} bytes are needed, of uint8 in "
            f"shape {shape}"
        )
    _check_contiguous(given, name)
    codes: torch.Tensor = given.view(torch.uint8).view(shape)
    return codes


def _check(x: Any, name: str, device: torch.device, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...]) -> None:
    arguments.check_tensor(x, device, f"{FUSED} {name}")
    if x.dtype not in dtypes or tuple(x.shape) != shape:
        raise InvalidArgument(
            f"{FUSED} {name}: {x.dtype} of shape {tuple(x.shape)}; {_names(dtypes)} of shape {shape} is needed"
        )
    _check_contiguous(x, name)


def _check_contiguous(x: torch.Tensor, name: str) -> None:
    if not x.is_contiguous():
        raise InvalidArgument(f"{FUSED} {name}: strides {x.stride()} have gaps; pass a contiguous tensor")


def _names(dtypes: tuple[torch.dtype, ...]) -> str:
    return " or ".join(dict.fromkeys(str(dtype).removeprefix("torch.") for dtype in dtypes))


def _check_apart(call: FusedCall) -> None:
    """Refuse outputs that overlap inputs or other outputs, except for the pairs that `FusedCall` allows."""
    same = {("residual_out", "residual"), ("residual_out", "x"), ("norm_out", "x")}
    names = ("residual_out", "norm_out", "quant_out", "scale_out", "x", "residual", "weight", "scale")
    spans = [(name, t.data_ptr(), t.nbytes) for name in names if (t := getattr(call, name)) is not None and t.nbytes]
    for place, (name, start, nbytes) in enumerate(spans):
        if not name.endswith("_out"):
            break
        for other, first, length in spans[place + 1 :]:
            whole = first == start and (name, other) in same
            if first < start + nbytes and start < first + length and not whole:
                raise InvalidArgument(f"{FUSED}: {name} overlaps {other}; pass memory of its own, or none")
