"""GPU features that are not simulated, and a remedy for kernels that use one."""

from __future__ import annotations

import re

from tricomm.explorer.ptx.instructions import Instruction

# Pattern of instruction names, feature, remedy. The first pattern that matches counts.
_FEATURES = {
    r"setmaxnreg": (
        "warp specialisation",
        "take a configuration with warp_specialize=False, or compile for sm_80 (--compiled sm_80), where Triton makes "
        "none",
    ),
    r"wgmma|tcgen05": (
        "matrix instructions of a warp group",
        "compile for sm_80 (--compiled sm_80; sm_89 for fp8), where Triton takes mma.sync; on sm_90 it does so with "
        "num_warps below 4 or 32 rows a tile",
    ),
    r".*\bcluster\.|mapa|getctarank|clusterlaunchcontrol": ("clusters of blocks", "take num_ctas=1"),
    r".*\b(bulk|tensormap|mbarrier)": (
        "TMA and its barriers",
        "compile for sm_80 (--compiled sm_80), where Triton makes ordinary loads and stores of tensor descriptors",
    ),
    r"mma": ("this matrix instruction", "take f16, bf16, fp8, or float32 as tf32, with sums in float32"),
    r"call": (
        "calls of device functions",
        "take out tl.device_print and tl.device_assert, and write in Triton what comes from a library of device code",
    ),
}
_PATTERNS = [(re.compile(pattern), *said) for pattern, said in _FEATURES.items()]


def unsupported(instruction: Instruction) -> str | None:
    """The feature that an instruction belongs to, and a remedy; None if it belongs to none of these features."""
    for pattern, feature, remedy in _PATTERNS:
        if pattern.match(instruction.name):
            return f"{feature}: not simulated; {remedy}"
    return None
