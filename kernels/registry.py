"""The kernels that tricomm ships, by (collective, algorithm, protocol), with what each one costs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from tricomm.errors import InvalidArgument
from tricomm.kernels.all_gather_one_shot_ll import all_gather_one_shot_ll
from tricomm.kernels.all_gather_one_shot_simple import all_gather_one_shot_simple
from tricomm.kernels.all_reduce_one_shot_ll import all_reduce_one_shot_ll
from tricomm.kernels.all_reduce_one_shot_simple import all_reduce_one_shot_simple
from tricomm.kernels.all_reduce_two_shot_ll import all_reduce_two_shot_ll
from tricomm.kernels.all_reduce_two_shot_simple import all_reduce_two_shot_simple
from tricomm.kernels.barrier import barrier

OPS = ("sum", "avg", "min", "max", "prod")
DTYPES = ("float64", "float32", "float16", "bfloat16", "int64", "int32")


@dataclass(frozen=True)
class Kernel:
    """One shipped kernel. `written` and `read` are the bytes per rank that cross to and from peers, per input byte,
    headers apart, as a function of the world size; `hops` counts dependent one-way messages, `barriers` the meetings
    among them."""

    collective: str
    algorithm: str
    protocol: str
    function: Any
    written: Callable[[int], Fraction]
    read: Callable[[int], Fraction]
    hops: int
    barriers: int

    @property
    def name(self) -> str:
        return str(self.function.fn.__name__)

    @property
    def reduces(self) -> bool:
        return self.collective == "all_reduce"


def _none(world_size: int) -> Fraction:
    return Fraction(0)


def _peers(world_size: int) -> Fraction:
    return Fraction(world_size - 1)


def _twice_peers(world_size: int) -> Fraction:
    return Fraction(2 * (world_size - 1))


def _shards(world_size: int) -> Fraction:
    return Fraction(2 * (world_size - 1), world_size)


def _twice_shards(world_size: int) -> Fraction:
    return Fraction(4 * (world_size - 1), world_size)


KERNELS = (
    Kernel("all_reduce", "one_shot", "ll", all_reduce_one_shot_ll, _twice_peers, _none, 1, 0),
    Kernel("all_reduce", "one_shot", "simple", all_reduce_one_shot_simple, _none, _peers, 3, 1),
    Kernel("all_reduce", "two_shot", "ll", all_reduce_two_shot_ll, _twice_shards, _none, 2, 0),
    Kernel("all_reduce", "two_shot", "simple", all_reduce_two_shot_simple, _shards, _none, 2, 2),
    Kernel("all_gather", "one_shot", "ll", all_gather_one_shot_ll, _twice_peers, _none, 1, 0),
    Kernel("all_gather", "one_shot", "simple", all_gather_one_shot_simple, _none, _peers, 3, 1),
    Kernel("barrier", "one_shot", "simple", barrier, _none, _none, 1, 1),
)

_BY_KEY = {(k.collective, k.algorithm, k.protocol): k for k in KERNELS}


def find(collective: str, algorithm: str, protocol: str) -> Kernel:
    """The kernel of that name; raises `InvalidArgument` with the list of those that exist."""
    kernel = _BY_KEY.get((collective, algorithm, protocol))
    if kernel is None:
        known = ", ".join(f"{a}/{p}" for c, a, p in _BY_KEY if c == collective)
        raise InvalidArgument(f"{collective}: there is no {algorithm}/{protocol} kernel; there is {known or 'none'}")
    return kernel
