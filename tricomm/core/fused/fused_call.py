"""All-reduce fused with residual, RMSNorm and quantisation: what the ranks agree on, and a rank's tensors.

    s            = all_reduce(x), in the bits of `Communicator.all_reduce`
    residual_out = round(s + residual), added in fp32; s itself without a residual
    factor       = rsqrt(mean(residual_out ** 2) + eps), of squares that neither overflow nor vanish
    norm         = round((residual_out * factor) * (weight + weight_bias)), rounded once
    quant_out    = of the rounded norm, by `Epilogue.quantize`:

`fp8`            e4m3 of norm * (1 / scale), which stays at 448; `scale` is static
`fp8_per_token`  scale_out = max(max(abs(norm)) / 448, 1 / (512 * 448)) of a row; e4m3 of norm / scale_out
`nvfp4`          of 16 elements in a row each: scale_out = e4m3 of scale * (max(abs(norm)) * fp32(1 / 6)); e2m1 of
                 norm * (scale / scale_out), or of 0 if scale_out is 0; the even element in the lower half of a byte
`fp8_per_N`      of N elements in a row each: scale = max(max(abs(norm)) / 448, 1e-10), rounded up to a power of two,
                 whose exponent of fp32 is a byte of scale_out; e4m3 of norm / scale. FlashInfer's; no public argument

The norm of fp32 is computed in fp64, all else in fp32, rounded to nearest even. A maximum ignores NaN; a NaN becomes
NaN in e4m3 and 6 in e2m1, as in a GPU's conversions.
"""

from __future__ import annotations

import ctypes
import math
from typing import Any, NamedTuple

import torch

from tricomm import arguments
from tricomm.core.fused.expert_rows import ExpertRows
from tricomm.errors import InvalidArgument
from tricomm.kernels.specialization import PER_GROUP, group_of

FUSED, ROWS = "all_reduce_rms_norm", "all_reduce_rows"
QUANTIZATIONS = ("fp8", "fp8_per_token", "nvfp4")
SCALE_LAYOUTS = ("swizzled_128x4", "linear")
NVFP4_BLOCK = 16  # elements that share a scale
FP8_MAX = 448.0
LEAST_FP8_SCALE = 1 / (512 * 448)


class Epilogue(NamedTuple):
    """The steps after the all-reduce; the same on every rank, and part of the call's fingerprint.

    hidden         elements of a row; x is [rows, hidden]
    weight         type of the weight
    eps            added to the mean of the squares
    weight_bias    added to the weight: 1.0 for Gemma
    residual       whether there is a residual
    norm           whether the norm itself is written
    quantize       one of `QUANTIZATIONS`, fp8_per_N, or None
    scale_layout   of the block scales of nvfp4: one of `SCALE_LAYOUTS`; "" otherwise
    experts        Triton's types of the operands of `ExpertRows`; empty if x has the rows
    top_k          their `top_k`
    """

    hidden: int
    weight: torch.dtype
    eps: float
    weight_bias: float = 0.0
    residual: bool = True
    norm: bool = True
    quantize: str | None = None
    scale_layout: str = ""
    experts: tuple[str, ...] = ()
    top_k: int = 0

    @property
    def own(self) -> bool:
        """Whether it is a user's own."""
        return False

    @property
    def facts(self) -> tuple[Any, ...]:
        """The values that the ranks compare; their `repr` is the same in every process."""
        return tuple(self)

    def text(self) -> str:
        """In words, for the record that the peers read: at most 72 characters."""
        parts = [f"{self.hidden}", f"eps {self.eps!r}", f"weight {str(self.weight).removeprefix('torch.')}"]
        if self.weight_bias:
            parts.append(f"bias {self.weight_bias!r}")
        if not self.residual:
            parts.append("no residual")
        if self.quantize is not None:
            parts.append(self.quantize + ("+norm" if self.norm else ""))
        if self.scale_layout:
            parts.append(self.scale_layout.removeprefix("swizzled_"))
        if self.experts:
            parts.append("experts")
        return ",".join(parts)


