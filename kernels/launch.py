"""Launch a Triton kernel where its tensors live: compiled on a GPU, interpreted on a CPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from tricomm.errors import InvalidArgument
from tricomm.kernels import adapter, interpreter, primitives
from tricomm.kernels.bound import bound, torch_device
from tricomm.kernels.compiled import takes_data

Call = Callable[[torch.Tensor, torch.Tensor, int, int], None]  # run(x, y, count, call)

interpreter.substitute(primitives.pause, adapter.yield_to_others)

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


def bind(
    kernel: Any, blocks: int, constexprs: dict[str, Any], dtype: str | None, aligned: bool, group: torch.Tensor,
    timeout: float = 600.0,
) -> Call:  # fmt: skip
    """One of our own kernels over `group`, with nothing left to decide but `run(x, y, count, call)`.

    `dtype` is that of x and y (None where the kernel takes none), `aligned` whether their addresses are multiples of
    16. On a GPU it is compiled and loaded here; raises `ResourceError` where that fails. What is returned serves one
    thread at a time.
    """
    if group.device.type == "cuda":
        return bound(kernel, blocks, constexprs, dtype, aligned, group, torch_device(group.device))

    def run(x: torch.Tensor, y: torch.Tensor, count: int, call: int) -> None:
        interpreter.interpret(
            programs(kernel, blocks, arguments(kernel, x, y, group, count, call), constexprs), timeout
        )

    return run


def arguments(
    kernel: Any, x: torch.Tensor, y: torch.Tensor, group: torch.Tensor, count: int, call: int
) -> tuple[Any, ...]:
    """What `kernel` takes of these, in its order."""
    return (x, y, group, count, call) if takes_data(kernel) else (group, call)


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
