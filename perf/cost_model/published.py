"""Published times of other projects' kernels of the same shape as ours, for comparison with the cost model.

Left out are kernels that use multicast, NCCL's rings and trees, two-stage kernels whose second stage reads (vLLM's;
ours push), and results without the type, the number of ranks or the GPU. If theirs reads the caller's memory in place,
ours is the zero-copy kernel. Their barriers follow their sources:

Triton    `blockwise_barrier` of symm-mem-recipes, once, before the reads: a compare-and-swap with release in the peer's
          memory, whose answer is waited for
torch     two barriers of such swaps (`CUDASymmetricMemory-inl.h`); the first one is relaxed, the second one releases
torch by vLLM
          the same between two copies, to symmetric memory and out of it (`symm_mem.py`), each a kernel
vLLM      two barriers of volatile flags, no fence (`custom_all_reduce.cuh`)
"""

from __future__ import annotations

from dataclasses import dataclass

from tricomm.kernels.collectives import registry
from tricomm.perf.cost_model.latencies import LATENCIES
from tricomm.perf.cost_model.machines import MACHINES

_MSCCLPP_A100 = "microsoft/mscclpp test/deploy/perf_ndmv4.jsonl"
_MSCCLPP_H100 = "microsoft/mscclpp test/deploy/perf_ndmv5.jsonl"
_SGLANG = "sgl-project/sglang#22734"
_RECIPES = "yifuwang/symm-mem-recipes#3"
_RECIPES_TORCH = f"{_RECIPES}, torch"
_TORCH = "vllm-project/vllm#42324"
_VLLM = "vllm-project/vllm#24111"
_VLLM_TORCH = f"{_VLLM}, torch"
_V100 = "haohervchb/sglang-V100#2"
_GB200 = "NVIDIA/nccl contrib/custom_algos/alltoall"
_UBX = "NVIDIA/TensorRT-LLM#15285"
K, M = 1 << 10, 1 << 20


@dataclass(frozen=True)
class Sync:
    """How ranks synchronize in a call: `barriers`, `fences` of which fence the system; `answers` of peers' memory that
    a rank waits for, a hop each; and `copies`, kernels that copy the message."""

    barriers: int
    fences: int
    answers: int = 0
    copies: int = 0


_BY_TRITON, _BY_TORCH, _BY_FLAGS = Sync(1, 1, 1), Sync(2, 1, 2), Sync(2, 0)
_BY_VLLM = Sync(2, 1, 2, 2)


@dataclass(frozen=True)
class PublishedTime:
    """`nbytes` of input per rank took `time_us`.

    `share` is the part of our kernel's bytes that theirs sends (a sentinel in the data needs no flag words: half of
    `ll`), `sync` how theirs synchronize if not as ours. `calibrates` marks rows that gave a constant of `machines`.
    """

    source: str
    gpu: str
    world_size: int
    collective: str
    algorithm: str
    protocol: str
    nbytes: int
    time_us: float
    mode: str = "graph"
    zero_copy: bool = False
    share: float = 1.0
    calibrates: bool = False
    sync: Sync | None = None

    @property
    def publication(self) -> str:
        """The source without the implementation: all its rows come from one author, one box and one method."""
        return self.source.partition(",")[0]

    @property
    def kernel(self) -> registry.Kernel:
        """Our kernel of that shape."""
        return registry.find(self.collective, self.algorithm, self.protocol, self.zero_copy)

    @property
    def more_us(self) -> float:
        """Microseconds that their synchronization takes more than ours."""
        if self.sync is None:
            return 0.0
        sync, machine, times = self.sync, MACHINES[self.gpu], LATENCIES[self.gpu]
        fence = machine.barrier - machine.hop - times.us(times.l2)
        barriers = (sync.barriers - self.kernel.barriers) * machine.barrier
        copies = sync.copies * (times.boundary + 2 * self.nbytes / machine.memory / 1e3)
        return barriers - (sync.barriers - sync.fences) * fence + sync.answers * machine.hop + copies


def _bandwidth(nbytes: int, busbw: float, world_size: int) -> float:
    """Microseconds of an all-reduce that reached `busbw` 1e9 bytes per second."""
    return nbytes * 2 * (world_size - 1) / world_size / busbw / 1e3


def _in_place(source: str, world_size: int, way: str, sync: Sync, times: dict[int, float]) -> list[PublishedTime]:
    """All-reduces of H100 over symmetric memory; `times` are microseconds by KiB."""
    facts = (source, "h100", world_size, "all_reduce", way, "simple")
    return [PublishedTime(*facts, size * K, us, zero_copy=True, sync=sync) for size, us in times.items()]


