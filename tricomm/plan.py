"""A launch plan: everything about a call that its shape decides, worked out once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tricomm import calls
from tricomm.kernels import registry
from tricomm.kernels.compiled import COMPILE_OPTIONS
from tricomm.kernels.launch import Call
from tricomm.kernels.layout import MAX_WORLD_SIZE
from tricomm.selection import Choice, Site
from tricomm.store.control import Descriptor, Record

# Of a kernel, a number of blocks, constexprs, the tensors' dtype, and whether they are aligned: `Runtime.bind`.
Bind = Callable[[Any, int, dict[str, Any], str | None, bool], Call]


@dataclass(frozen=True)
class Plan:
    """One kernel, bound to a shape: launch it with addresses and a call number, nothing else is left to decide."""

    choice: Choice
    fingerprint: int
    record: Record  # what the peers read of each of its calls
    run: Call


def make(
    site: Site, choice: Choice, op: str, dtype: torch.dtype | None, count: int, aligned: bool, mode: str, bind: Bind
) -> Plan:
    """Bind `choice` to `count` elements of `dtype` (None for a barrier), by `Runtime.bind`.

    `aligned` is a fact of this rank's tensors alone: it picks another compile of the same kernel, and takes no part
    in the fingerprint or in anything that a peer sees.
    """
    kernel = registry.find(choice.collective, choice.algorithm, choice.protocol)
    gpu = site.device != "cpu"
    constexprs: dict[str, Any] = {
        "WORLD_SIZE": site.world_size,
        "BLOCK": choice.block,
        "LANES": 32 * choice.warps if gpu else MAX_WORLD_SIZE,
        "PTX": gpu,
    }
    if gpu:  # LANES is the number of threads: the two go together
        constexprs |= COMPILE_OPTIONS | {"num_warps": choice.warps}
    if kernel.reduces:
        constexprs["OP"] = op
    if dtype is not None:
        constexprs["ALIGNED"] = aligned
    name = calls.DTYPES[dtype] if dtype is not None else "none"
    op = op if kernel.reduces else "none"
    facts = (
        choice.collective,
        op,
        name,
        count,
        -1,
        choice.algorithm,
        choice.protocol,
        choice.blocks,
        choice.block,
        mode,
    )
    fingerprint = calls.fingerprint(*facts)
    descriptor = Descriptor(
        sequence=0, fingerprint=fingerprint, collective=choice.collective, op=op, dtype=name,
        algorithm=choice.algorithm, protocol=choice.protocol, count=count, root=-1, grid=choice.blocks, mode=mode,
    )  # fmt: skip
    run = bind(kernel.function, choice.blocks, constexprs, name if dtype is not None else None, aligned)
    return Plan(choice, fingerprint, descriptor.record(), run)
