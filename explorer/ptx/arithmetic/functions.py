"""The functions that templates may call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

F = TypeVar("F", bound=Callable[..., Any])

FUNCTIONS: dict[str, Any] = {
    **{kind: np.dtype(kind) for kind in ("u1", "u2", "u4", "u8", "i1", "i2", "i4", "i8", "f2", "f4", "f8", "V16")},
    "minimum": np.minimum,
    "maximum": np.maximum,
    "fmod": np.fmod,
    "absolute": np.absolute,
    "sqrt": np.sqrt,
}


def function(implementation: F) -> F:
    """Make `implementation` available to templates under its name."""
    FUNCTIONS[implementation.__name__] = implementation
    return implementation
