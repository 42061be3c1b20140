"""Right results, ranks as streams of one process: every kernel, type and operation."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import torch

from tricomm.kernels import registry
from tricomm.kernels.registry import Kernel
from tricomm.perf.evidence import checks, machine
from tricomm.perf.evidence.stage import Case, Data, Settings, Stage, Wrong


def _cases(settings: Settings) -> Iterable[Case]:
    for world_size in (2, 3) if settings.dry_run else (2, 4, 8):
        for kernel in registry.KERNELS:
            yield Case(
                f"{kernel.name}/{world_size} ranks",
                lambda kernel=kernel, world_size=world_size: _run(kernel, world_size, settings),  # type: ignore[misc]
            )


def _run(kernel: Kernel, world_size: int, settings: Settings) -> Data:
    wanted = checks.calls(kernel, world_size, settings.dry_run)
    names = checks.dtypes(settings.dry_run) if kernel.collective != "barrier" else ("float32",)
    on, options = machine.of(settings), checks.options(settings.dry_run)
    for name in names:
        dtype = getattr(torch, name)
        bad = on.together(world_size, partial(checks.wrong, kernel=kernel, dtype=dtype, wanted=wanted), options)
        if any(bad):
            raise Wrong(f"{name}: {next(text for rank in bad for text in rank)}")
    return {"types": len(names), "calls": len(wanted) * len(names)}


STAGE = Stage(
    "streams", "Right results, ranks as streams of one process", _cases, machine.no_gpu, columns=("types", "calls")
)
