"""Compiles a case's kernels on all cores into Triton's cache before the case runs, because compiling takes most time.

Each case lists its own kernels. So nothing is compiled for cases that do not run, and the time counts for the case. A
case whose variants take longer than it may, or than the budget has left, is left out with their names.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from functools import cache
from typing import Any

import torch

from tricomm import Options
from tricomm.core import launch_plan
from tricomm.core.fused.fused_call import FUSED
from tricomm.kernels import layout
from tricomm.kernels.collectives import registry
from tricomm.kernels.launch.compiler import compile_kernel
from tricomm.perf import row_calls
from tricomm.perf.bench import check_data
from tricomm.perf.evidence import checks, hardware
from tricomm.perf.evidence.stage import EvidenceSettings, Wrong
from tricomm.perf.workers import end_with_parent
from tricomm.policy.selection import choose
from tricomm.policy.selection_facts import SelectionFacts

Job = tuple[str, dict[str, Any], int | None, bool, int]  # the kernel's name, and the arguments of `compile_kernel`
RowCall = tuple[row_calls.RowForm, str, int]  # form, type, rows
_DRY = 1  # variants of a case that a dry run compiles
LIMIT = 600.0  # seconds that the variants of a case may take
_NAMED = 3  # variants in a message


class Uncompiled(Exception):
    """Raised if the time was over before all variants were compiled. A later run finds the compiled ones in Triton's
    cache."""


def all_of(jobs: Sequence[Job], in_this_process: bool, seconds: float = LIMIT) -> None:
    """Compile, the longest jobs first. `in_this_process` compiles only a few, on this core.

    Raises `Wrong` with the first error, `Uncompiled` with the variants that are missing after `seconds`.
    """
    if in_this_process:
        failures = [compile_one(job) for job in jobs[:_DRY]]
    else:
        failures = _together(sorted(jobs, key=_weight, reverse=True), seconds) if jobs else []
    bad = [text for text in failures if text]
    if bad:
        raise Wrong(f"{len(bad)} of {len(jobs)} variants do not compile: {bad[0]}")


def _together(jobs: Sequence[Job], seconds: float) -> list[str]:
    try:
        begun = [(job, _workers().submit(compile_one, job)) for job in jobs]
        wait([future for _, future in begun], timeout=seconds, return_when=FIRST_EXCEPTION)
        missing = [_name(job) for job, future in begun if not future.done()]
        for _, future in begun:
            future.cancel()
        failures = [future.result() for _, future in begun if future.done() and not future.cancelled()]
    except BrokenProcessPool:
        _workers.cache_clear()  # the next case gets a new one
        raise
    if missing and not any(failures):
        few = ", ".join(missing[:_NAMED]) + (", ..." if len(missing) > _NAMED else "")
        raise Uncompiled(f"{len(missing)} of {len(jobs)} variants were not compiled within {seconds:.0f} s: {few}")
    return failures


def _weight(job: Job) -> int:
    """An estimate of Triton's compile time: it grows with the ranks; wide words count fourfold, two shots twofold."""
    name, values = job[0], job[1]
    return int(values["WORLD_SIZE"]) * (4 if values.get("WIDE") else 1) * (2 if "two_shot" in name else 1)


def _name(job: Job) -> str:
    name, values, bits = job[:3]
    what = values.get("FORM") or values.get("OP") or ""
    return f"{name} {values.get('ELEMENT') or f'{bits} bits'} {what} of {values['WORLD_SIZE']} ranks"


@cache
def _workers() -> ProcessPoolExecutor:
    """One pool for all cases of a process, because a worker takes seconds to start; it ends with this process."""
    context = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(len(os.sched_getaffinity(0)), mp_context=context, initializer=_begin)


def _begin() -> None:
    """End this worker with its parent, also if that has ended already: nothing else would end the wait for jobs."""
    end_with_parent()
    parent = multiprocessing.parent_process()
    if parent is None or not parent.is_alive():
        os._exit(1)


