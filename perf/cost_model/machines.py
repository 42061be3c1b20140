"""The cost of links, launches, instructions and memory by GPU generation, with the source of each number.

Bandwidths are one direction of one GPU, in 1e9 bytes per second; latencies in microseconds.

links     bandwidth of a GPU's links in NCCL's model (`src/graph/topo.h`): NVLinks times 20.0 (V100, A100), 20.6 (H100)
          or 40.1 (B200), about 80 % of the nominal rate (NVIDIA/nccl#1397); PCIe 3: 12. PCIe 5: 51 to 56 measured
          between GPUs (voipmonitor/rtx6kpro, "PCIe bandwidth"); PCIe 4: half of that
kernels   the part of `links` that a kernel's loads and stores reach: 320 and 600 in the cost model of NCCL's symmetric
          kernels (`src/sym_kernels.cc`, Hopper and Blackwell); the same 86 % if no model is published
multicast the part of `links` that loads and stores through the switch reach: PyTorch's multimem all-reduce of 64 MiB
took
          320 us of 8 H100 (vllm-project/vllm#42324) and NCCL's NVLS reached 480 GB/s of bus bandwidth
          (NVIDIA/nccl#1455), both 307 for (1 + 1/N) n bytes a direction; Blackwell's is scaled with `kernels` and
          NCCL's efficiencies of NVLS (`src/graph/tuning.cc`: 0.85 and 0.74). 0: no NVLS
block     the bandwidth that one block of 512 threads reaches: 65 (Hopper) and 55 (Blackwell) in the same model; scaled
          with the links for older GPUs
memory    bandwidth of the GPU's own memory, from its data sheet
hop       from a store until a peer sees it: NCCL charges 0.6 for a low-latency NVLink hop (`src/graph/tuning.cc`);
          Ampere's follows from MSCCL++'s limits for one and two hops (`test/deploy/perf_ndmv4.jsonl`)
barrier   a barrier of all ranks: 7.8 - 4.5, the bases of NCCL's kernels with and without one (Hopper); 3 to 3.5 on
          GB200 (`contrib/custom_algos/allreduce/README.md`: 9.2 and 5.7 with and without one)
launch    from kernel to kernel in a CUDA graph, with the time to the first push: FITTED for Hopper and Blackwell.
          NCCL's base for Hopper less a hop is 3.9; its base for Blackwell only ranks kernels. Ampere's follows from
          MSCCL++'s limits, PCIe's from 4 V100 (haohervchb/sglang-V100#2)
overlap   how much sooner a dependent launch (PDL) begins: 0.96 in a graph of two empty kernels, at Hopper's 1755 MHz
          (pegainfer-project/pegainfer#569). Blackwell has the same value, because none is published
eager     the additional time of a single launch: MSCCL++ took 11 instead of 6 (sgl-project/sglang#22734)

FITTED: chosen so that the median error of the rows of such GPUs in `published_graphs`, without held-out rows, is near
0; for GB200 of its rows in `published`.

Instructions and memory of one GPU, in cycles of `clock`, which is in cycles per microsecond:

clock       the boost clock of the data sheets (V100, A100, B200); 1755 MHz for Hopper, the clock of the GPU that the
            latencies were measured on
l1, shared, l2, memory
            pointer chases. Volta: Z. Jia et al., arXiv:1804.06826; Ampere, Hopper: W. Luo et al., arXiv:2402.13499.
            Blackwell: Hopper's, because no such numbers of it are at hand
arithmetic  4 cycles from a 32-bit instruction to its use since Volta (arXiv:1804.06826); `instruction_costs` has what
            differs from that
port        bytes a cycle between an SM and L2: 64 (arXiv:1804.06826)
l2_bytes    of the data sheets
boundary    microseconds from the end of a kernel to the first instruction of the next one in a CUDA graph, the same for
            every kernel. FITTED; also for A100, by its rows in `published`, but not by MSCCL++'s short kernels, which
            take 3 longer than ours, on Hopper as well. V100: the rest of 4 KiB in 4.0 over PCIe (marked with *) after
            subtracting the critical path
host        microseconds until a store to host memory is acknowledged: the `hop` of PCIe

Checks: the clocks of all three are in table 3 of PMC10448217. The latencies of the two papers are quoted from memory,
because only their abstracts were accessible, not their tables. Pointer chases of another source
(github.com/markdewing/AI_kernels, latency/README.md) gave, in cycles of L1, L2 and memory: 36, 221, 460 on V100, 40,
281, 690 on GH200, 40, 295, 860 on B200. That agrees with L1 and within 15 % with L2; memory of Hopper and Blackwell may
be 1.4 and 1.8 times as slow as here, which matters only for tensors larger than L2. Hopper's numbers here are of an
H800, whose NVLinks are fewer; no latency here is of its links. `port`, `host` and the cycles of a barrier and of an
acquire (`timed_ranks`) are not checked either.

The time of a system fence is `MachineSpec.barrier` minus its hop and its last poll (`timed_links`). No time of an alias
fence is published: it is assumed to take the same minus a hop and an answer, if no store is in flight.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from tricomm.core import dependent_launch
from tricomm.kernels import layout
from tricomm.policy.selection_facts import SelectionFacts

OLDEST = 75  # the oldest capability that Triton compiles for


@dataclass(frozen=True)
class MachineSpec:
    """GPUs of one generation and the links between them. `cube`: 8 of them are a hybrid cube mesh, fewer all linked."""

    name: str
    architecture: str
    links: float
    kernels: float
    block: float
    memory: float
    hop: float
    barrier: float
    launch: float
    eager: float = 5.0
    cube: bool = False
    multicast: float = 0.0
    overlap: float = 0.0

    @property
    def capability(self) -> int:
        """90 for sm_90; for `any` architecture, the oldest that Triton compiles for."""
        return OLDEST if self.architecture == "any" else int(self.architecture.removeprefix("sm_"))

    @property
    def target(self) -> str:
        """The architecture to compile for: Turing for Volta, because Triton compiles for none older."""
        return f"sm_{max(OLDEST, self.capability)}"

    @property
    def no_switch(self) -> str:
        """The reason why no kernel uses multimem on these GPUs; empty if one can."""
        return "" if self.multicast else f"a box of {self.name} has no NVLS"

    @property
    def no_dependent_launch(self) -> str:
        """Why no kernel is a dependent launch on these GPUs; empty if short calls are."""
        return "" if self.overlap else f"{self.name} has none"

    @property
    def alias_fence(self) -> float:
        """Microseconds of a barrier's fence without the trip to a peer and back. `timed_ranks` adds L2's answer."""
        return max(self.barrier - 3 * self.hop, 0.0)


_M = 1 << 20
_ALL = (
    MachineSpec("v100", "sm_70", 120.0, 103.0, 21.0, 900.0, 0.7, 3.3, 5.1, cube=True),
    MachineSpec("a100", "sm_80", 240.0, 206.0, 42.0, 2039.0, 0.7, 3.3, 5.1),
    MachineSpec("h100", "sm_90", 371.0, 320.0, 65.0, 3350.0, 0.6, 3.3, 2.4, multicast=307.0, overlap=0.96),
    MachineSpec("h200", "sm_90", 371.0, 320.0, 65.0, 4800.0, 0.6, 3.3, 2.4, multicast=307.0, overlap=0.96),
    MachineSpec("b200", "sm_100", 722.0, 600.0, 55.0, 8000.0, 0.6, 3.25, 4.4, multicast=500.0, overlap=0.96),
    MachineSpec("gb200", "sm_100", 722.0, 600.0, 55.0, 8000.0, 0.6, 3.25, 3.4, multicast=500.0, overlap=0.96),
    MachineSpec("pcie3", "any", 12.0, 12.0, 12.0, 900.0, 1.0, 3.3, 2.0),
    MachineSpec("pcie4", "any", 26.0, 26.0, 26.0, 900.0, 1.0, 3.3, 2.0),
    MachineSpec("pcie5", "any", 53.0, 53.0, 53.0, 1800.0, 1.0, 3.3, 2.0),
)
MACHINES = {machine.name: machine for machine in _ALL}


def of_device(name: str) -> MachineSpec | None:
    """The machine whose GPU generation is named in a device's name; None if it is not known."""
    words = name.lower().replace("-", " ").split()
    return next((machine for generation, machine in MACHINES.items() if generation in words), None)


