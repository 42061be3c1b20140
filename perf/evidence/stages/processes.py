"""Right results, ranks as processes over CUDA IPC on one GPU: all kernels, graphs, ends of the epoch, two groups.

Starting ranks takes seconds, so a kernel's ranks do one task after another.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tricomm.kernels import registry
from tricomm.perf.evidence import checks, machine
from tricomm.perf.evidence.stage import Case, Data, Settings, Stage, Wrong
from tricomm.perf.ranks import talk

_RANKS = "tricomm.perf.evidence.process_checks"
_TASKS = ("sweep", "graphs", "epochs")


def _cases(settings: Settings) -> Iterable[Case]:
    dry = settings.dry_run
    for world_size in (2,) if dry else (2, 4):
        for kernel in checks.of_processes(world_size, dry):
            if dry and not kernel.kind.root:
                continue  # two groups have them all
            yield _case(kernel.name, _TASKS, world_size, settings)
        yield _case("two groups", ("two groups",), world_size, settings)
    for kernel in [] if dry else checks.kernels(registry.CUBE_RANKS, dry):
        if kernel.needs_cube:
            yield _case(kernel.name, _TASKS, registry.CUBE_RANKS, settings)


def _case(name: str, tasks: Iterable[str], world_size: int, settings: Settings) -> Case:
    asked = {"tasks": list(tasks), "kernel": name, "dry_run": settings.dry_run}
    return Case(f"{name}/{world_size} ranks", lambda: run(asked, world_size), limit=240.0)


def run(asked: dict[str, Any], world_size: int) -> Data:
    """Have ranks do their tasks, and gather what they say. Raises `Wrong` with the first thing that was wrong."""
    found: list[dict[str, Any]] = []
    for _, record in talk(_RANKS, world_size, asked, 200.0):
        if record["wrong"]:
            raise Wrong(f"{record['task']}: {record['wrong'][0]}")
        found.append(record)
    wanted = world_size * len(asked["tasks"])
    if len(found) != wanted:
        raise Wrong(f"{len(found)} of {wanted} times ranks have said how a task went")
    return {"kind": found[0]["kind"], "calls": sum(record["calls"] for record in found) // world_size}


STAGE = Stage("processes", "Right results, ranks as processes", _cases, machine.no_gpu, columns=("kind", "calls"))