def sweep(kernel: registry.Kernel, world_size: int, settings: EvidenceSettings, parts: Sequence[str]) -> list[Job]:
    """The jobs of `parts` of the checks (`checks.PARTS`)."""
    all_jobs: list[Job] = []
    for part in parts:
        wanted = checks.of_part(kernel, world_size, part, settings.dry_run)
        all_jobs += jobs(kernel, world_size, hardware.capability(settings), wanted, checks.options(settings.dry_run))
    return [job for n, job in enumerate(all_jobs) if job not in all_jobs[:n]]


def jobs(
    kernel: registry.Kernel, world_size: int, capability: int, wanted: Mapping[str, Sequence[checks.CheckedCall]],
    options: Options,
) -> list[Job]:  # fmt: skip
    """The distinct variants that the calls of each type (by name) launch, by the code that makes launch plans."""
    memory = layout.plan(world_size, options.arena_bytes)
    site = SelectionFacts(f"sm_{capability}", world_size, memory, layout.MAX_BLOCKS)
    variants: dict[str, Job] = {}

    def bind(function: Any, blocks: int, constexprs: dict[str, Any], bits: int | None, aligned: bool, more: Any) -> Any:
        variants.setdefault(repr((constexprs, bits, aligned)), (kernel.name, constexprs, bits, aligned, capability))

    for name, calls in wanted.items():
        dtype: torch.dtype = getattr(torch, name)
        itemsize = dtype.itemsize
        for call in calls:
            nbytes = call.count * kernel.kind.rows_in(world_size) * itemsize
            fitting = (kernel.algorithm,) if kernel.zero_copy else ()
            choice = choose(site, kernel.collective, nbytes, kernel.algorithm, kernel.protocol, zero_copy=fitting)
            more = check_data.options(kernel.collective, call.op, world_size, 0, call.count)
            root = more.get(kernel.kind.root, -1)
            given = dtype if kernel.collective != "barrier" else None
            request = launch_plan.Request(kernel.collective, call.op, root=root, dtype=given, elements=call.count)
            launch_plan.make(site, choice, request, call.aligned(kernel, itemsize), "eager", bind)
    return list(variants.values())


def of_rows(
    kernels: Iterable[registry.Kernel], world_size: int, arena_bytes: int, capability: int, wanted: Iterable[RowCall]
) -> list[Job]:
    """The distinct variants of fused calls by each of `kernels`. The functions that a fused kernel is made with cannot
    be sent to a process, so such a job names the call: `constexprs` are the arguments of `_of_row`."""
    calls, variants = list(wanted), dict[str, Job]()
    for kernel in kernels:
        for form, dtype, rows in calls:
            values = {
                "WORLD_SIZE": world_size, "WIDE": kernel.wide, "ELEMENT": dtype, "FORM": form.name, "ROWS": rows,
                "ARENA": arena_bytes, "PROTOCOL": (kernel.algorithm, kernel.protocol),
            }  # fmt: skip
            made = _of_row(values, capability)
            key = repr((kernel.name, made.constexprs, made.bits))
            variants.setdefault(key, (kernel.name, values, made.bits, True, capability))
    return list(variants.values())


def _of_row(values: dict[str, Any], capability: int) -> row_calls.RowLaunch:
    memory = layout.plan(values["WORLD_SIZE"], values["ARENA"])
    site = SelectionFacts(f"sm_{capability}", values["WORLD_SIZE"], memory, layout.MAX_BLOCKS)
    kernel, form = registry.find(FUSED, *values["PROTOCOL"]), row_calls.parse(values["FORM"])
    return row_calls.launched(site, kernel, form, getattr(torch, values["ELEMENT"]), values["ROWS"], mode="eager")


def compile_one(job: Job) -> str:
    """The error in words, or an empty string."""
    name, constexprs, bits, aligned, capability = job
    try:
        if "FORM" in constexprs:
            made = _of_row(constexprs, capability)
            function, values = made.function, made.constexprs
        else:
            function, values = next(k.function for k in registry.ALL if k.name == name), constexprs
        compile_kernel(function, values, bits, aligned, capability)
    except Exception as error:  # whatever a compiler may raise
        return f"{name} {constexprs} {bits} bits: {type(error).__name__}: {error}"
    return ""
