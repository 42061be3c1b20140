"""A user's functions of rows, before a call with them: whether they are callable, run, and return what they should.

After a call has been announced, the peers wait for its rows: then an error in a function would lose the group.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
import triton.language as tl

from tricomm.core.fused.fused_call import ROWS, UserEpilogue
from tricomm.errors import InvalidArgument, TricommError
from tricomm.kernels.device.epilogue import nothing
from tricomm.kernels.device.rows import in_fp32, try_functions
from tricomm.kernels.launch import interpreter, kernel_launch, triton_adapter
from tricomm.kernels.launch.memory_access import Access, Array


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


def check_unpacked(own: UserEpilogue) -> None:
    """Raises `InvalidArgument` for a function that unpacks the operands into another number of names: Triton before
    3.9 would leave some of them out."""
    count = len(own.operands)
    for name, function, place in (
        ("epilogue", own.function, 1),
        ("prepare", own.prepare, 1),
        ("prologue", own.prologue, 3),
    ):
        source = getattr(function, "src", None)  # an interpreted function has none; its trial fails
        names = None if source is None else _names(source, function.fn.__code__.co_varnames[place])
        if names not in (None, count):
            raise InvalidArgument(f"{ROWS}: {name} unpacks {names} operands, it is called with {count}")


@lru_cache
def _names(source: str, parameter: str) -> int | None:
    """The number of names into which a function unpacks `parameter`; None if it does not, or after an assignment."""
    definition = ast.parse(source).body[0]
    assert isinstance(definition, ast.FunctionDef), "@triton.jit takes nothing else"
    for statement in definition.body:
        if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Tuple | ast.List):
            names, value = statement.targets[0].elts, statement.value
            if isinstance(value, ast.Name) and value.id == parameter:
                return None if any(isinstance(n, ast.Starred) for n in names) else len(names)
        stored = (n.id for n in ast.walk(statement) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store))
        if parameter in stored:
            return None
    return None


class _Ended(Exception):
    """A trial cannot go on without the stores that it leaves out."""


class _WithoutStores:
    """The director of a trial: loads happen, stores do not. The trial ends where a value would depend on a store."""

    def __init__(self) -> None:
        self._stored: set[int] = set()

    def access(self, access: Access) -> None:
        addresses = access.addresses.tolist()
        if access.kind == "store":
            self._stored.update(addresses)
        elif access.kind == "load" and self._stored.isdisjoint(addresses):
            access.perform(None)
        else:
            raise _Ended

    def barrier(self) -> None:
        """Nothing: one block runs."""

    def compared(self, relation: str, left: Array, right: Array, result: Array) -> None:
        """Nothing: a trial's values are not examined."""


def attempt(
    own: UserEpilogue, constexprs: dict[str, Any], x: torch.Tensor, operands: Sequence[Any], timeout: float
) -> None:
    """Interpret the functions on row 0 of a call with `x`, with the constexprs of its kernel. None of their stores
    happens. Raises `InvalidArgument` for an error in them, and for a prologue that returns no block in the shape of its
    columns."""
    rows, prepare = kernel_launch.as_integers(x, 8 * x.itemsize), {"PREPARE": own.prepare}
    trials = {
        "prepare": (own.prepare, prepare),
        "prologue": (own.prologue, {"PROLOGUE": own.prologue}),
        "epilogue": (own.function, prepare | {"EPILOGUE": own.function}),
    }
    for name, (function, tried) in trials.items():
        if function is None or function is nothing:
            continue
        values = constexprs | {"PREPARE": nothing, "PROLOGUE": None, "EPILOGUE": nothing} | tried
        blocks = kernel_launch.programs(try_functions, 1, (rows, tuple(operands)), values)
        try:
            interpreter.interpret(blocks, timeout, director=_WithoutStores())
        except TricommError:
            raise
        except _Ended:
            continue
        except Exception as error:  # whatever a user's function may raise
            what = f"{name} {function.fn.__name__} on row 0 of these operands"
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
