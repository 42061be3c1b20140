"""Compiles what the other stages launch, on all cores, into Triton's cache: they have minutes, and this takes most."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import cache
from typing import Any

import torch

from tricomm import plan
from tricomm.kernels import layout, registry
from tricomm.kernels.compiled import compile_kernel
from tricomm.kernels.dtypes import DTYPES
from tricomm.perf import bench_data
from tricomm.perf.evidence import checks, machine
from tricomm.perf.evidence.stage import Case, Data, Settings, Stage, Wrong
from tricomm.selection import Site, choose

Job = tuple[str, dict[str, Any], int | None, bool, int]  # the kernel's name, and what `compile_kernel` takes


def _cases(settings: Settings) -> Iterable[Case]:
    for world_size in (2,) if settings.dry_run else (2, 4, 8):
        for kernel in checks.of_processes(world_size, settings.dry_run):
            yield Case(
                f"{kernel.name}/{world_size} ranks",
                lambda kernel=kernel, world_size=world_size: _compile(kernel, world_size, settings),  # type: ignore[misc]
                limit=400.0,
            )


def _compile(kernel: registry.Kernel, world_size: int, settings: Settings) -> Data:
    found = jobs(kernel, world_size, 90 if settings.dry_run else _capability())
    if settings.dry_run:
        failures = [compile_one(job) for job in found[:1]]
    else:
        try:
            failures = list(_workers().map(compile_one, found))
        except BrokenProcessPool:
            _workers.cache_clear()  # the next case gets a new one
            raise
    bad = [text for text in failures if text]
    if bad:
        raise Wrong(f"{len(bad)} of {len(found)} variants do not compile: {bad[0]}")
    return {"variants": len(found)}


@cache
def _workers() -> ProcessPoolExecutor:
    """One pool for all cases: a worker takes seconds to start."""
    return ProcessPoolExecutor(len(os.sched_getaffinity(0)), mp_context=multiprocessing.get_context("spawn"))


def jobs(kernel: registry.Kernel, world_size: int, capability: int) -> list[Job]:
    """What the checks' calls need compiled, worked out by the very code that makes launch plans; nothing twice."""
    memory = layout.plan(world_size, checks.options(False).arena_bytes)
    site = Site(f"sm_{capability}", world_size, memory, layout.MAX_BLOCKS)
    found: dict[str, Job] = {}

    def bind(function: Any, blocks: int, constexprs: dict[str, Any], bits: int | None, aligned: bool, more: Any) -> Any:
        found.setdefault(repr((constexprs, bits, aligned)), (kernel.name, constexprs, bits, aligned, capability))

    for name in checks.dtypes(kernel, False):
        dtype = DTYPES[name] if kernel.collective != "barrier" else None
        itemsize = getattr(torch, name).itemsize
        for call in checks.calls(kernel, world_size, name, False):
            nbytes = call.count * kernel.kind.rows_in(world_size) * itemsize
            fitting = kernel.algorithm if kernel.zero_copy else None
            choice = choose(site, kernel.collective, nbytes, kernel.algorithm, kernel.protocol, zero_copy=fitting)
            more = bench_data.options(kernel.collective, call.op, world_size, 0, call.count)
            root = more.get(kernel.kind.root, -1)
            asked = plan.Asked(kernel.collective, call.op, dtype, call.count, root)
            plan.make(site, choice, asked, call.aligned(kernel, itemsize), "eager", bind)
    return list(found.values())


def compile_one(job: Job) -> str:
    """What went wrong, or nothing."""
    name, constexprs, bits, aligned, capability = job
    function = next(k.function for k in registry.ALL if k.name == name)
    try:
        compile_kernel(function, constexprs, bits, aligned, capability)
    except Exception as error:  # whatever a compiler may raise
        return f"{name} {constexprs} {bits} bits: {type(error).__name__}: {error}"
    return ""


def _capability() -> int:
    major, minor = torch.cuda.get_device_capability()
    return 10 * major + minor


STAGE = Stage("compile", "Every variant compiles", _cases, machine.no_gpu, columns=("variants",))
