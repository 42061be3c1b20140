"""Times of all-reduces of 8 GPUs in CUDA graphs, by NVIDIA's aiconfigurator-core 0.12.0 (`systems/data/*/comm`).

Its collector (`collector/network/collect_all_reduce.py`) captures five calls of bfloat16 in a graph, replays it 20
times from event to event, and divides: each time has the boundary to the call before it, or a fifth of the one between
two graphs. Its `message_size` counts elements. TensorRT-LLM 1.3.0rc20, SGLang 0.5.14 and vLLM 0.24.0, with their
defaults; which kernel a size got is in their sources. Rows in which they call NCCL are left out (`nccl_time` has
NCCL's), as is 1 KiB of SGLang on H100 (38 us, ten times as long as neighbouring sizes).

LAMPORT  TensorRT-LLM's one shot (`allReduceFusionKernels.cu`): pushes 16 bytes a thread with a sentinel in the data
PUSH     SGLang's (`custom_all_reduce_push.cuh`): the same
PULL     SGLang's two shots (`custom_all_reduce_pull.cuh`): two barriers of flags, the second of which fences; reads its
         shard of all inputs and writes the sum to all of them
FLAGS    vLLM's one stage (`custom_all_reduce.cuh`): two barriers of volatile flags, no fence
SWITCH   torch's multimem all-reduce by vLLM (`symm_mem.py`): two barriers, between two kernels that copy

The first three are dependent launches (PDL) that signal at their end, so only that end overlaps, and the model assumes
no overlap. TensorRT-LLM's two shots, 512 KiB to 4 MiB on H100, are left out: there a block handles a token, so most
blocks are idle, unlike in our kernels.
"""

from __future__ import annotations

from tricomm.perf.cost_model.published_time import PublishedTime, Sync, Way

_SOURCE = "NVIDIA/aiconfigurator 0.12.0"
_K, _M = 1 << 10, 1 << 20
_SIZES = (512, *(n * _K for n in (1, 4, 16, 32, 64, 128, 256, 512)), *(n * _M for n in (1, 2, 4, 8, 16, 32, 64)))
_SMS = {"h100": 132, "h200": 132, "b200": 148}

_SENTINEL = Way("one_shot", None, 128, 148, protocol="ll", share=0.5)
_PULL = Way("two_shot", Sync(2, 1), 512, 64, divided=True)
_FLAGS = Way("one_shot", Sync(2, 0), 512, 36)
_SWITCH = Way("multicast", Sync(2, 1, 2, copies=2), 1024, 24, divided=True)
_TRTLLM, _SGLANG, _VLLM = "TensorRT-LLM 1.3.0rc20", "SGLang 0.5.14", "vLLM 0.24.0"

# (GPU, implementation, way, first size, microseconds; 0: left out).
_TIMES = (
    ("h100", _TRTLLM, _SENTINEL, 512, (3.07, 3.17, 3.53, 3.56, 3.84, 4.59, 6.20, 10.17)),
    ("h200", _TRTLLM, _SENTINEL, 512, (3.07, 3.17, 3.51, 3.49, 3.90, 4.58, 6.39, 10.11)),
    ("b200", _TRTLLM, _SENTINEL, 512, (4.97, 5.38, 5.78, 5.93, 6.09, 5.99, 6.34, 7.93, 10.94, 17.78)),
    ("h100", _SGLANG, _SENTINEL, 512, (3.32, 0, 3.49, 3.75, 4.10, 4.81, 6.40)),
    ("h200", _SGLANG, _SENTINEL, 512, (2.99, 3.12, 3.54, 3.71, 4.15, 4.95, 6.70)),
    ("b200", _SGLANG, _SENTINEL, 512, (4.53, 4.62, 5.04, 5.31, 5.62, 6.22, 6.95, 8.48, 11.56)),
    ("h100", _SGLANG, _PULL, 256 * _K, (9.36, 10.59, 13.47, 20.08, 33.34, 62.93, 110.5)),
    ("h200", _SGLANG, _PULL, 256 * _K, (8.02, 14.89, 13.05, 19.31, 32.14, 61.71, 107.6)),
    ("b200", _SGLANG, _PULL, _M, (14.97, 18.91, 24.42, 36.16, 57.51)),
    ("h100", _VLLM, _FLAGS, 512, (4.68, 4.61, 5.55, 5.31, 5.58, 6.41, 7.86, 10.79)),
    ("h200", _VLLM, _FLAGS, 512, (4.80, 4.71, 4.80, 5.15, 5.67, 6.56, 7.94, 10.06)),
    ("b200", _VLLM, _FLAGS, 512, (7.33, 8.22, 7.79, 8.07, 8.22, 8.64, 9.36)),
    ("h100", _VLLM, _SWITCH, 512 * _K, (11.99, 14.97, 19.39, 30.81, 50.70, 92.38, 177.8, 344.0)),
    ("h200", _VLLM, _SWITCH, 512 * _K, (11.14, 14.07, 18.11, 28.43, 48.39, 87.17, 165.9, 323.3)),
    ("b200", _VLLM, _SWITCH, _M, (17.17, 20.72, 26.31, 39.24, 63.21, 111.3, 222.8)),
)


def _rows() -> list[PublishedTime]:
    rows: list[PublishedTime] = []
    for gpu, who, way, first, times in _TIMES:
        facts = (f"{_SOURCE}, {who}", gpu, 8, "all_reduce", way.algorithm, way.protocol)
        for nbytes, us in zip(_SIZES[_SIZES.index(first) :], times, strict=False):
            if us:
                rows.append(
                    PublishedTime(
                        *facts,
                        nbytes,
                        us,
                        zero_copy=way.protocol == "simple",
                        share=way.share,
                        sync=way.sync,
                        grid=way.grid(nbytes, 8),
                        held_out=len(rows) % 4 == 3,
                    )
                )
    return rows


GRAPHS = tuple(_rows())
