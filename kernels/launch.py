"""Launch a Triton kernel where its tensors live: compiled on a GPU, interpreted on a CPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from tricomm.errors import InvalidArgument
from tricomm.kernels import interpreter, primitives

interpreter.substitute(primitives.pause, interpreter.yield_to_others)

# Fused multiply-add is off: a sum must have the same bits in every kernel that adds in the same order. The register
# limit is the hardware's own: without one, ptxas spills a register or two to make room for blocks that never come.
COMPILE_OPTIONS = {"num_warps": 8, "enable_fp_fusion": False, "maxnreg": 255}
_GPU_ONLY = ("num_warps", "num_stages", "num_ctas", "maxnreg", "enable_fp_fusion", "launch_pdl")


def prepare(
    kernel: Any,
    grid: int | Sequence[int] | Callable[[dict[str, Any]], Any],
    args: Sequence[Any],
    constexprs: dict[str, Any],
    device: torch.device,
    timeout: float = 600.0,
) -> Callable[[], None]:
    """Check a launch and return what runs it; raises `InvalidArgument` where grid or arguments do not fit.

    `constexprs` may hold launch options such as `num_warps`, which mean nothing to the interpreter. What is returned
    enqueues on the current stream of a GPU; on a CPU it returns when all blocks have run.
    """
    size = _grid(grid, constexprs)
    if device.type == "cuda":
        return lambda: _compiled(kernel, size, args, constexprs, device)
    known = {p.name for p in kernel.params}
    given = {n: v for n, v in constexprs.items() if n in known or n not in _GPU_ONLY}
    interpreter.check(kernel, args, given)
    return lambda: interpreter.interpret(kernel, size, args, given, timeout)


def _compiled(
    kernel: Any, grid: tuple[int, ...], args: Sequence[Any], options: dict[str, Any], device: torch.device
) -> None:
    with torch.cuda.device(device):  # Triton launches on the current device, whatever the tensors say
        kernel[grid](*args, **options)


def _grid(grid: Any, constexprs: dict[str, Any]) -> tuple[int, ...]:
    found = grid(constexprs) if callable(grid) else grid
    size = (found,) if isinstance(found, int) else tuple(found) if isinstance(found, Sequence) else ()
    if not 1 <= len(size) <= 3 or any(isinstance(n, bool) or not isinstance(n, int) or n < 1 for n in size):
        raise InvalidArgument(f"grid={grid!r}: one to three positive numbers of blocks are needed")
    return size
