"""The first minute: checks on which other stages depend. If one fails, the stages that need it are left out.

There are two stages, because ranks that are streams need an environment that ranks that are processes must not have.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from functools import partial
from statistics import median
from typing import Any

import torch

from tricomm import Communicator, Options
from tricomm.cuda_bindings import load_bindings
from tricomm.kernels.collectives import registry
from tricomm.perf.bench import collective_calls, timing
from tricomm.perf.evidence import checks, compiling, environment, hardware, stage
from tricomm.perf.evidence.stage import Data, EvidenceSettings, Stage, StageCase, Wrong
from tricomm.perf.evidence.stages import faults
from tricomm.perf.workers import run_workers

_TICK, _BLOCKED = 0.002, 0.05  # seconds
_CYCLES = 200_000_000  # of the GPU's clock: about a tenth of a second
_OPTIONS = Options(timeout=15.0, arena_bytes=1 << 20, nccl=False)
_KERNEL = registry.find("all_reduce", "one_shot", "ll")
_COUNT = 1000
_SHOWN = ("driver", "cuda", "torch", "triton", "cuda-bindings", "blocked_s", "ticks", "slice_us", "error", "after_s")


def _case(name: str, run: Callable[[], Data], **more: Any) -> StageCase:
    return StageCase(name.partition("/")[2], run, limit=60.0, tier=stage.FIRST, **more)


def _processes(settings: EvidenceSettings) -> Iterable[StageCase]:
    yield _case("first/versions", partial(_versions, settings))
    yield _case(stage.GIL, partial(_gil, settings))
    yield _case(stage.SLICE, partial(_slice, settings))
    yield _case(stage.KILL, partial(faults.run, faults.KILLED, settings), needs=(stage.GIL,))


def _streams(settings: EvidenceSettings) -> Iterable[StageCase]:
    for name, world_size, needs in ((stage.TWO, 2, ()), (stage.EIGHT, 8, (stage.TWO,))):
        jobs = partial(_jobs, settings, world_size)
        yield _case(name, partial(_all_reduce, settings, world_size), needs=needs, jobs=jobs)
    yield _case(stage.GRAPH, partial(_graph, settings), needs=(stage.TWO,), jobs=partial(_jobs, settings, 2))


def _versions(settings: EvidenceSettings) -> Data:
    """Raises `Wrong` if CUDA's driver cannot be called."""
    facts = environment.facts(settings)
    shown = {name: facts["versions"].get(name, "?") for name in ("torch", "triton", "cuda", "cuda-bindings")}
    devices = facts["device"]
    return {**shown, "driver": devices if isinstance(devices, str) else devices[0]["driver"]}


def _gil(settings: EvidenceSettings) -> Data:
    """Raises `Wrong` if a blocking driver call stops this process's other threads, such as the monitor of peers."""
    if settings.dry_run:
        return ticked(lambda: time.sleep(_BLOCKED))
    driver = load_bindings("driver")
    torch.cuda._sleep(1000)  # loads the kernel and makes the context current
    torch.cuda.synchronize()
    torch.cuda._sleep(_CYCLES)
    return ticked(driver.cuCtxSynchronize)


def ticked(blocks: Callable[[], Any]) -> Data:
    """Call `blocks` while another thread counts ticks. Raises `Wrong` if that thread stops."""
    ticks, stop = [0], threading.Event()

    def tick() -> None:
        while not stop.wait(_TICK):
            ticks[0] += 1

    thread = threading.Thread(target=tick)
    thread.start()
    try:
        before, began = ticks[0], time.perf_counter()
        blocks()
        seconds, made = time.perf_counter() - began, ticks[0] - before
    finally:
        stop.set()
        thread.join()
    if made < 2 and seconds > 5 * _TICK:
        raise Wrong(
            f"the GIL is held during driver calls: {made} ticks of another thread in {seconds:.3f} s; a process cannot "
            "see that its peer has gone then; cuda-bindings 12.9.1 or newer release it"
        )
    return {"blocked_s": round(seconds, 4), "ticks": made}


def _slice(settings: EvidenceSettings) -> Data:
    """A word exchanged by two processes: each way takes as long as the other process keeps the device."""
    ranks = {"dry_run": settings.dry_run, "one_gpu": True, "trips": 2 if settings.dry_run else 10, "samples": 2}
    pairs = [message for _, message in run_workers("tricomm.perf.evidence.latency:rank_main", 2, ranks, 40.0)]
    if len(pairs) != 2:
        raise Wrong(f"two processes have sent a word to and fro in {len(pairs)} of 2 ways")
    return {"slice_us": round(median(time for pair in pairs for time in pair["samples"]), 3)}


def _jobs(settings: EvidenceSettings, world_size: int) -> list[compiling.Job]:
    wanted = {"float32": [checks.CheckedCall(_COUNT, "sum", 0)]}
    return compiling.jobs(_KERNEL, world_size, hardware.capability(settings), wanted, _OPTIONS)


def _all_reduce(settings: EvidenceSettings, world_size: int) -> Data:
    call = [checks.CheckedCall(_COUNT, "sum", 0)]
    check = partial(checks.wrong, kernel=_KERNEL, dtype=torch.float32, wanted=call)
    began = time.monotonic()
    bad = [text for texts in hardware.of(settings).together(world_size, check, _OPTIONS) for text in texts]
    if bad:
        raise Wrong(bad[0])
    return {"ranks": world_size, "took_s": round(time.monotonic() - began, 3)}


def _graph(settings: EvidenceSettings) -> Data:
    def make(comm: Communicator) -> timing.Call:
        x, y = collective_calls.tensors(comm, "all_reduce", _COUNT, torch.float32)
        return lambda: collective_calls.call(comm, "all_reduce", 0, x, y, _KERNEL)

    return hardware.spread(hardware.of(settings).resident(2, make, 2, 3, _OPTIONS))


STAGE = Stage("first", "The first minute: what this machine does", _processes, hardware.no_gpu, columns=_SHOWN)
ON_STREAMS = Stage(
    "first_streams", "The first minute: ranks as streams", _streams, hardware.no_gpu,
    columns=("ranks", "took_s", "median_us"), environment=stage.STREAMS,
)  # fmt: skip
