"""Compiles what the other stages launch, on all cores, into Triton's cache: they have minutes, and this takes most."""

from __future__ import annotations

import itertools
import multiprocessing
import os
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import torch

from tricomm import plan
from tricomm.kernels import layout, registry
from tricomm.kernels.compiled import compile_kernel
from tricomm.perf.evidence import checks, machine
from tricomm.perf.evidence.stage import Case, Data, Settings, Stage, Wrong
from tricomm.selection import Site, choose

Job = tuple[str, str, dict[str, Any], str | None, bool, int]  # collective/algorithm/protocol, and `compile_kernel`'s


def _cases(settings: Settings) -> Iterable[Case]:
    for world_size in (2,) if settings.dry_run else (2, 4, 8):
        for kernel in registry.KERNELS[:2] if settings.dry_run else registry.KERNELS:
            yield Case(
                f"{kernel.name}/{world_size} ranks",
                lambda kernel=kernel, world_size=world_size: _compile(kernel, world_size, settings),  # type: ignore[misc]
                limit=400.0,
            )


def _compile(kernel: registry.Kernel, world_size: int, settings: Settings) -> Data:
    found = list(jobs(kernel, world_size, settings.dry_run))
    workers = len(os.sched_getaffinity(0))
    if settings.dry_run:
        failures = [compile_one(job) for job in found[:1]]
    else:
        with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
            failures = list(pool.map(compile_one, found, chunksize=2))
    bad = [text for text in failures if text]
    if bad:
        raise Wrong(f"{len(bad)} of {len(found)} variants do not compile: {bad[0]}")
    return {"variants": len(found)}


def jobs(kernel: registry.Kernel, world_size: int, dry_run: bool) -> Iterable[Job]:
    """What the checks' calls need compiled, worked out by the very code that makes launch plans."""
    capability = 90 if dry_run else _capability()
    memory = layout.plan(world_size, checks.options(False).arena_bytes)
    site = Site(f"sm_{capability}", world_size, memory, layout.MAX_BLOCKS, None, None)
    found: dict[str, Job] = {}
    ops = registry.OPS if kernel.reduces else ("sum",)
    names = checks.dtypes(False) if kernel.collective != "barrier" else (None,)
    for name, op, aligned, count in itertools.product(names, ops, (True, False), checks.COUNTS):
        dtype = getattr(torch, name) if name is not None else None
        nbytes = count * dtype.itemsize if dtype is not None else 0

        def bind(function: Any, blocks: int, constexprs: dict[str, Any], kind: str | None, even: bool) -> Any:
            job = (kernel.name, str(blocks), constexprs, kind, even, capability)
            found.setdefault(repr((constexprs, kind, even)), job)

        choice = choose(site, kernel.collective, nbytes, kernel.algorithm, kernel.protocol)
        plan.make(site, choice, op if kernel.reduces else "none", dtype, count, aligned, "eager", bind)
    return found.values()


def compile_one(job: Job) -> str:
    """What went wrong, or nothing."""
    name, _, constexprs, dtype, aligned, capability = job
    function = next(k.function for k in registry.KERNELS if k.name == name)
    try:
        compile_kernel(function, constexprs, dtype, aligned, capability)
    except Exception as error:  # whatever a compiler may raise
        return f"{name} {constexprs} {dtype}: {type(error).__name__}: {error}"
    return ""


def _capability() -> int:
    major, minor = torch.cuda.get_device_capability()
    return 10 * major + minor


STAGE = Stage("compile", "Every variant compiles", _cases, machine.no_gpu, columns=("variants",))
