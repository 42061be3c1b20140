"""The times of all-reduces in a CUDA graph that the kernels should reach: the best published times for 8 GPUs, or near.

The boundary between two kernels is included, as in what is published (`perf.cost_model.published_graphs`).
"""

from __future__ import annotations

from dataclasses import dataclass

from tricomm.explorer.timing import from_code
from tricomm.kernels.collectives import registry
from tricomm.perf import units
from tricomm.perf.cost_model import machines
from tricomm.perf.cost_model.machines import MACHINES
from tricomm.policy import selection

WORLD_SIZE = 8
_TRTLLM, _SGLANG, _VLLM = "TensorRT-LLM 1.3.0rc20", "SGLang 0.5.14", "vLLM 0.24.0"


@dataclass(frozen=True)
class GraphBar:
    """A bar: a call of `nbytes` may take `us` microseconds on 8 of `gpu`. `published`: the best published time, and its
    source."""

    gpu: str
    nbytes: int
    us: float
    published: tuple[float, str]

    @property
    def name(self) -> str:
        best, who = self.published
        return (
            f"{WORLD_SIZE} {self.gpu}, {units.text(self.nbytes)} in a graph with its boundary (best: {best:g}, {who})"
        )

    def measured(self) -> float:
        """The modelled microseconds of the kernel that the shipped tables choose on a box with a switch."""
        machine = MACHINES[self.gpu]
        choice = selection.choose(machines.facts(machine, WORLD_SIZE), "all_reduce", self.nbytes, mode="graph")
        kernel = registry.find("all_reduce", choice.algorithm, choice.protocol)
        return from_code.predict(machine, kernel, WORLD_SIZE, self.nbytes).time_us


_K, _M = 1 << 10, 1 << 20
GRAPHS = (
    GraphBar("h100", _K, 3.2, (3.17, _TRTLLM)),
    GraphBar("h100", 16 * _K, 3.6, (3.56, _TRTLLM)),
    GraphBar("h100", 64 * _K, 4.6, (4.59, _TRTLLM)),
    GraphBar("h100", 128 * _K, 6.2, (6.2, _TRTLLM)),
    GraphBar("h100", 256 * _K, 8.0, (9.36, _SGLANG)),
    GraphBar("h100", _M, 13.0, (13.47, _SGLANG)),
    GraphBar("h100", 2 * _M, 18.0, (19.39, _VLLM)),
    GraphBar("h100", 8 * _M, 46.0, (50.7, _VLLM)),
    GraphBar("b200", _K, 4.6, (4.62, _SGLANG)),
    GraphBar("b200", _M, 15.0, (14.97, _SGLANG)),
    GraphBar("b200", 8 * _M, 36.0, (36.16, _SGLANG)),
)
