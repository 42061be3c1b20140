"""Launch a Triton kernel on the device of its tensors: compiled on a GPU, interpreted on a CPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from tricomm.errors import InvalidArgument
from tricomm.kernels import primitives, wide_words
from tricomm.kernels.launch import interpreted_wide, interpreter, triton_adapter
from tricomm.kernels.launch.cuda_launcher import make_launcher, torch_device
from tricomm.kernels.specialization import specialized

GroupArgument = tuple[Any, ...]  # `layout.group_argument`
# The arguments of one call other than its two tensors, a tuple for each parameter: the numbers of uneven rows to and
# from each rank, or the operands of an epilogue. Empty if the kernel takes neither.
Rows = tuple[tuple[Any, ...], ...]


# Launches a compiled kernel again: takes the addresses of its tensors, the call's number and the stream's handle.
Again = Callable[[Sequence[int], int, int], None]


class BoundKernel(Protocol):
    """One of our kernels, compiled and bound to a group: called with tensors and numbers, by one thread at a time."""

    def __call__(self, x: torch.Tensor, y: torch.Tensor, count: int, call: int, rows: Rows = ()) -> None: ...


_LANES = 1  # the interpreter has no threads

interpreter.substitute(primitives.pause, triton_adapter.yield_to_others)
interpreter.substitute(primitives.set_flag, lambda pointer, value: primitives.store_flag(pointer, value, _LANES, False))
interpreter.substitute(
    primitives.wait_flag, lambda group, pointer, value: primitives.await_flag(group, pointer, value, _LANES, False)
)
interpreter.substitute(wide_words.store_wide, interpreted_wide.store)
interpreter.substitute(wide_words.load_wide, interpreted_wide.load)

_INTEGERS = {8: torch.int8, 16: torch.int16, 32: torch.int32, 64: torch.int64}
_GPU_ONLY = ("num_warps", "num_stages", "num_ctas", "maxnreg", "enable_fp_fusion", "launch_pdl")


def prepare(
    kernel: Any,
    grid: int | Sequence[int] | Callable[[dict[str, Any]], Any],
    args: Sequence[Any],
    constexprs: dict[str, Any],
    device: torch.device,
    timeout: float = 600.0,
    interrupt: Callable[[], None] | None = None,
) -> Callable[[], None]:
    """Check a launch and return a function that runs it; raises `InvalidArgument` if grid or arguments do not fit.

    `constexprs` may hold launch options such as `num_warps`, which the interpreter ignores. The returned function
    enqueues on the current stream of a GPU; on a CPU it returns when all blocks have run, or when `interrupt`, which it
    calls at each access and branch, has raised an error.
    """
    if device.type == "cuda":
        size = grid_size(grid, constexprs)
        return lambda: _compiled(kernel, size, args, constexprs, device)
    blocks = programs(kernel, grid, args, constexprs)
    return lambda: interpreter.interpret(blocks, timeout, interrupt)


def bind(
    kernel: Any, blocks: int, constexprs: dict[str, Any], bits: int | None, aligned: bool,
    more: Sequence[int | torch.Tensor], group: GroupArgument, timeout: float = 600.0,
) -> BoundKernel:  # fmt: skip
    """Bind one of our kernels to `group` (`layout.group_argument`).

    `bits` is the width of the integers that the kernel moves (None if it takes no tensors), `aligned` whether the
    addresses of x and y are multiples of 16, `more` the values of the kernel's `compiler.extras`. On a GPU it is
    compiled and loaded here; raises `ResourceError` if that fails.
    """
    device = group[0].device
    if device.type == "cuda":
        return make_launcher(kernel, blocks, constexprs, bits, aligned, more, group, torch_device(device))

    def run(x: torch.Tensor, y: torch.Tensor, count: int, call: int, rows: Rows = ()) -> None:
        args = arguments(x, y, bits, group, count, call, rows, more)
        interpreter.interpret(programs(kernel, blocks, args, constexprs), timeout)

    return run


def arguments(
    x: torch.Tensor,
    y: torch.Tensor,
    bits: int | None,
    group: GroupArgument,
    count: int,
    call: int,
    rows: Rows,
    more: Sequence[int | torch.Tensor],
) -> tuple[Any, ...]:
    """The arguments of a kernel in its order, for the interpreter."""
    if bits is None:
        return (group, call, *more)
    return (as_integers(x, bits), as_integers(y, bits), group, count, call, *rows, *more)


def as_integers(x: torch.Tensor, bits: int) -> torch.Tensor:
    """`x` as the integers that a kernel moves, because the interpreter takes a pointer's type from its tensor."""
    flat = torch.view_as_real(x) if x.is_complex() else x
    return flat.view(_INTEGERS[bits])


def programs(kernel: Any, grid: Any, args: Sequence[Any], constexprs: dict[str, Any]) -> list[interpreter.Program]:
    """The blocks of a launch for the interpreter; raises `InvalidArgument` if grid or arguments do not fit."""
    size = grid_size(grid, constexprs)
    known = {p.name for p in triton_adapter.parameters(kernel)}
    given = {n: v for n, v in constexprs.items() if n in known or n not in _GPU_ONLY}
    return interpreter.programs(kernel, size, args, specialized(known, given))


def _compiled(
    kernel: Any, grid: tuple[int, ...], args: Sequence[Any], options: dict[str, Any], device: torch.device
) -> None:
    with torch.cuda.device(device):  # Triton launches on the current device, not on that of the tensors
        kernel[grid](*args, **options)


def grid_size(grid: Any, constexprs: dict[str, Any]) -> tuple[int, ...]:
    """One to three positive numbers of blocks; raises `InvalidArgument` for anything else."""
    blocks = grid(constexprs) if callable(grid) else grid
    size = (blocks,) if isinstance(blocks, int) else tuple(blocks) if isinstance(blocks, Sequence) else ()
    if not 1 <= len(size) <= 3 or any(isinstance(n, bool) or not isinstance(n, int) or n < 1 for n in size):
        raise InvalidArgument(f"grid={grid!r}: one to three positive numbers of blocks are needed")
    return size
