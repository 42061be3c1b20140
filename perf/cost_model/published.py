"""Published times of other projects' kernels of the same shape as ours, for comparison with the cost model.

Not included are kernels that use multicast, NCCL's rings and trees, two-stage kernels whose second stage reads (vLLM's;
ours push), kernels that are timed together with another one (a bias), and results without the type, the number of ranks
or the GPU. A kernel that reads the caller's memory in place is compared with our zero-copy kernel. Barriers and grids
are those in the kernels' sources. Our kernel gets the same grid, if our tiles allow it, with 16 bytes per thread and
access:

Triton    `blockwise_barrier` of symm-mem-recipes, once, before the reads: a compare-and-swap with release in the peer's
          memory; the kernel waits for its answer. Blocks of 512 threads, 24 at most
torch     two barriers of such swaps (`CUDASymmetricMemoryOps.cu` since pytorch/pytorch#150813). The first one of one
          shot releases, too, since that kernel can copy its input; that of two shots is relaxed. Blocks of 512 threads
          for one shot and 1024 for two, 24 at most; a short message has one block, of fewer threads
torch by vLLM
          the same between two copies, to symmetric memory and out of it (`symm_mem.py`), each a kernel
vLLM      two barriers of volatile flags, no fence (`custom_all_reduce.cuh`). Blocks of 512 threads, 36 at most
kraken    Triton again: blocks of 16 KiB for one shot, whose first barrier is relaxed. With a bias: a copy to symmetric
          memory within the kernel, so both barriers release, and blocks of 8 KiB; two shots have three barriers, a
          copy out, too, and blocks that each reduce 4 KiB

NVIDIA's table is that of `published_graphs`, which has all sizes of 8 GPUs of Hopper and Blackwell; here are two or
three sizes for each other number of ranks: of those that such a kernel gets, short and long. Left out: 4 KiB of 8 A100
(14.8 us, three times as long as the sizes around it).

`events`: timed from event to event, each call after a flush of L2 (256 MB) and under a profiler. kraken's benchmark
says so, and is a copy of symm-mem-recipes' benchmark. These two do not print
the GPU; other threads of theirs say 8 H100. Left out: symm-mem-recipes#4, between whose tables the kernel changed.
"""

from __future__ import annotations

from tricomm.perf.cost_model.published_graphs import GRAPHS
from tricomm.perf.cost_model.published_time import PublishedTime, Sync, Way

_MSCCLPP_A100 = "microsoft/mscclpp test/deploy/perf_ndmv4.jsonl"
_MSCCLPP_H100 = "microsoft/mscclpp test/deploy/perf_ndmv5.jsonl"
_SGLANG = "sgl-project/sglang#22734"
_RECIPES = "yifuwang/symm-mem-recipes#3"
_RECIPES_TORCH = f"{_RECIPES}, torch"
_HELION = "pytorch/helion#245"
_HELION_TORCH = f"{_HELION}, torch"
_KRAKEN = "meta-pytorch/kraken#7"
_NVIDIA = "NVIDIA/aiconfigurator 0.12.0"
_NVIDIA_SGLANG = f"{_NVIDIA}, SGLang 0.5.14"
_TORCH = "vllm-project/vllm#42324"
_VLLM = "vllm-project/vllm#24111"
_VLLM_TORCH = f"{_VLLM}, torch"
_V100 = "haohervchb/sglang-V100#2"
_GB200 = "NVIDIA/nccl contrib/custom_algos/alltoall"
_UBX = "NVIDIA/TensorRT-LLM#15285"
K, M = 1 << 10, 1 << 20


_TRITON = Way("one_shot", Sync(1, 1, 1), 512)
_TORCH_ONE, _TORCH_TWO = Way("one_shot", Sync(2, 2, 2), 512), Way("two_shot", Sync(2, 1, 2), 1024, divided=True)
_TORCH_BY_VLLM = Way("two_shot", Sync(2, 1, 2, copies=2), 1024, divided=True)
_FLAGS = Way("one_shot", Sync(2, 0), 512, 36)
_KRAKEN_ONE = Way("one_shot", Sync(2, 1, 2), 1024)
_BIAS_ONE = Way("one_shot", Sync(2, 2, 2, staged=1), 512)
_BIAS_TWO = Way("two_shot", Sync(3, 3, 3, staged=2), 256, divided=True)


def _bandwidth(nbytes: int, busbw: float, world_size: int) -> float:
    """Microseconds of an all-reduce that reached `busbw` 1e9 bytes per second."""
    return nbytes * 2 * (world_size - 1) / world_size / busbw / 1e3


def _in_place(
    source: str, world_size: int, way: Way, times: dict[int, float], mode: str = "graph"
) -> list[PublishedTime]:
    """All-reduces of H100 over symmetric memory; `times` are microseconds by KiB."""
    facts = (source, "h100", world_size, "all_reduce", way.algorithm, "simple")
    rows = []
    for size, us in times.items():
        grid = way.grid(size * K, world_size)
        rows.append(PublishedTime(*facts, size * K, us, mode, zero_copy=True, sync=way.sync, grid=grid))
    return rows


