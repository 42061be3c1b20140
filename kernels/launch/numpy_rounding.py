"""In numpy: bf16, minimum, maximum and the bits of a NaN as on a GPU, because Triton's interpreter differs."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

# Arithmetic on a GPU does not keep the payload of a NaN; x86 keeps the first operand's, so a + b and b + a differ.
_NANS: dict[np.dtype[Any], Any] = {
    np.dtype(np.float16): np.uint16(0x7FFF).view(np.float16),
    np.dtype(np.float32): np.uint32(0x7FFFFFFF).view(np.float32),
    np.dtype(np.float64): np.float64(np.nan),
}


def canonical(values: NDArray[Any]) -> NDArray[Any]:
    """`values`, with each NaN replaced by the NaN that a GPU's arithmetic gives, whatever its sign and payload."""
    nan = _NANS.get(values.dtype)
    strange: NDArray[Any] = values != values
    return values if nan is None or not strange.any() else np.where(strange, nan, values)


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
    return canonical(np.where((result == 0) & (np.signbit(a) | np.signbit(b)), -np.abs(result), result))


def maximum(a: NDArray[Any], b: NDArray[Any]) -> NDArray[Any]:
    """The larger one; a NaN if there is one, and +0 is more than -0."""
    result: NDArray[Any] = np.maximum(a, b)
    if result.dtype.kind != "f":
        return result
    return canonical(np.where((result == 0) & ~(np.signbit(a) & np.signbit(b)), np.abs(result), result))
