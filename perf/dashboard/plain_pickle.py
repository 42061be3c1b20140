"""Reads a pickle of plain data: dicts, lists, tuples, text and numbers. Nothing in it is called."""

from __future__ import annotations

import pickletools
from collections.abc import Callable
from typing import Any

_Stack = list[Any]
_VALUES = {"BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "SHORT_BINUNICODE", "BINUNICODE"}
_MARKED = {"TUPLE", "APPENDS", "SETITEMS"}
# How many items an operation removes from the stack, before it changes the container below them or pushes a value.
_TAKEN = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3, "APPEND": 1, "SETITEM": 2}
_NEW: dict[str, Callable[[_Stack], Any]] = {
    **dict.fromkeys(("TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "EMPTY_TUPLE"), tuple),
    "EMPTY_LIST": list,
    "EMPTY_DICT": dict,
    "NONE": lambda items: None,
    "NEWTRUE": lambda items: True,
    "NEWFALSE": lambda items: False,
}


def decode(data: bytes) -> Any:
    """The value in `data`. Raises `ValueError` for data that is cut off or not plain."""
    stack, marks, memo = _Stack(), list[int](), dict[Any, Any]()
    try:
        for code, value, _ in pickletools.genops(data):
            name = code.name
            at = marks.pop() if name in _MARKED else len(stack) - _TAKEN.get(name, 0)
            items = stack[at:]
            del stack[at:]
            if name in _VALUES:
                stack.append(value)
            elif name in _NEW:
                stack.append(_NEW[name](items))
            elif name in ("APPEND", "APPENDS"):
                stack[-1].extend(items)
            elif name in ("SETITEM", "SETITEMS"):
                stack[-1].update(zip(items[::2], items[1::2], strict=True))
            elif name == "MARK":
                marks.append(len(stack))
            elif name in ("MEMOIZE", "BINPUT", "LONG_BINPUT"):
                memo[len(memo) if name == "MEMOIZE" else value] = stack[-1]
            elif name in ("BINGET", "LONG_BINGET"):
                if not isinstance(memo[value], str):  # nested shared containers would unfold without end
                    raise ValueError("it has a container in two places")
                stack.append(memo[value])
            elif name == "STOP":
                return stack.pop()
            elif name not in ("PROTO", "FRAME"):
                raise ValueError(f"it holds more than plain data ({name})")
    except (IndexError, KeyError, TypeError, AttributeError):
        raise ValueError("it is no pickle of plain data") from None
    raise ValueError("it is cut off")
