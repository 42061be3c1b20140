"""Kernels that leave room for others: at most 128 registers a thread, so that two blocks of 256 threads, of whatever
kernels, share a multiprocessor of 65536 registers.

A kernel's compact form has the tiles of few ranks in flight at once (`COMPACT` in `kernels/specialization.py`). Kernels
without one are listed here: compiled for sm_80, sm_90 and sm_100, they would spill. A test compiles the others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tricomm.kernels.collectives.registry import Kernel

MOST_REGISTERS, COMPACT_REGISTERS = 255, 128
BESIDE_BLOCKS = 16  # of a group whose calls overlap other kernels
LARGEST_LL_WARPS = 8  # of compact forms: a word a thread, so tiles of 256 words at most
_MOST_RANKS, _MOST_LL_RANKS = 8, 4
_LARGE = frozenset(
    {
        "all_reduce_two_shot_ll",
        "all_reduce_hybrid_cube_mesh_two_shot_simple",
        "all_reduce_two_shot_zero_copy",
        "all_to_all_one_shot_ll",
        "all_reduce_multicast_simple",
    }
)
# Before sm_90 a number that is the same in all threads takes a register in each of them.
_LARGE_BEFORE_90 = frozenset(
    {
        "all_reduce_two_shot_simple",
        "broadcast_two_shot_simple",
        "all_reduce_one_shot_zero_copy",
        "reduce_scatter_one_shot_zero_copy",
    }
)


def has_compact_form(kernel: Kernel, device: str, world_size: int) -> bool:
    """True if `kernel` takes at most 128 registers a thread on `device` ("cpu", "sm_90", "cuda") without spilling."""
    if device == "cpu":
        return True
    older = not device.startswith("sm_") or int(device.removeprefix("sm_")) < 90
    if kernel.wide or kernel.name in _LARGE or (older and kernel.name in _LARGE_BEFORE_90):
        return False
    return (
        kernel.pairwise
        or kernel.needs_cube
        or world_size <= (_MOST_LL_RANKS if kernel.protocol == "ll" else _MOST_RANKS)
    )
