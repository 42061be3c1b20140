"""Right results of ranks that are streams of one process: every kernel, type and operation."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

from tricomm.kernels.collectives.registry import CUBE_RANKS, Kernel
from tricomm.perf.evidence import checks, compiling, hardware
from tricomm.perf.evidence.stage import EIGHT, STREAMS, TWO, Data, EvidenceSettings, Stage, StageCase, Wrong


def _cases(settings: EvidenceSettings) -> Iterable[StageCase]:
    for world_size in (3,) if settings.dry_run else (2, 4, 8):
        for kernel in checks.kernels(world_size, settings.dry_run):
            smallest = world_size <= 3 or kernel.needs_cube
            for part in checks.parts(kernel):
                yield StageCase(
                    f"{kernel.name}/{world_size} ranks/{part}",
                    partial(_run, kernel, world_size, part, settings),
                    tier=checks.tier(part, smallest),
                    jobs=partial(compiling.sweep, kernel, world_size, settings, (part,)),
                    needs=(EIGHT,) if world_size == CUBE_RANKS else (),
                )


def _run(kernel: Kernel, world_size: int, part: str, settings: EvidenceSettings) -> Data:
    dry = settings.dry_run
    results = hardware.of(settings).together(
        world_size, partial(checks.sweep, kernel=kernel, part=part, dry_run=dry), checks.options(dry)
    )
    bad = [text for _, texts in results for text in texts]
    if bad:
        raise Wrong(f"{len(bad)} checks; the first: {bad[0]}")
    return {"types": len(checks.of_part(kernel, world_size, part, dry)), "calls": results[0][0]}


STAGE = Stage(
    "streams", "Right results, ranks as streams of one process", _cases, hardware.no_gpu,
    columns=("types", "calls", "variants", "compile_s"), environment=STREAMS, needs=(TWO,), share=3.0,
)  # fmt: skip
