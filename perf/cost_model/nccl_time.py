"""The time that NCCL's tuner expects for its own calls (2.30.7, `src/graph/tuning.cc`), on one node.

NCCL picks the algorithm and protocol with the least of these times. The bandwidth of NVLS is the 480 GB/s that its
authors name for 8 H100 (NVIDIA/nccl-tests#212), because the tuner's follows from its search for channels. Not modelled
are trees, which the tuner never prefers on one node, limits of a channel, which these links do not reach, and symmetric
kernels, which need registered buffers.

`check` compares it with published times, most of which are longer. So a speed-up over this model is rather
underestimated.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median
from typing import Any

from tricomm.perf.cost_model.machines import MACHINES, MachineSpec

_PROTOCOLS = ("LL", "LL128", "Simple")
_BASE = (6.6, 14.0, 8.4)  # microseconds, by protocol
_HOPS = {"nvlink": (0.6, 1.9, 3.4), "pcie": (1.0, 2.5, 5.7)}  # microseconds a step
_LL_MOST = {70: 39.0, 80: 87.7, 90: 141.0, 100: 282.0}  # GB/s, by compute capability
_NVLS_BASE = 25.0
_NVLS = {90: 480 / 371, 100: 480 / 371 * 0.74 / 0.85}  # bus bandwidth over the links' bandwidth
_STEPS = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}  # times (ranks - 1)
COLLECTIVES = (*_STEPS, "broadcast", "reduce")  # modelled by the tuner

# (source, GPU, collective, ranks, microseconds by KiB); NVIDIA's is that of `published_graphs`, NCCL 2.29.2.
_NVIDIA, _KIB = "NVIDIA/aiconfigurator 0.12.0", (0.5, 1, 4, *(1 << power for power in range(4, 17)))
_H100 = (15.6, 15.6, 16.0, 19.0, 18.4, 18.7, 19.0, 19.1, 20.1, 25.4, 38.2, 50.5, 78.9, 121.9, 199.8, 324.5)
_H200 = (16.0, 16.8, 16.0, 18.3, 18.4, 19.9, 21.4, 20.8, 20.5, 26.1, 37.5, 51.4, 78.3, 121.7, 197.3, 319.6)
_B200 = (25.1, 25.2, 26.0, 26.6, 27.3, 29.0, 28.1, 28.3, 28.4, 30.1, 32.1, 53.4, 71.6, 99.1, 167.8, 278.3)
_RECIPES, _HELION = {8: 21.8, 16: 22.4, 32: 24.0, 64: 24.3, 128: 24.4, 256: 24.4}, {8: 21.4, 16: 22.1, 32: 23.9}
PUBLISHED: tuple[tuple[str, str, str, int, dict[Any, float]], ...] = (
    (_NVIDIA, "h100", "all_reduce", 8, dict(zip(_KIB, _H100, strict=True))),
    (_NVIDIA, "h200", "all_reduce", 8, dict(zip(_KIB, _H200, strict=True))),
    (_NVIDIA, "b200", "all_reduce", 8, dict(zip(_KIB, _B200, strict=True))),
    ("yifuwang/symm-mem-recipes#3", "h100", "all_reduce", 8, _RECIPES),
    ("pytorch/helion#245", "h100", "all_reduce", 8, _HELION | {64: 24.0, 128: 24.1, 256: 24.4, 512: 24.7}),
    ("vllm-project/vllm#42324", "h100", "all_reduce", 8, {512: 24, 1024: 25, 2048: 37, 4096: 50, 8192: 76, 16384: 121}),
    ("vllm-project/vllm#42324", "h100", "all_reduce", 8, {32768: 195, 65536: 316, 131072: 561}),
    ("vllm-project/vllm#24111", "h100", "all_reduce", 6, {512: 23, 1024: 25, 2048: 43, 4096: 53}),
    ("NVIDIA/Megatron-LM#5596", "h100", "all_gather", 8, {2048: 20.2, 8192: 43.4, 32768: 118.9, 131072: 385.3}),
    ("NVIDIA/Megatron-LM#5596", "h100", "reduce_scatter", 8, {2048: 18.6, 8192: 47.0, 32768: 112.6}),
)


@dataclass(frozen=True)
class NcclTime:
    """Microseconds of one call, and how NCCL makes it, as `Ring/LL`."""

    how: str
    time_us: float


def predict(machine: MachineSpec, collective: str, world_size: int, size: int, mode: str = "graph") -> NcclTime | None:
    """NCCL's choice for `size` bytes as nccl-tests counts them; None for a collective that its tuner does not model."""
    if collective not in COLLECTIVES or world_size < 2:
        return None
    eager = machine.eager if mode == "eager" else 0.0
    times = dict(_times(machine, collective, world_size, size))
    how = min(times, key=times.__getitem__)
    return NcclTime(how, times[how] + eager)


def _times(machine: MachineSpec, collective: str, world_size: int, size: int) -> Iterator[tuple[str, float]]:
    links, others, pcie = machine.links, world_size - 1, machine.architecture == "any"
    generation = max(known for known in _LL_MOST if known <= max(70, machine.capability))
    steps = _STEPS.get(collective, 0) * others
    ratio = world_size / (steps or world_size)  # algorithm bandwidth over bus bandwidth
    for number, bus in enumerate((min(_LL_MOST[generation], links / 2), 0.92 * links, links)):
        if not (pcie and _PROTOCOLS[number] == "LL128"):  # LL128 needs NVLink
            latency = _BASE[number] + (steps or 1) * _HOPS["pcie" if pcie else "nvlink"][number]
            yield f"Ring/{_PROTOCOLS[number]}", latency + size / 1e3 / (bus * ratio)
    if machine.multicast and world_size > 2 and steps:
        rate = links * _NVLS[generation] * ratio if collective == "all_reduce" else links * others / world_size
        yield "NVLS/Simple", _NVLS_BASE + size / 1e3 / rate


def check() -> list[float]:
    """The relative error at each published time: 0.1 if the model's is ten per cent above the measured one."""
    errors = []
    for _, gpu, collective, ranks, times in PUBLISHED:
        for kib, measured in times.items():
            expected = predict(MACHINES[gpu], collective, ranks, int(kib * 1024))
            errors.append((expected.time_us if expected else 0.0) / measured - 1)
    return errors


def median_error() -> float:
    """The median of the errors' sizes."""
    return median(map(abs, check()))
