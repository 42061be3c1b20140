"""Marks that choose a test's parameters for `make test`, `make test-all` and `make soak`, and for this Triton."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest

from tricomm.kernels.collectives.registry import Kernel

_Choice = Callable[[int, Any], bool]


def some(values: Iterable[Any], keep: _Choice | int, soak: _Choice = lambda number, value: False) -> list[Any]:
    """`values` as parameters, marked `exhaustive` or `soak` unless they are kept.

    `keep` and `soak` decide by number and value; a number n keeps each nth one, the first among them. A parameter that
    has marks already stays as it is.
    """
    chosen = keep if callable(keep) else lambda number, value: number % keep == 0
    return [
        value
        if getattr(value, "marks", ()) or chosen(number, value)
        else _marked(value, pytest.mark.soak if soak(number, value) else pytest.mark.exhaustive)
        for number, value in enumerate(values)
    ]


def odd(number: int, value: Any) -> bool:
    """Every second one."""
    return number % 2 == 1


def most(number: int, value: Any) -> bool:
    """All but every third one."""
    return number % 3 != 0


def compiles(kernel: Kernel, architecture: int = 90) -> bool:
    """False for a kernel of wide words, or through a switch, that this Triton or `architecture` is refused."""
    return kernel.why_not_compiled(architecture) is None


def _marked(value: Any, mark: pytest.MarkDecorator) -> Any:
    value = value.values if hasattr(value, "marks") else value  # a dict has values as well
    return pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=mark)
