"""Launch a Triton kernel where its tensors live: compiled on a GPU, interpreted on a CPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from tricomm.errors import InvalidArgument
from tricomm.kernels import adapter, interpreter, primitives

interpreter.substitute(primitives.pause, adapter.yield_to_others)

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
    if device.type == "cuda":
        size = grid_size(grid, constexprs)
        return lambda: _compiled(kernel, size, args, constexprs, device)
    blocks = programs(kernel, grid, args, constexprs)
    return lambda: interpreter.interpret(blocks, timeout)


def programs(kernel: Any, grid: Any, args: Sequence[Any], constexprs: dict[str, Any]) -> list[interpreter.Program]:
    """The blocks of a launch for the interpreter; raises `InvalidArgument` where grid or arguments do not fit."""
    size = grid_size(grid, constexprs)
    known = {p.name for p in kernel.params}
    given = {n: v for n, v in constexprs.items() if n in known or n not in _GPU_ONLY}
    return interpreter.programs(kernel, size, args, given)


def _compiled(
    kernel: Any, grid: tuple[int, ...], args: Sequence[Any], options: dict[str, Any], device: torch.device
) -> None:
    with torch.cuda.device(device):  # Triton launches on the current device, whatever the tensors say
        kernel[grid](*args, **options)


def grid_size(grid: Any, constexprs: dict[str, Any]) -> tuple[int, ...]:
    """One to three positive numbers of blocks; raises `InvalidArgument` for anything else."""
    found = grid(constexprs) if callable(grid) else grid
    size = (found,) if isinstance(found, int) else tuple(found) if isinstance(found, Sequence) else ()
    if not 1 <= len(size) <= 3 or any(isinstance(n, bool) or not isinstance(n, int) or n < 1 for n in size):
        raise InvalidArgument(f"grid={grid!r}: one to three positive numbers of blocks are needed")
    return size
