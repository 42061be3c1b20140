"""Right results, ranks as streams of one process: every kernel, type and operation."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

from tricomm.kernels.registry import Kernel
from tricomm.perf.evidence import checks, machine
from tricomm.perf.evidence.stage import Case, Data, Settings, Stage, Wrong


def _cases(settings: Settings) -> Iterable[Case]:
    for world_size in (3,) if settings.dry_run else (2, 4, 8):
        for kernel in checks.kernels(world_size, settings.dry_run):
            yield Case(
                f"{kernel.name}/{world_size} ranks",
                lambda kernel=kernel, world_size=world_size: _run(kernel, world_size, settings),  # type: ignore[misc]
            )


def _run(kernel: Kernel, world_size: int, settings: Settings) -> Data:
    dry = settings.dry_run
    found = machine.of(settings).together(
        world_size, partial(checks.sweep, kernel=kernel, dry_run=dry), checks.options(dry)
    )
    bad = [text for _, texts in found for text in texts]
    if bad:
        raise Wrong(f"{len(bad)} checks; the first: {bad[0]}")
    return {"types": len(checks.dtypes(kernel, dry)), "calls": found[0][0]}


STAGE = Stage(
    "streams", "Right results, ranks as streams of one process", _cases, machine.no_gpu, columns=("types", "calls")
)
