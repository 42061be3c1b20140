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

The norm of fp32 is computed in fp64, all else in fp32, rounded to nearest even. A maximum ignores NaN; a NaN becomes
NaN in e4m3 and 6 in e2m1, as in a GPU's conversions.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

FUSED = "all_reduce_rms_norm"
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
    quantize       one of `QUANTIZATIONS`, or None
    scale_layout   of the block scales of nvfp4: one of `SCALE_LAYOUTS`; "" otherwise
    """

    hidden: int
    weight: torch.dtype
    eps: float
    weight_bias: float = 0.0
    residual: bool = True
    norm: bool = True
    quantize: str | None = None
    scale_layout: str = ""

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
        return ",".join(parts)


class UserEpilogue(NamedTuple):
    """A user's own epilogue, whose function finishes each row; the same on every rank.

    hidden     elements of a row
    function   `@triton.jit` function of (row, operands, SPEC)
    prepare    `@triton.jit` function of (number, operands, SPEC), which runs before the row has arrived
    operands   Triton's types of the operands
    """

    hidden: int
    function: Any
    prepare: Any
    operands: tuple[str, ...]

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
        names = tuple(f"{f.fn.__module__}:{f.fn.__qualname__}" for f in (self.function, self.prepare))
        return (self.hidden, *names, self.operands)

    def text(self) -> str:
        """In words, for the record that the peers read."""
        return f"{self.hidden},{self.function.fn.__qualname__}"


class FusedCall(NamedTuple):
    """One rank's checked tensors of a call: contiguous, on the communicator's device, without overlap except as below.

    x              [rows, hidden], of fp16, bf16 or fp32
    residual       [rows, hidden], of x's type, or None
    weight         [hidden], of x's type or fp32
    residual_out   [rows, hidden], of x's type; may be `residual` itself, or x itself
    norm_out       [rows, hidden], of x's type; may be x itself; None if `Epilogue.norm` is not set
    scale          fp32, one element: static of fp8, global of nvfp4; None otherwise
    quant_out      fp8: [rows, hidden] of float8_e4m3fn; nvfp4: [rows, hidden / 2] of uint8; None otherwise
    scale_out      fp8_per_token: [rows, 1] of fp32. nvfp4: contiguous uint8, linear: [rows, hidden / 16];
                   swizzled_128x4: [rows up to a multiple of 128, hidden / 16 up to a multiple of 4], in tiles of 512
                   bytes; the scale of (row, block) is byte (row % 32) * 16 + row // 32 % 4 * 4 + block % 4 of tile
                   (row // 128, block // 4); padding is left unchanged. None otherwise
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
