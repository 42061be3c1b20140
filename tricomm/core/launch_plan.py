"""A launch plan: everything about a call that its shape decides, worked out once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from tricomm import arguments
from tricomm.errors import InvalidArgument
from tricomm.kernels.collectives import registry
from tricomm.kernels.dtypes import Dtype, reduction
from tricomm.kernels.launch.compiler import COMPILE_OPTIONS, extras
from tricomm.kernels.launch.kernel_launch import BoundKernel
from tricomm.kernels.layout import MAX_WORLD_SIZE
from tricomm.metrics.counters import Tally
from tricomm.policy.selection import Choice, Site
from tricomm.store.control import Descriptor, Record

# Of a kernel, a number of blocks, constexprs, the width of the integers that it moves, whether the tensors are
# aligned, and its further arguments: `Runtime.bind`.
Bind = Callable[[Any, int, dict[str, Any], int | None, bool, Sequence[int | torch.Tensor]], BoundKernel]


@dataclass(frozen=True)
class Asked:
    """What a call is, on every rank alike: `count` elements a row; op and dtype are None where there are none.

    How many rows go where is no part of it, if they are uneven: each rank has its own numbers, in every call others.
    """

    collective: str
    op: str | None
    dtype: Dtype | None
    count: int
    root: int = -1
    table: torch.Tensor | None = None  # of a symmetric handle
    handle: int = 0  # its number, the same on all ranks


@dataclass(frozen=True)
class Plan:
    """One kernel, bound to a shape: launch it with addresses and a call number, and uneven rows with their numbers.
    Nothing else is left to decide.

    `numel` is the kernel's count, of raw elements; `count[0]` is how often calls of its kind were made.
    """

    choice: Choice
    fingerprint: int
    numel: int
    record: Record  # what the peers read of each of its calls
    run: BoundKernel
    count: list[int] = field(default_factory=lambda: [0])
    mode: str = "eager"
    tally: Tally = field(default_factory=Tally)
    weight: int = 0  # what a call adds to the tally


class Known:
    """An all_reduce in place that has been planned: bytes of an element and of all, and the plans of tensors not
    aligned and aligned."""

    __slots__ = ("itemsize", "nbytes", "plans")

    def __init__(self, itemsize: int, count: int) -> None:
        self.itemsize, self.nbytes = itemsize, itemsize * count
        self.plans: list[Plan | None] = [None, None]


def make(
    site: Site, choice: Choice, asked: Asked, aligned: bool, mode: str, bind: Bind, counter: list[int] | None = None
) -> Plan:  # fmt: skip
    """Bind `choice` to what was asked, by `Runtime.bind`. Raises `InvalidArgument` for an op that the type has not.

    `aligned` is a fact of this rank's tensors alone: it picks another compile of the same kernel, and takes no part
    in the fingerprint or in anything that a peer sees.
    """
    kernel = registry.find(choice.collective, choice.algorithm, choice.protocol, choice.zero_copy)
    values = constexprs(site, choice, kernel)
    dtype = asked.dtype
    if kernel.reduces and dtype is not None:
        try:
            values["ELEMENT"], values["OP"] = reduction(dtype, asked.op or "")
        except InvalidArgument as error:
            raise InvalidArgument(f"{asked.collective}: {error}") from None
    if dtype is not None:
        values["ALIGNED"] = aligned
    op = asked.op if kernel.reduces and asked.op is not None else "none"
    fingerprint, record = announced(choice, op, dtype.name if dtype is not None else "none", asked, mode)
    further: dict[str, Any] = {"root": asked.root, "table": asked.table}
    more = [further[name] for name in extras(kernel.function)]
    bits = dtype.bits if dtype is not None else None
    run = bind(kernel.function, choice.blocks, values, bits, aligned, more)
    numel = asked.count * (dtype.lanes if dtype is not None else 1)
    return Plan(choice, fingerprint, numel, record, run, [0] if counter is None else counter, mode)


def announced(choice: Choice, op: str, dtype: str, asked: Asked, mode: str) -> tuple[int, Record]:
    """The fingerprint of a call, and what the peers read of it."""
    fingerprint = arguments.fingerprint(
        choice.collective, op, dtype, asked.count, asked.root, choice.algorithm, choice.protocol, choice.blocks,
        choice.block, mode, asked.handle,
    )  # fmt: skip
    descriptor = Descriptor(
        sequence=0, fingerprint=fingerprint, collective=choice.collective, op=op, dtype=dtype,
        algorithm=choice.algorithm, protocol=choice.protocol, count=asked.count, root=asked.root, grid=choice.blocks,
        mode=mode,
    )  # fmt: skip
    return fingerprint, descriptor.record()


def constexprs(site: Site, choice: Choice, kernel: registry.Kernel) -> dict[str, Any]:
    """What `kernel` is compiled for, whatever tensors it is given."""
    gpu = site.device != "cpu"
    found: dict[str, Any] = {
        "WORLD_SIZE": site.world_size,
        "BLOCK": choice.block,
        "LANES": 32 * choice.warps if gpu else MAX_WORLD_SIZE,
        "PTX": gpu,
        **kernel.fixed,
    }
    # LANES is the number of threads: the two go together.
    return found | COMPILE_OPTIONS | {"num_warps": choice.warps} if gpu else found
