"""Sizes and bandwidths as nccl-tests counts them, and the bytes that a collective has to move."""

from __future__ import annotations

from fractions import Fraction

from tricomm.kernels import collective_specs
from tricomm.kernels.collective_specs import COLLECTIVES, FUSED
from tricomm.kernels.collectives.registry import Kernel, quantized_cost

BINARY = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))
DATA_COLLECTIVES = tuple(name for name in COLLECTIVES if name != "barrier")


def row_elements(collective: str, size: int, itemsize: int, world_size: int) -> int:
    """Elements of one row of a call of `size` bytes, at least one.

    As in nccl-tests, the size is the larger one of input and output. If that has a row for each rank, `size` is the
    size of all rows, each of them a multiple of 16 bytes.
    """
    spec = collective_specs.find(collective)
    rows = max(spec.rows_in(world_size), spec.rows_out(world_size))
    if rows > 1:
        return max(1, size // rows // 16) * 16 // itemsize
    return max(1, size // itemsize)


def total_bytes(collective: str, elements: int, itemsize: int, world_size: int) -> int:
    """The larger one of input and output, for `elements` a row: the size S of the bandwidths."""
    spec = collective_specs.find(collective)
    return elements * itemsize * max(spec.rows_in(world_size), spec.rows_out(world_size))


def input_bytes(collective: str, elements: int, itemsize: int, world_size: int) -> int:
    """A rank's input (the root's if there is one), for `elements` a row: the size that selection and tables use."""
    return elements * itemsize * collective_specs.find(collective).rows_in(world_size)


def algorithm_bandwidth(size: int, microseconds: float) -> float:
    """S / t in 1e9 bytes per second."""
    return size / microseconds / 1e3 if microseconds > 0 else 0.0


def bus_factor(collective: str, world_size: int) -> float:
    """Bus bandwidth over algorithm bandwidth, as nccl-tests defines it."""
    if collective in ("broadcast", "reduce"):
        return 1.0
    twice = collective.startswith("all_reduce")  # also if a norm follows
    return (2.0 if twice else 1.0) * (world_size - 1) / world_size


def bus_bandwidth(collective: str, world_size: int, size: int, microseconds: float) -> float:
    """In 1e9 bytes per second, for `size` bytes as nccl-tests counts them."""
    return algorithm_bandwidth(size, microseconds) * bus_factor(collective, world_size)


def text(nbytes: int) -> str:
    """`64 KiB`: exact, in the largest unit that divides the bytes."""
    return next((f"{nbytes // unit} {name}" for unit, name in BINARY if nbytes and nbytes % unit == 0), f"{nbytes} B")


def moved(kernel: Kernel, world_size: int, itemsize: int = 4) -> Fraction:
    """Bytes that the busiest rank writes to and reads from peers, without headers, per byte of input.

    The input is that of one rank, or the message if there is a root. For NVLS kernels it is the bytes in the busier
    direction of a GPU's links. `itemsize`, of real numbers, is used if the kernel quantises on the links.
    """
    if kernel.wire:
        return quantized_cost(kernel.wire, kernel.protocol, itemsize)(world_size)
    if kernel.switched is not None:
        return kernel.switched(world_size)
    return kernel.written(world_size) + kernel.read(world_size)


def least(collective: str, world_size: int) -> Fraction:
    """The least that the busiest rank must send per byte of input, without in-network reduction, over any links."""
    others = Fraction(world_size - 1)
    factor = {
        **dict.fromkeys(("all_reduce", *FUSED), 2 * others / world_size),
        "all_gather": others,
        "barrier": Fraction(0),
        **dict.fromkeys(("broadcast", "reduce", "gather", "send"), Fraction(1)),
    }
    return factor.get(collective, others / world_size) if world_size > 1 else Fraction(0)
