"""Right results, ranks as processes over CUDA IPC on one GPU: all kernels, graphs, ends of the epoch, two groups."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tricomm.kernels import registry
from tricomm.perf.evidence import machine
from tricomm.perf.evidence.stage import Case, Data, Settings, Stage, Wrong
from tricomm.perf.ranks import talk

_RANKS = "tricomm.perf.evidence.process_checks"


def _cases(settings: Settings) -> Iterable[Case]:
    for world_size in (2,) if settings.dry_run else (2, 4):
        for kernel in registry.KERNELS:
            for task in ("sweep", "graphs", "epochs"):
                yield _case(task, kernel.name, world_size, settings)
        yield _case("two groups", "all", world_size, settings)


def _case(task: str, kernel: str, world_size: int, settings: Settings) -> Case:
    asked = {"task": task, "kernel": kernel, "dry_run": settings.dry_run}
    return Case(f"{task}/{kernel}/{world_size} ranks", lambda: run(asked, world_size))


def run(asked: dict[str, Any], world_size: int) -> Data:
    """Have ranks do a task, and gather what they say. Raises `Wrong` with the first thing that was wrong."""
    found: list[dict[str, Any]] = []
    for _, record in talk(_RANKS, world_size, asked, 100.0):
        if record["wrong"]:
            raise Wrong(record["wrong"][0])
        found.append(record)
    if len(found) != world_size:
        raise Wrong(f"{len(found)} of {world_size} ranks said how it went")
    return {"kind": found[0]["kind"], "calls": found[0]["calls"]}


STAGE = Stage("processes", "Right results, ranks as processes", _cases, machine.no_gpu, columns=("kind", "calls"))