def links_of(device: str, topology: str) -> float | None:
    """The bandwidth of the links of `device` in a machine whose `Topology.kind` is `topology`; None if it is not
    known."""
    machine = of_device(device)
    return machine.links if machine is not None and topology == "nvswitch" else None


ARENA_BYTES = 64 << 20  # the default of `Options`


def facts(machine: MachineSpec, world_size: int, cube: bool = False) -> SelectionFacts:
    """The selection facts of a communicator on such GPUs."""
    plan, topology = layout.plan(world_size, ARENA_BYTES), "hybrid_cube_mesh" if cube else ""
    return SelectionFacts(
        machine.target,
        world_size,
        plan,
        layout.MAX_BLOCKS,
        topology=topology,
        no_dependent_launch=machine.no_dependent_launch,
        no_multicast=machine.no_switch,
    )


def is_dependent(machine: MachineSpec, world_size: int, blocks: int) -> bool:
    """True if a communicator on such GPUs launches a kernel of `blocks` blocks as a dependent one."""
    return not dependent_launch.refusal(facts(machine, world_size), blocks)


@dataclass(frozen=True)
class Latencies:
    """Of one GPU. `MachineSpec` has its links."""

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


_VOLTA = Latencies(1530.0, 28.0, 19.0, 193.0, 400.0, 6 * _M, boundary=1.0)
_AMPERE = Latencies(1410.0, 37.9, 29.0, 261.5, 466.3, 40 * _M, boundary=1.0)
_HOPPER = Latencies(1755.0, 40.7, 29.0, 263.0, 478.8, 50 * _M, boundary=1.2)
_BLACKWELL = Latencies(1965.0, 40.7, 29.0, 263.0, 478.8, 126 * _M, boundary=3.4)
LATENCIES = {
    "v100": _VOLTA,
    "a100": _AMPERE,
    "h100": _HOPPER,
    "h200": _HOPPER,
    "b200": _BLACKWELL,
    "gb200": replace(_BLACKWELL, boundary=2.0),
    "pcie3": _VOLTA,  # the published rows are of V100
    "pcie4": _AMPERE,
    "pcie5": _HOPPER,
}
