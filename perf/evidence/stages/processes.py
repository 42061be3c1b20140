"""Right results of ranks that are processes on one GPU: all kernels, graphs, epochs, two groups, fused calls, memory.

Because starting ranks takes seconds, the first case has one size of every kernel, and later a kernel's ranks do one
task after another.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

from tricomm.kernels.collectives import registry
from tricomm.perf.evidence import checks, compiling, hardware, row_checks
from tricomm.perf.evidence.stage import SLICE, Data, EvidenceSettings, Stage, StageCase, Wrong
from tricomm.perf.workers import run_workers

_RANKS = "tricomm.perf.evidence.process_checks:rank_main"
_EVERY = "every kernel"
_FUSED = "fused"
# Tasks of several kernels, by case.
_OF_ALL = {_EVERY: "one size", "messages": "messages", _FUSED: _FUSED, "memory": "memory", "two groups": "two groups"}
_RARE, _SWEEP = ("graphs", "epochs"), ("sweep",)  # tasks of a kernel's ranks


def _cases(settings: EvidenceSettings) -> Iterable[StageCase]:
    if settings.dry_run:  # all tasks once
        kernel = next(k for k in checks.kernels(2, True) if k.kind.root)
        tasks = (*_OF_ALL.values(), *_RARE, *_SWEEP)
        yield _case(kernel.name, tasks, 2, settings, 0, checks.of_processes(2, True))
        return
    for world_size in (2, 4):
        later, kernels = 0 if world_size == 2 else 3, checks.of_processes(world_size, False)
        for name, task in _OF_ALL.items():
            yield _case(name, (task,), world_size, settings, later, kernels if name == _EVERY else ())
        for kernel in kernels:
            for tasks, tier in ((_RARE, 1), (_SWEEP, 4)):
                yield _case(kernel.name, tasks, world_size, settings, tier + later, (kernel,))
    for kernel in (k for k in checks.kernels(registry.CUBE_RANKS, False) if k.needs_cube):
        for tasks, tier in ((_RARE, 2), (_SWEEP, 5)):
            yield _case(kernel.name, tasks, registry.CUBE_RANKS, settings, tier, (kernel,))


def _case(
    name: str, tasks: tuple[str, ...], world_size: int, settings: EvidenceSettings, tier: int,
    kernels: Iterable[registry.Kernel],
) -> StageCase:  # fmt: skip
    ranks = {"tasks": tasks, "kernel": name, "dry_run": settings.dry_run, "slice_us": settings.slice_us}
    parts = checks.PARTS if "sweep" in tasks else checks.PARTS[:1]
    key = f"{name}/{world_size} ranks" if name in tasks else f"{name}/{world_size} ranks/{' and '.join(tasks)}"
    return StageCase(
        key,
        partial(run, ranks, world_size),
        limit=240.0,
        tier=tier,
        jobs=partial(row_checks.jobs, world_size, settings)
        if name == _FUSED
        else lambda: [job for k in kernels for job in compiling.sweep(k, world_size, settings, parts)],
    )


def run(ranks: dict[str, Any], world_size: int) -> Data:
    """Have ranks do the tasks of their settings `ranks`. Raises `Wrong` with the first error."""
    done: list[dict[str, Any]] = []
    for _, message in run_workers(_RANKS, world_size, ranks, 200.0):
        if message["wrong"]:
            raise Wrong(f"{message['task']}: {message['wrong'][0]}")
        done.append(message)
    wanted = world_size * len(ranks["tasks"])
    if len(done) != wanted:
        raise Wrong(f"{len(done)} of {wanted} tasks of ranks have ended")
    return {"kind": done[0]["kind"], "calls": sum(message["calls"] for message in done) // world_size}


STAGE = Stage(
    "processes", "Right results, ranks as processes", _cases, hardware.no_gpu,
    columns=("kind", "calls", "variants", "compile_s"), needs=(SLICE,), share=3.0,
)  # fmt: skip
