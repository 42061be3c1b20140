"""How long instructions and memory take on one GPU, with the source of each number: what a clock per warp needs.

Latencies are in cycles of `clock`, which is in cycles per microsecond.

clock       the boost clock of the data sheets (V100, A100, B200); 1755 MHz for Hopper, the clock of the GPU that the
            latencies were measured on
l1, shared, l2, memory
            pointer chases. Volta: Z. Jia et al., arXiv:1804.06826; Ampere, Hopper: W. Luo et al., arXiv:2402.13499.
            Blackwell: Hopper's, because no such numbers of it are at hand
arithmetic  4 cycles from a 32-bit instruction to its use since Volta (arXiv:1804.06826); `instruction_costs` has what
            differs from that
port        bytes a cycle between an SM and L2: 64 (arXiv:1804.06826)
l2_bytes    of the data sheets
boundary    microseconds from the end of a kernel to the first instruction of the next one in a CUDA graph, all that is
            the same for every kernel. CALIBRATED: what is left of a row of `published` marked with * when the critical
            path is taken away. A100: 8 KiB in 6.5 (of 24 KiB in 7.2 nothing is left); H100: 2 KiB in 11 without a
            graph, 5 of them `eager`; V100: nothing is left of 4 KiB in 4.0 over PCIe. Blackwell has Hopper's, because
            no row of it gave a constant
host        microseconds until a store to host memory is acknowledged: `MachineSpec.hop` of PCIe

What could be checked and what not. The clocks stand in a table of all three (PMC10448217, its table 3). The latencies
of the two papers were written down from memory: their abstracts could be read here, their tables not. Pointer chases of
another source (github.com/markdewing/AI_kernels, latency/README.md) gave, in cycles of L1, L2 and memory: 36, 221, 460
on V100, 40, 281, 690 on GH200, 40, 295, 860 on B200. That agrees with L1 and within 15 % with L2; memory of Hopper and
Blackwell may be 1.4 and 1.8 times as slow as here, which only tensors that are larger than L2 would feel. Hopper's
numbers here are of an H800, whose NVLinks are fewer; no latency here is of its links. `port`, `host` and the cycles of
a barrier and of an acquire (`timed_ranks`) are not checked either.

A fence of the system takes what `MachineSpec.barrier` leaves without its hop and the look that ends it (`timed_links`).
Of an alias fence alone no time is published: it takes as much less a hop and an answer, if no store is on its way.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Latencies:
    """Of one GPU. Its links are those of a `MachineSpec`."""

    clock: float
    l1: float
    shared: float
    l2: float
    memory: float
    l2_bytes: int
    boundary: float
    arithmetic: float = 4.0
    port: float = 64.0
    host: float = 1.0

    def us(self, cycles: float) -> float:
        """Cycles -> microseconds."""
        return cycles / self.clock


_M = 1 << 20
_VOLTA = Latencies(1530.0, 28.0, 19.0, 193.0, 400.0, 6 * _M, boundary=0.0)
_AMPERE = Latencies(1410.0, 37.9, 29.0, 261.5, 466.3, 40 * _M, boundary=2.2)
_HOPPER = Latencies(1755.0, 40.7, 29.0, 263.0, 478.8, 50 * _M, boundary=2.4)
_BLACKWELL = Latencies(1965.0, 40.7, 29.0, 263.0, 478.8, 126 * _M, boundary=2.4)
LATENCIES = {
    "v100": _VOLTA,
    "a100": _AMPERE,
    "h100": _HOPPER,
    "h200": _HOPPER,
    "b200": _BLACKWELL,
    "gb200": _BLACKWELL,
    "pcie3": _VOLTA,  # the published rows are of V100
    "pcie4": _AMPERE,
    "pcie5": _HOPPER,
}
