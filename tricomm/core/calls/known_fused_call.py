"""A fused call that has been checked, kept so that it can be repeated without the checks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from tricomm import arguments
from tricomm.core.fused.fused_call import FusedCall
from tricomm.core.launch_plan import LaunchPlan
from tricomm.kernels.launch.kernel_launch import Again

# The tensors of a call, by their places in the tuples here, in the kernel's order. Tensors of experts may follow.
X, RESIDUAL_OUT, WEIGHT, RESIDUAL, NORM_OUT, SCALE, QUANT_OUT, SCALE_OUT, EXPERTS = range(9)
_ANYWHERE = EXPERTS + 1, EXPERTS + 2  # places and weights are read one by one, so they need no alignment
_OUTPUTS = (RESIDUAL_OUT, NORM_OUT, QUANT_OUT, SCALE_OUT)
_MAY_BE = {(RESIDUAL_OUT, RESIDUAL), (RESIDUAL_OUT, X), (NORM_OUT, X)}  # pairs that may be the same memory

Tensors = Sequence[torch.Tensor | None]


class KnownCall:
    """A call that was made before.

    look    the check of the given tensors (`arguments.look`)
    slots   for each tensor of the kernel: its place, the function that allocates it (None: it is given), bytes of an
            element and of all, and 15 if it has to be aligned, else 0
    apart   for each given output and each other given tensor: their indices in `slots`, their bytes, and whether they
            may be the same memory
    apart_at  the last addresses that passed the check of `apart`
    plans   by 2 * captured + aligned: the plan and the launch of its kernel
    """

    __slots__ = ("apart", "apart_at", "look", "plans", "slots")

    def __init__(self, looked_at: Sequence[torch.Tensor], given: Tensors, call: FusedCall, results: Tensors) -> None:
        blocks = call.epilogue.quantize == "nvfp4"
        bytewise = (SCALE, *_ANYWHERE) if blocks else (SCALE, SCALE_OUT, *_ANYWHERE)
        there = [(n, t) for n, t in enumerate(results) if t is not None]
        self.look = arguments.look(*looked_at)
        self.slots = [
            (n, None if given[n] is not None else _maker(n, t, blocks), t.itemsize, t.nbytes, 15 * (n not in bytewise))
            for n, t in there
        ]
        given_ones = [(at, n, t.nbytes) for at, (n, t) in enumerate(there) if given[n] is not None]
        self.apart = [
            (at, other, nbytes, more, (n, m) in _MAY_BE)
            for at, n, nbytes in given_ones
            if n in _OUTPUTS
            for other, m, more in given_ones
            if m not in _OUTPUTS or m > n
        ]
        self.apart_at: list[int] = []
        self.plans: list[tuple[LaunchPlan, Again] | None] = [None] * 4


def _maker(place: int, like: torch.Tensor, blocks: bool) -> Callable[[], torch.Tensor]:
    if place == SCALE:  # the tensor of a scale that was given as a number
        return lambda: like
    if place == SCALE_OUT and blocks:  # matrix multiplications read its padding
        shape, dtype, device = like.shape, like.dtype, like.device
        return lambda: torch.zeros(shape, dtype=dtype, device=device)
    return arguments.allocator(like)
