"""bf16 as a GPU converts it, in numpy: what Triton's interpreter computes otherwise."""

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
