"""The host's part of a call: the time on the CPU before the GPU has work, for eager calls without a wait.

With a GPU, calls of world size 1 are compared with Triton's own launcher and torch's NCCL backend. On any machine, a
call over a launcher that launches nothing is compared with c10d's dispatch on torch's `fake` backend, which
communicates nothing. These two take turns, and their ratio can be compared between machines.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

import tricomm
from tricomm import Options
from tricomm.kernels.collectives import registry
from tricomm.kernels.specialization import CompiledSpecialization, Specialization
from tricomm.perf import null_launch
from tricomm.perf.evidence import hardware
from tricomm.perf.evidence.stage import Data, EvidenceSettings, Skip, Stage, StageCase

_CALLS, _ROUNDS = 300, 15  # few enough that the GPU's queue of launches never fills


def _cases(settings: EvidenceSettings) -> Iterable[StageCase]:
    yield StageCase("null launcher against c10d's fake backend", lambda: null_against_fake(settings))
    yield StageCase("all_reduce, direct", lambda: _direct(settings))
    yield StageCase("torch.distributed tricomm, world size 1", lambda: _torch(settings, "tricomm"))
    yield StageCase("Triton's launcher", lambda: _triton(settings))
    yield StageCase("torch.distributed NCCL, world size 1", lambda: _torch(settings, "nccl"))


def null_against_fake(settings: EvidenceSettings) -> Data:
    """Both on a CPU tensor of 4096 floats; a `ratio` below 1 means that tricomm takes less time."""
    x = torch.ones(4096)
    with fake_backend(8), null_launch.communicator() as comm:
        calls_by_name: dict[str, Callable[[], Any]] = {
            "tricomm": lambda: comm.all_reduce(x),
            "fake": lambda: dist.all_reduce(x),
        }
        times = in_turns(calls_by_name, 100 if settings.dry_run else 200, 15 if settings.dry_run else 150)
    ours, theirs = (hardware.spread(times[name]) for name in ("tricomm", "fake"))
    ratio = median(a / b for a, b in zip(times["tricomm"], times["fake"], strict=True))
    theirs_us = theirs["median_us"]
    return {"median_us": ours["median_us"], "p90_us": ours["p90_us"], "fake_us": theirs_us, "ratio": round(ratio, 3)}


def in_turns(calls_by_name: dict[str, Callable[[], Any]], calls: int, rounds: int) -> dict[str, list[float]]:
    """Microseconds a call of each, one number a round; the order is reversed from round to round."""
    times: dict[str, list[float]] = {name: [] for name in calls_by_name}
    names = list(calls_by_name)
    for run in calls_by_name.values():
        for _ in range(calls):
            run()
    for number in range(rounds):
        for name in names if number % 2 else reversed(names):
            times[name].append(clocked(calls_by_name[name], calls))
    return times


def clocked(run: Callable[[], Any], calls: int) -> float:
    """Microseconds a call, over `calls` of them."""
    start = time.perf_counter()
    for _ in range(calls):
        run()
    return (time.perf_counter() - start) / calls * 1e6


@contextmanager
def fake_backend(world_size: int) -> Iterator[None]:
    """torch's `fake` backend as the default group, which communicates nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=world_size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def _enqueued(run: Callable[[], Any]) -> Data:
    """Times of enqueuing calls; the GPU finishes them between two rounds."""
    times = []
    for _ in range(_ROUNDS + 1):
        times.append(clocked(run, _CALLS))
        torch.cuda.synchronize()
    return hardware.spread(times[1:])


def _needs_gpu(settings: EvidenceSettings) -> None:
    if settings.dry_run:
        raise Skip("a dry run has no GPU to enqueue on; the case with the null launcher has the same path")


def _direct(settings: EvidenceSettings) -> Data:
    _needs_gpu(settings)
    x = torch.ones(4096, device="cuda")
    with tricomm.Communicator(HashStore(), 0, 1, "cuda", options=Options(arena_bytes=8 << 20, nccl=False)) as comm:
        data = _enqueued(lambda: comm.all_reduce(x))
        comm.synchronize()
    return {**data, "target_us": 3.0}


def _triton(settings: EvidenceSettings) -> Data:
    """The direct call's kernel by `kernel[grid](...)`, which inspects its arguments every time."""
    _needs_gpu(settings)
    kernel = next(k for k in registry.KERNELS if k.collective == "barrier").function
    with tricomm.Communicator(HashStore(), 0, 1, "cuda", options=Options(arena_bytes=8 << 20, nccl=False)) as comm:
        comm.barrier()
        group, number = comm.group_table, iter(range(2, 1 << 30))
        spec = CompiledSpecialization(Specialization(WORLD_SIZE=1, BLOCK=512, LANES=256, PTX=True))
        return _enqueued(lambda: kernel[(1,)](group, next(number) << 32 | 1, SPEC=spec, num_warps=8))


def _torch(settings: EvidenceSettings, backend: str) -> Data:
    _needs_gpu(settings)
    if not dist.is_nccl_available():
        raise Skip("this torch has no NCCL, which both backends need")
    dist.init_process_group(backend, rank=0, world_size=1, store=HashStore())
    try:
        x = torch.ones(4096, device="cuda")
        return _enqueued(lambda: dist.all_reduce(x))
    finally:
        dist.destroy_process_group()


STAGE = Stage(
    "host_path", "The host's part of a call", _cases, columns=("median_us", "p90_us", "fake_us", "ratio", "target_us"),
    share=0.5,
)  # fmt: skip