MEASUREMENTS = (
    PublishedTime(_MSCCLPP_A100, "a100", 8, "all_reduce", "one_shot", "ll", 8 * K, 6.5, calibrates=True),
    PublishedTime(_MSCCLPP_A100, "a100", 8, "all_reduce", "two_shot", "ll", 24 * K, 7.2, calibrates=True),
    PublishedTime(_MSCCLPP_A100, "a100", 8, "all_reduce", "two_shot", "ll", 48 * K, 7.9),
    PublishedTime(_MSCCLPP_A100, "a100", 8, "all_reduce", "two_shot", "ll", 72 * K, 8.3),
    PublishedTime(_MSCCLPP_A100, "a100", 8, "all_reduce", "two_shot", "simple", 16 * M, _bandwidth(16 * M, 187, 8)),
    PublishedTime(_MSCCLPP_A100, "a100", 8, "all_reduce", "two_shot", "simple", 32 * M, _bandwidth(32 * M, 203, 8)),
    PublishedTime(_MSCCLPP_A100, "a100", 8, "all_reduce", "two_shot", "simple", 48 * M, _bandwidth(48 * M, 221, 8)),
    PublishedTime(_MSCCLPP_H100, "h100", 8, "all_reduce", "two_shot", "ll", 24 * K, 6.2),
    PublishedTime(_MSCCLPP_H100, "h100", 8, "all_reduce", "two_shot", "ll", 48 * K, 6.6),
    PublishedTime(_MSCCLPP_H100, "h100", 8, "all_reduce", "two_shot", "ll", 72 * K, 6.9),
    PublishedTime(_SGLANG, "h100", 8, "all_reduce", "one_shot", "ll", 2 * K, 5.9),
    PublishedTime(_SGLANG, "h100", 8, "all_reduce", "one_shot", "ll", 16 * K, 6.4),
    PublishedTime(_SGLANG, "h100", 8, "all_reduce", "two_shot", "ll", 64 * K, 8.2),
    PublishedTime(_SGLANG, "h100", 8, "all_reduce", "two_shot", "ll", 256 * K, 10.6),
    PublishedTime(_SGLANG, "h100", 8, "all_reduce", "two_shot", "ll", 1 * M, 14.0),
    PublishedTime(_SGLANG, "h100", 8, "all_reduce", "one_shot", "ll", 2 * K, 11.0, "eager", calibrates=True),
    *_in_place(_RECIPES, 8, "one_shot", _BY_TRITON, {8: 10.8, 16: 11.2, 32: 11.4, 64: 12.2, 128: 13.9, 256: 18.3}),
    *_in_place(_RECIPES_TORCH, 8, "one_shot", _BY_TORCH, {8: 16.4, 16: 16.5, 32: 17.0, 64: 18.0, 128: 20.3, 256: 25.2}),
    *_in_place(_RECIPES_TORCH, 8, "two_shot", _BY_TORCH, {8: 15.3, 16: 15.5, 32: 15.6, 64: 16.4, 128: 18.2, 256: 18.7}),
    *_in_place(_TORCH, 8, "two_shot", _BY_VLLM, {512: 15.0, 1 * K: 17.0, 2 * K: 22.0, 4 * K: 37.0, 8 * K: 65.0}),
    *_in_place(_TORCH, 8, "two_shot", _BY_VLLM, {16 * K: 125.0, 32 * K: 242.0, 64 * K: 468.0, 128 * K: 923.0}),
    *_in_place(_VLLM, 4, "one_shot", _BY_FLAGS, {512: 10.0, 1 * K: 15.0, 2 * K: 22.0, 4 * K: 38.0}),
    *_in_place(_VLLM_TORCH, 4, "two_shot", _BY_VLLM, {512: 18.0, 1 * K: 19.0, 2 * K: 23.0, 4 * K: 29.0}),
    *_in_place(_VLLM, 6, "one_shot", _BY_FLAGS, {512: 13.0, 1 * K: 21.0, 2 * K: 38.0, 4 * K: 70.0}),
    *_in_place(_VLLM_TORCH, 6, "two_shot", _BY_VLLM, {512: 17.0, 1 * K: 21.0, 2 * K: 29.0, 4 * K: 41.0}),
    PublishedTime("NVIDIA/nccl#1940", "h200", 8, "all_reduce", "one_shot", "ll", 8, 2.3),
    PublishedTime("NVIDIA/nccl#1940", "b200", 8, "all_reduce", "one_shot", "ll", 8, 3.0),
    PublishedTime(_GB200, "gb200", 8, "all_to_all", "one_shot", "ll", 8 * K, 4.1, share=0.5),
    PublishedTime(_GB200, "gb200", 8, "all_to_all", "one_shot", "simple", 8 * K, 6.7),
    PublishedTime(_UBX, "b200", 8, "all_to_all", "one_shot", "ll", 64 * K, 22.0, share=0.5),
    PublishedTime(_UBX, "b200", 8, "all_to_all", "one_shot", "ll", 1 * M, 31.0, share=0.5),
    PublishedTime("1CatAI/1Cat-vLLM#170", "v100", 8, "all_reduce", "hybrid_cube_mesh", "simple", 8 * K, 17.1),
    PublishedTime(_V100, "pcie3", 4, "all_reduce", "one_shot", "ll", 4 * K, 4.0, share=0.5, calibrates=True),
    PublishedTime(_V100, "pcie3", 4, "all_reduce", "one_shot", "ll", 8 * K, 5.0, share=0.5),
    PublishedTime(_V100, "pcie3", 4, "all_reduce", "one_shot", "ll", 16 * K, 7.2, share=0.5),
    PublishedTime(_V100, "pcie3", 4, "all_reduce", "one_shot", "ll", 32 * K, 11.8, share=0.5),
    PublishedTime(_V100, "pcie3", 4, "all_reduce", "one_shot", "ll", 128 * K, 44.5, share=0.5),
    PublishedTime(_V100, "pcie3", 4, "all_reduce", "one_shot", "ll", 384 * K, 120.3, share=0.5),
)
