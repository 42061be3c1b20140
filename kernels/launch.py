"""Launch a Triton kernel where its tensors live: compiled on a GPU, interpreted on a CPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tricomm.kernels import interpreter, primitives

interpreter.substitute(primitives.pause, interpreter.yield_to_others)

# Fused multiply-add is off: a sum must have the same bits in every kernel that adds in the same order. The register
# limit is the hardware's own: without one, ptxas spills a register or two to make room for blocks that never come.
COMPILE_OPTIONS = {"num_warps": 8, "enable_fp_fusion": False, "maxnreg": 255}


def launch(
    kernel: Any,
    grid: Sequence[int],
    args: Sequence[Any],
    constexprs: dict[str, Any],
    device: torch.device,
    timeout: float = 600.0,
) -> None:
    """Run `kernel` over `grid` with positional `args` and keyword `constexprs`.

    On a GPU this enqueues on the current stream and returns; on a CPU it returns when all blocks have run.
    """
    if device.type == "cuda":
        with torch.cuda.device(device):  # Triton launches on the current device, whatever the tensors say
            kernel[tuple(grid)](*args, **COMPILE_OPTIONS, **constexprs)
    else:
        interpreter.interpret(kernel, grid, args, constexprs, timeout)