class UserEpilogue(NamedTuple):
    """A user's own epilogue, whose function finishes each row; the same on every rank.

    hidden     elements of a row
    function   `@triton.jit` function of (row, operands, SPEC)
    prepare    `@triton.jit` function of (number, operands, SPEC), which runs before the row has arrived
    operands   Triton's types of the operands
    prologue   `@triton.jit` function of (number, columns, inside, operands, SPEC), which makes the rows; None: they are
               those of x
    """

    hidden: int
    function: Any
    prepare: Any
    operands: tuple[str, ...]
    prologue: Any = None

    @property
    def quantize(self) -> str | None:
        """None: what the function does is not known here."""
        return None

    @property
    def own(self) -> bool:
        """Whether it is a user's own."""
        return True

    @property
    def facts(self) -> tuple[Any, ...]:
        """See `Epilogue.facts`. Functions go by name, because the text of an interpreted one contains its address."""
        functions = [f for f in (self.function, self.prepare, self.prologue) if f is not None]
        return (self.hidden, *(f"{f.fn.__module__}:{f.fn.__qualname__}" for f in functions), self.operands)

    def text(self) -> str:
        """In words, for the record that the peers read."""
        functions = [f for f in (self.prologue, self.function) if f is not None]
        return ",".join([f"{self.hidden}", *(f.fn.__qualname__ for f in functions)])


class FusedCall(NamedTuple):
    """One rank's checked tensors of a call: contiguous, on the communicator's device, without overlap except as below.

    x              [rows, hidden], of fp16, bf16 or fp32
    residual       [rows, hidden], of x's type, or None
    weight         [hidden], of x's type or fp32
    residual_out   [rows, hidden], of x's type; may be `residual` itself, or x itself
    norm_out       [rows, hidden], of x's type; may be x itself; None if `Epilogue.norm` is not set
    scale          fp32, one element: static of fp8, global of nvfp4; None otherwise
    quant_out      fp8*: [rows, hidden] of float8_e4m3fn; nvfp4: [rows, hidden / 2] of uint8; None otherwise
    scale_out      fp8_per_token: [rows, 1] of fp32. nvfp4: contiguous uint8, linear: [rows, hidden / 16];
                   swizzled_128x4: [rows up to a multiple of 128, hidden / 16 up to a multiple of 4], in tiles of 512
                   bytes; the scale of (row, block) is byte (row % 32) * 16 + row // 32 % 4 * 4 + block % 4 of tile
                   (row // 128, block // 4); padding is left unchanged. fp8_per_N: int32 in one dimension, with
                   columns that begin at multiples of four rows: byte b of (row, column) is of block 4 * column + b;
                   bytes without a block are 0, and so are rows that only fill a column. None otherwise
    experts        the tensors whose sums are the rows (x then gives only shape and type), or None
    """

    epilogue: Epilogue
    x: torch.Tensor
    residual: torch.Tensor | None
    weight: torch.Tensor
    residual_out: torch.Tensor
    norm_out: torch.Tensor | None
    scale: torch.Tensor | None = None
    quant_out: torch.Tensor | None = None
    scale_out: torch.Tensor | None = None
    experts: ExpertRows | None = None


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


