"""What a collective costs whoever runs it: the least that must cross links, and what each shipped kernel sends.

All in bytes per byte of a rank's input (of the message where there is a root), for the busiest rank.
"""

from __future__ import annotations

from fractions import Fraction

from tricomm.kernels.collectives.registry import Kernel


def moved(kernel: Kernel, world_size: int) -> Fraction:
    """Bytes that the kernel writes to and reads from peers, headers apart."""
    return kernel.written(world_size) + kernel.read(world_size)


def least(collective: str, world_size: int) -> Fraction:
    """The least that the busiest rank must send without in-network reduction, whatever the links."""
    others = Fraction(world_size - 1)
    factor = {
        "all_reduce": 2 * others / world_size, "all_gather": others, "barrier": Fraction(0),
        "broadcast": Fraction(1), "reduce": Fraction(1), "gather": Fraction(1), "send": Fraction(1),
    }  # fmt: skip
    return factor.get(collective, others / world_size) if world_size > 1 else Fraction(0)
