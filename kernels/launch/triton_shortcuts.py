"""Caches for values that Triton's interpreter computes again and again. They change only the time, not the results.

An interpreted operation costs some hundred Python calls, nearly all of them about types and shapes. A kernel has few
different ones, so they are computed once. `triton_adapter` installs these functions during a launch, with its other
changes of the language.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partialmethod
from typing import Any

import triton.language as tl
from triton.runtime import interpreter as _triton

Change = tuple[Any, str, Any, Any]
_MOST_CONSTANTS = 4096
# The code of the wrapper that `tl.core.builtin` makes; it checks for `_semantic` and passes all arguments on.
_BUILTIN = tl.core.builtin(lambda: None).__code__


def changes() -> list[Change]:
    """(owner, attribute, present value, value during a launch) of each change."""
    builder = _triton.interpreter_builder
    semantic = type(_triton.interpreter_semantic)
    # The overflow check of integers costs eight operations, and its result is used only with `debug`.
    unchecked = replace(builder.options, sanitize_overflow=builder.options.debug)
    shortcuts = (
        (_triton, "_get_np_dtype", _np_dtype),
        (tl.core.block_type, "__init__", _block_type),
        (tl.core.tensor, "__init__", _tensor),
        (semantic, "broadcast_impl_value", _broadcast),
        (semantic, "binary_op_type_checking_impl", _operands),
    )
    known = [(owner, name, vars(owner)[name], short) for owner, name, short in shortcuts if name in vars(owner)]
    # Jitted functions that are methods of a tensor, such as x.sum(0). Only the compiler passes the tensor to them.
    methods = [(name, own) for name, own in vars(tl.core.tensor).items() if hasattr(own, "fn")]
    return [
        *((tl.core.tensor, name, own, partialmethod(own)) for name, own in methods),
        (builder, "options", builder.options, unchecked),
        *((owner, name, own, short(own)) for owner, name, own, short in known),
    ]


def direct(operation: Any) -> Any:
    """The interpreter's implementation of an operation of the language, without its two wrappers."""
    inner: Any = (getattr(operation, "__kwdefaults__", None) or {}).get("member")
    if getattr(inner, "__code__", None) is not _BUILTIN:
        return operation
    function, semantic = inner.__wrapped__, _triton.interpreter_semantic

    def call(*args: Any, **kwargs: Any) -> Any:
        kwargs["_semantic"] = semantic
        return function(*args, **kwargs)

    return call


def _np_dtype(original: Callable[..., Any]) -> Callable[..., Any]:
    made: dict[str, Any] = {}

    def get_np_dtype(kind: Any) -> Any:
        dtype = made.get(kind.name)
        if dtype is None:
            dtype = made[kind.name] = original(kind)
        return dtype

    return get_np_dtype


def _block_type(original: Callable[..., Any]) -> Callable[..., Any]:
    made: dict[tuple[int, ...], tuple[Any, int, str]] = {}

    def init(self: Any, element_ty: Any, shape: Any) -> None:
        key = tuple(shape)
        plain = isinstance(shape, list | tl.tuple) and all([type(size) is int for size in key])
        known = made.get(key) if plain else None
        if known is None:
            original(self, element_ty, shape)
            if plain:
                made[key] = self.shape, self.numel, str(self.shape)
        else:
            self.element_ty = element_ty
            self.shape, self.numel, text = known
            self.name = f"<{text}, {element_ty}>"

    return init


def _tensor(original: Callable[..., Any]) -> Callable[..., Any]:
    made: dict[tuple[int, ...], tuple[Any, Any]] = {}

    def init(self: Any, handle: Any, type: Any) -> None:
        key = tuple(type.shape) if type.is_block() else ()
        known = made.get(key)
        if known is None:
            original(self, handle, type)
            made[key] = self.shape, self.numel
        else:
            self.handle, self.type, self.dtype = handle, type, type.scalar
            self.shape, self.numel = known

    return init


def _broadcast(original: Callable[..., Any]) -> Callable[..., Any]:
    def broadcast(self: Any, left: Any, right: Any) -> Any:
        if left.shape is right.shape:  # `_tensor` gives tensors of one shape the same object
            return left, right
        return original(self, left, right)

    return broadcast


def _operands(original: Callable[..., Any]) -> Callable[..., Any]:
    """Caches the type checks of two tensors that need no conversion, and the tensor of a number."""
    tensor = tl.core.tensor
    unchanged: set[tuple[Any, ...]] = set()
    constants: dict[tuple[Any, ...], Any] = {}

    def operands(self: Any, left: Any, right: Any, *how: Any, **named: Any) -> Any:
        if named or left.__class__ is not tensor:
            return original(self, left, right, *how, **named)
        if right.__class__ is int:
            key = (right, left.type.name, how)
            known = constants.get(key)
            if known is None:
                pair = original(self, left, right, *how)
                if pair[0] is left:
                    if len(constants) >= _MOST_CONSTANTS:
                        constants.clear()
                    pair[1].handle.data.flags.writeable = False
                    constants[key] = pair[1]
                return pair
            return left, known
        if right.__class__ is tensor and left.shape is right.shape:
            key = (left.dtype.name, right.dtype.name, how)
            if key in unchanged:
                return left, right
            pair = original(self, left, right, *how)
            if pair[0] is left and pair[1] is right:
                unchanged.add(key)
            return pair
        return original(self, left, right, *how)

    return operands
