"""A user's functions of rows, before a call with them: whether they are callable, run, and return what they should.

After a call has been announced, the peers wait for its rows: then an error in a function would lose the group.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import triton.language as tl

from tricomm.core.fused.fused_call import ROWS, UserEpilogue
from tricomm.errors import InvalidArgument, TricommError
from tricomm.kernels.device.epilogue import nothing
from tricomm.kernels.device.rows import in_fp32, try_functions
from tricomm.kernels.launch import interpreter, kernel_launch, triton_adapter


def check_signatures(epilogue: Any, prepare: Any, prologue: Any) -> None:
    """Raises `InvalidArgument` unless these are `@triton.jit` functions of 3, 3 and 5 arguments; `prologue` may be
    None."""
    for name, function, count in (("epilogue", epilogue, 3), ("prepare", prepare, 3), ("prologue", prologue, 5)):
        if function is None and name == "prologue":
            continue
        if not triton_adapter.is_kernel(function):
            raise InvalidArgument(f"{ROWS}: {name} is no plain @triton.jit function: {type(function).__name__}")
        most, defaults = function.fn.__code__.co_argcount, len(function.fn.__defaults__ or ())
        if not most - defaults <= count <= most:
            raise InvalidArgument(f"{ROWS}: {name} takes {most} arguments, it is called with {count}")


def attempt(own: UserEpilogue, constexprs: dict[str, Any], operands: Sequence[Any], timeout: float) -> None:
    """Interpret `prepare` and the prologue on row 0, with the constexprs of the call's kernel. The epilogue writes, so
    it is not tried. Raises `InvalidArgument` for an error in them, and for a prologue that returns no such block."""
    for name, function in (("PREPARE", own.prepare), ("PROLOGUE", own.prologue)):
        if function is None or function is nothing:
            continue
        alone = constexprs | {"PREPARE": nothing, "PROLOGUE": None} | {name: function}
        try:
            interpreter.interpret(kernel_launch.programs(try_functions, 1, (tuple(operands),), alone), timeout)
        except TricommError:
            raise
        except Exception as error:  # whatever a user's function may raise
            what = f"{name.lower()} {function.fn.__name__} on row 0 of these operands"
            raise InvalidArgument(f"{ROWS}: {what}: {type(error).__name__}: {error}") from error


def _in_fp32(values: Any, columns: Any) -> Any:
    """`in_fp32` of the interpreter, which names what was returned."""
    block = isinstance(values, tl.tensor) and not values.dtype.is_ptr()
    if block and values.shape == columns.shape:
        return values.to(tl.float32)
    found = f"{values.dtype} of shape {_shape(values)}" if isinstance(values, tl.tensor) else type(values).__name__
    raise InvalidArgument(
        f"{ROWS}: the prologue returns {found}; it has to return a block of numbers in the shape of its columns, here "
        f"{_shape(columns)}"
    )


def _shape(block: Any) -> list[int]:
    return [getattr(n, "value", n) for n in block.shape]


interpreter.substitute(in_fp32, _in_fp32)