def checked(
    given: FusedArguments, device: torch.device, experts: ExpertRows | None = None, group: int = 0
) -> FusedCall:
    """The call, in rows. With `experts`, x is not read and gives only shape and type. `group`: elements that share a
    scale, in place of `quantize`; `scale_out` is then int32 [rows, columns].

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
    if group:
        given = given._replace(quantize=f"{PER_GROUP}{group}")
    epilogue = _epilogue(given, hidden, group)
    _check(given.weight, "weight", device, (hidden,), (x.dtype, torch.float32))
    if given.residual is not None:
        _check(given.residual, "residual", device, shape, same)
    residual_out = _output(given.residual_out, "residual_out", x, shape, same)
    norm_out = _output(given.norm_out, "norm_out", x, shape, same) if epilogue.norm else None
    if experts is not None:
        experts.check(FUSED, x.view(rows, hidden))
        epilogue = epilogue._replace(experts=experts.types, top_k=experts.top_k)
    call = FusedCall(
        epilogue._replace(weight=given.weight.dtype),
        x.view(rows, hidden),
        None if given.residual is None else given.residual.view(rows, hidden),
        given.weight,
        residual_out.view(rows, hidden),
        None if norm_out is None else norm_out.view(rows, hidden),
        *_quantized(given, epilogue, x, rows),
        experts,
    )
    _check_apart(call)
    return call


def _epilogue(given: FusedArguments, hidden: int, group: int) -> Epilogue:
    quantize, layout = given.quantize, given.scale_layout
    if quantize is not None and quantize not in QUANTIZATIONS and not group:
        raise InvalidArgument(f"{FUSED}: quantize={quantize!r}; there is {', '.join(QUANTIZATIONS)}")
    if quantize == "nvfp4":
        layout = SCALE_LAYOUTS[0] if layout is None else layout
        if layout not in SCALE_LAYOUTS:
            raise InvalidArgument(f"{FUSED}: scale_layout={layout!r}; there is {', '.join(SCALE_LAYOUTS)}")
    check_row(hidden, quantize)
    unused = {
        "scale": group or quantize in (None, "fp8_per_token"),
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
    if group := group_of(quantize):
        codes = _output(given.quant_out, "quant_out", x, tuple(x.shape), _FP8)
        return None, codes.view(rows, hidden), _columns(given.scale_out, x.device, rows, hidden, group)
    scale = _static(given.scale, x.device)
    if quantize == "fp8":
        return scale, _output(given.quant_out, "quant_out", x, tuple(x.shape), _FP8).view(rows, hidden), None
    codes = _bytes(given.quant_out, "quant_out", x, (*x.shape[:-1], hidden // 2), exact=True)
    scales = _bytes(given.scale_out, "scale_out", x, scale_shape(rows, hidden, epilogue.scale_layout), exact=False)
    return scale, codes.view(rows, hidden // 2), scales


def _columns(scales: Any, device: torch.device, rows: int, hidden: int, group: int) -> torch.Tensor:
    """The memory that `scales` spans, a tensor [rows, columns] whose columns begin at multiples of four rows."""
    arguments.check_tensor(scales, device, f"{FUSED} scale_out")
    shape, wanted = (rows, (hidden // group + 3) // 4), (1, (rows + 3) // 4 * 4)
    strides = (right if size < 2 else found for size, right, found in zip(shape, wanted, scales.stride(), strict=False))
    if scales.dtype != torch.int32 or tuple(scales.shape) != shape or tuple(strides) != wanted:
        raise InvalidArgument(
            f"{FUSED} scale_out: {scales.dtype} of shape {tuple(scales.shape)}, strides {scales.stride()}; int32 of "
            f"shape {shape}, strides {wanted} is needed"
        )
    memory: torch.Tensor = scales.as_strided((rows + (shape[1] - 1) * wanted[1] if rows else 0,), (1,))
    return memory


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
    tensors = {name: getattr(call, name) for name in names} | (call.experts.tensors if call.experts else {})
    spans = [(name, t.data_ptr(), t.nbytes) for name, t in tensors.items() if t is not None and t.nbytes]
    for place, (name, start, nbytes) in enumerate(spans):
        if not name.endswith("_out"):
            break
        for other, first, length in spans[place + 1 :]:
            whole = first == start and (name, other) in same
            if first < start + nbytes and start < first + length and not whole:
                raise InvalidArgument(f"{FUSED}: {name} overlaps {other}; pass memory of its own, or none")
