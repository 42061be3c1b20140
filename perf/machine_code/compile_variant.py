"""Compile one variant of a kernel for an NVIDIA GPU, without one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tricomm.errors import ResourceError
from tricomm.kernels.dtypes import DTYPES, reduction
from tricomm.kernels.launch.compiler import COMPILE_OPTIONS, compile_kernel
from tricomm.perf.machine_code import accesses as code


@dataclass(frozen=True)
class Variant:
    """One specialisation of a kernel, as it would be launched; `block` is the 64-bit words of a tile."""

    kernel: str
    arch: str
    dtype: str = "bfloat16"
    op: str = "sum"
    world_size: int = 8
    aligned: bool = True
    block: int = 512
    warps: int = 8


def compile_variant(function: Any, variant: Variant, fixed: dict[str, Any]) -> Any:
    """Triton's compiled kernel of `variant`, with its constexprs `fixed`: `.asm` has ttgir, ptx and cubin."""
    dtype = DTYPES[variant.dtype]
    element, op = reduction(dtype, variant.op)
    values = {
        **fixed, "ELEMENT": element, "OP": op, "WORLD_SIZE": variant.world_size, "BLOCK": variant.block,
        "LANES": variant.warps * 32, "ALIGNED": variant.aligned, "PTX": True, **_options(variant),
    }  # fmt: skip
    return compile_kernel(function, values, dtype.bits, variant.aligned, _capability(variant), fresh=True)


def _capability(variant: Variant) -> int:
    return int(variant.arch.removeprefix("sm_"))


def _options(variant: Variant) -> dict[str, Any]:
    return {**COMPILE_OPTIONS, "num_warps": variant.warps}


def with_plain_lines(ptx: str, cubin: bytes, variant: Variant) -> bytes:
    """`cubin` with a correct line table; raises `ResourceError` if the machine code changes with it."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler.compiler import make_backend

    backend = make_backend(GPUTarget("cuda", _capability(variant), 32))
    again = backend.make_cubin(ptx, {}, backend.parse_options(_options(variant)), _capability(variant))
    if code.text_of(again) != code.text_of(cubin):
        raise ResourceError(f"{variant.kernel}: ptxas made other code from the same PTX with other line numbers")
    return bytes(again)
