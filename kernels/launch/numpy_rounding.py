"""bf16, minimum and maximum as a GPU computes them, in numpy, because Triton's interpreter differs."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


def round_to_bf16(values: NDArray[Any]) -> NDArray[Any]:
    """fp32 array to bf16 bit patterns (uint16), to nearest even; a NaN stays a NaN."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = (bits + (np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))) >> np.uint32(16)
    quiet = (bits >> np.uint32(16)) | np.uint32(0x40)
    return np.where(np.isnan(values), quiet, rounded).astype(np.uint16)


def widen_bf16(bits: NDArray[Any]) -> NDArray[Any]:
    """bf16 bit patterns to fp32, exactly."""
    return (np.ascontiguousarray(bits).astype(np.uint32) << np.uint32(16)).view(np.float32)


def minimum(a: NDArray[Any], b: NDArray[Any]) -> NDArray[Any]:
    """The smaller one; a NaN if there is one, and -0 is less than +0."""
    result: NDArray[Any] = np.minimum(a, b)
    if result.dtype.kind != "f":
        return result
    return np.where((result == 0) & (np.signbit(a) | np.signbit(b)), -np.abs(result), result)


def maximum(a: NDArray[Any], b: NDArray[Any]) -> NDArray[Any]:
    """The larger one, as `minimum`."""
    result: NDArray[Any] = np.maximum(a, b)
    if result.dtype.kind != "f":
        return result
    return np.where((result == 0) & ~(np.signbit(a) & np.signbit(b)), np.abs(result), result)
