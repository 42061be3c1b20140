"""Published times of other projects' kernels of the same shape as ours, for comparison with the cost model.

Left out are kernels that use multicast (none of ours does), NCCL's rings and trees, and results without the type, the
number of ranks or the GPU. If theirs reads the caller's memory in place between two barriers, ours is the zero-copy
kernel.
"""

from __future__ import annotations

from dataclasses import dataclass

from tricomm.kernels.collectives import registry

_MSCCLPP_A100 = "microsoft/mscclpp test/deploy/perf_ndmv4.jsonl"
_MSCCLPP_H100 = "microsoft/mscclpp test/deploy/perf_ndmv5.jsonl"
_SGLANG = "sgl-project/sglang#22734"
_RECIPES = "yifuwang/symm-mem-recipes#3"
_TORCH = "vllm-project/vllm#42324"
_VLLM = "vllm-project/vllm#24111"
_V100 = "haohervchb/sglang-V100#2"
_GB200 = "NVIDIA/nccl contrib/custom_algos/alltoall"
_UBX = "NVIDIA/TensorRT-LLM#15285"
K, M = 1 << 10, 1 << 20


@dataclass(frozen=True)
class PublishedTime:
    """`nbytes` of input per rank took `time_us`.

    `share` is the part of our kernel's bytes that theirs sends (a sentinel in the data needs no flag words: half of
    `ll`). `calibrates` marks rows from which a constant of `machines` comes.
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

    @property
    def kernel(self) -> registry.Kernel:
        """Ours of that shape."""
        return registry.find(self.collective, self.algorithm, self.protocol, self.zero_copy)


def _bandwidth(nbytes: int, busbw: float, world_size: int) -> float:
    """Microseconds of an all-reduce that reached `busbw` 1e9 bytes per second."""
    return nbytes * 2 * (world_size - 1) / world_size / busbw / 1e3


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
    PublishedTime(_RECIPES, "h100", 8, "all_reduce", "one_shot", "simple", 8 * K, 10.8, zero_copy=True),
    PublishedTime(_RECIPES, "h100", 8, "all_reduce", "one_shot", "simple", 8 * K, 16.4),
    PublishedTime(_RECIPES, "h100", 8, "all_reduce", "two_shot", "simple", 8 * K, 15.3, zero_copy=True),
    PublishedTime(_RECIPES, "h100", 8, "all_reduce", "one_shot", "simple", 128 * K, 13.9, zero_copy=True),
    PublishedTime(_RECIPES, "h100", 8, "all_reduce", "two_shot", "simple", 128 * K, 18.2, zero_copy=True),
    PublishedTime(_RECIPES, "h100", 8, "all_reduce", "one_shot", "simple", 256 * K, 18.3, zero_copy=True),
    PublishedTime(_TORCH, "h100", 8, "all_reduce", "two_shot", "simple", 512 * K, 15.0, zero_copy=True),
    PublishedTime(_TORCH, "h100", 8, "all_reduce", "two_shot", "simple", 1 * M, 17.0, zero_copy=True),
    PublishedTime(_TORCH, "h100", 8, "all_reduce", "two_shot", "simple", 2 * M, 22.0, zero_copy=True),
    PublishedTime(_TORCH, "h100", 8, "all_reduce", "two_shot", "simple", 4 * M, 37.0, zero_copy=True),
    PublishedTime(_TORCH, "h100", 8, "all_reduce", "two_shot", "simple", 8 * M, 65.0, zero_copy=True),
    PublishedTime(_TORCH, "h100", 8, "all_reduce", "two_shot", "simple", 16 * M, 125.0, zero_copy=True),
    PublishedTime(_TORCH, "h100", 8, "all_reduce", "two_shot", "simple", 32 * M, 242.0, zero_copy=True),
    PublishedTime(_TORCH, "h100", 8, "all_reduce", "two_shot", "simple", 64 * M, 468.0, zero_copy=True),
    PublishedTime(_TORCH, "h100", 8, "all_reduce", "two_shot", "simple", 128 * M, 923.0, zero_copy=True),
    PublishedTime(_VLLM, "h100", 6, "all_reduce", "one_shot", "simple", 512 * K, 13.0, zero_copy=True),
    PublishedTime(_VLLM, "h100", 6, "all_reduce", "two_shot", "simple", 512 * K, 17.0, zero_copy=True),
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