_RANKS_AND_KIB = (2, 4), (2, 128), (2, 1024), (4, 4), (4, 256), (8, 128)


def _by_default(gpu: str, flags: tuple[float, ...], pushes: tuple[float, ...]) -> list[PublishedTime]:
    """NVIDIA's times of vLLM's one-stage kernel and of SGLang's push, of `_RANKS_AND_KIB` as far as they go."""
    rows = []
    for (ranks, kib), us in zip(_RANKS_AND_KIB, flags, strict=False):
        facts = (_NVIDIA, gpu, ranks, "all_reduce", "one_shot", "simple", kib * K, us)
        rows.append(PublishedTime(*facts, zero_copy=True, sync=_FLAGS.sync, grid=_FLAGS.grid(kib * K, ranks)))
    for (ranks, kib), us in zip(_RANKS_AND_KIB, pushes, strict=False):
        facts = (_NVIDIA_SGLANG, gpu, ranks, "all_reduce", "one_shot", "ll", kib * K, us)
        rows.append(PublishedTime(*facts, share=0.5))
    return rows


MEASUREMENTS = (
    *GRAPHS,
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
    PublishedTime(_SGLANG, "h100", 8, "all_reduce", "one_shot", "ll", 2 * K, 11.0, "eager"),
    *_in_place(_RECIPES, 8, _TRITON, {8: 10.8, 16: 11.2, 32: 11.4, 64: 12.2, 128: 13.9, 256: 18.3}, "events"),
    *_in_place(_RECIPES_TORCH, 8, _TORCH_ONE, {8: 16.4, 16: 16.5, 32: 17.0, 64: 18.0, 128: 20.3, 256: 25.2}, "events"),
    *_in_place(_RECIPES_TORCH, 8, _TORCH_TWO, {8: 15.3, 16: 15.5, 32: 15.6, 64: 16.4, 128: 18.2, 256: 18.7}, "events"),
    *_in_place(
        _HELION,
        8,
        _KRAKEN_ONE,
        {8: 13.4, 16: 13.3, 32: 13.7, 64: 14.7, 128: 17.1, 256: 21.4, 512: 29.3, 1 * K: 42.0, 2 * K: 63.5},
        "events",
    ),
    *_in_place(
        _HELION_TORCH,
        8,
        _TORCH_ONE,
        {8: 16.0, 16: 16.0, 32: 17.0, 64: 18.1, 128: 19.8, 256: 25.1, 512: 30.4, 1 * K: 43.3, 2 * K: 65.4},
        "events",
    ),
    *_in_place(_KRAKEN, 8, _BIAS_ONE, {10: 14.3, 20: 14.6, 40: 15.6, 80: 17.5, 160: 21.9, 320: 26.2}, "events"),
    *_in_place(_KRAKEN, 8, _BIAS_TWO, {10: 18.2, 20: 18.5, 40: 19.1, 80: 19.8, 160: 20.2, 320: 22.4}, "events"),
    *_in_place(_TORCH, 8, _TORCH_BY_VLLM, {512: 15.0, 1 * K: 17.0, 2 * K: 22.0, 4 * K: 37.0, 8 * K: 65.0}),
    *_in_place(_TORCH, 8, _TORCH_BY_VLLM, {16 * K: 125.0, 32 * K: 242.0, 64 * K: 468.0, 128 * K: 923.0}),
    *_in_place(_VLLM, 4, _FLAGS, {512: 10.0, 1 * K: 15.0, 2 * K: 22.0, 4 * K: 38.0}),
    *_in_place(_VLLM_TORCH, 4, _TORCH_BY_VLLM, {512: 18.0, 1 * K: 19.0, 2 * K: 23.0, 4 * K: 29.0}),
    *_in_place(_VLLM, 6, _FLAGS, {512: 13.0, 1 * K: 21.0, 2 * K: 38.0, 4 * K: 70.0}),
    *_in_place(_VLLM_TORCH, 6, _TORCH_BY_VLLM, {512: 17.0, 1 * K: 21.0, 2 * K: 29.0, 4 * K: 41.0}),
    *_by_default("a100", (5.0, 5.7, 10.7, 5.3, 9.9, 11.4), ()),
    *_by_default("h100", (4.3, 4.8, 8.3, 4.7, 7.2), (2.5, 3.2, 5.9, 2.7, 5.5)),
    *_by_default("h200", (4.5, 4.8, 8.4, 4.6, 7.0), (2.5, 3.1, 5.9, 2.8, 5.5)),
    *_by_default("b200", (7.0, 7.4, 13.1, 7.1, 8.6), (3.9, 4.8, 6.8, 4.5, 6.5)),
    *_by_default("gb200", (5.2, 5.8, 10.1, 5.3, 7.0), (4.0, 4.6, 6.5, 4.3, 6.0)),
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
