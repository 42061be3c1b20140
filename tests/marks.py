"""Which parameters of a test `make test` runs, which are left to `make test-all`, and which this Triton has."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest

from tricomm.kernels.collectives.registry import Kernel


def some(values: Iterable[Any], keep: Callable[[int, Any], bool] | int) -> list[Any]:
    """`values` as parameters; those that are not kept are marked `exhaustive`.

    `keep` decides by number and value; a number n keeps each nth one, the first among them. A parameter that has marks
    already stays as it is.
    """
    chosen = keep if callable(keep) else lambda number, value: number % keep == 0
    return [
        value if getattr(value, "marks", ()) or chosen(number, value) else _exhaustive(value)
        for number, value in enumerate(values)
    ]


def compiles(kernel: Kernel, architecture: int = 90) -> bool:
    """False for a kernel of wide words, or through a switch, that this Triton or `architecture` is refused."""
    return kernel.why_not_compiled(architecture) is None


def _exhaustive(value: Any) -> Any:
    value = value.values if hasattr(value, "marks") else value  # a dict has values, too
    return pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.exhaustive)
