"""Compiles a test's kernels on all cores into Triton's cache before the test runs: most of its time is compiling."""

import multiprocessing
import os
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import cache
from typing import Any

import torch

from tests.gpu.exact import checks
from tricomm import Options
from tricomm.core import launch_plan
from tricomm.kernels import layout
from tricomm.kernels.collectives import registry
from tricomm.kernels.launch.compiler import compile_kernel
from tricomm.perf.bench import check_data
from tricomm.perf.workers import end_with_parent
from tricomm.policy.selection import choose
from tricomm.policy.selection_facts import SelectionFacts

Job = tuple[str, dict[str, Any], int | None, bool, int]  # the kernel's name, and the arguments of `compile_kernel`


def capability() -> int:
    """The compute capability of the current GPU, 90 for sm_90."""
    major, minor = torch.cuda.get_device_capability()
    return 10 * major + minor


def compile_all(jobs: Iterable[Job]) -> None:
    """Compile, the longest jobs first. Raises `RuntimeError` with the first error."""
    given = list(jobs)
    ordered = sorted((job for n, job in enumerate(given) if job not in given[:n]), key=_weight, reverse=True)
    try:
        bad = [text for text in _workers().map(compile_one, ordered) if text] if ordered else []
    except BrokenProcessPool:
        _workers.cache_clear()  # the next test gets a new one
        raise
    if bad:
        raise RuntimeError(f"{len(bad)} of {len(ordered)} variants do not compile: {bad[0]}")


def _weight(job: Job) -> int:
    """An estimate of Triton's compile time: it grows with the ranks; wide words count fourfold, two shots twofold."""
    name, values = job[0], job[1]
    return int(values["WORLD_SIZE"]) * (4 if values.get("WIDE") else 1) * (2 if "two_shot" in name else 1)


@cache
def _workers() -> ProcessPoolExecutor:
    """One pool for all tests of a process, because a worker takes seconds to start; it ends with this process."""
    context = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(len(os.sched_getaffinity(0)), mp_context=context, initializer=_begin)


def _begin() -> None:
    """End this worker with its parent, also if that has ended already: nothing else would end the wait for jobs."""
    end_with_parent()
    parent = multiprocessing.parent_process()
    if parent is None or not parent.is_alive():
        os._exit(1)


def sweep(kernel: registry.Kernel, world_size: int, parts: Iterable[str], architecture: int) -> list[Job]:
    """The jobs of `parts` of the checks (`checks.PARTS`)."""
    wanted = [checks.of_part(kernel, world_size, part) for part in parts]
    made = [job for each in wanted for job in jobs(kernel, world_size, architecture, each, checks.OPTIONS)]
    return [job for n, job in enumerate(made) if job not in made[:n]]


def jobs(
    kernel: registry.Kernel,
    world_size: int,
    architecture: int,
    wanted: Mapping[str, Sequence[checks.CheckedCall]],
    options: Options,
) -> list[Job]:
    """The distinct variants that the calls of each type (by name) launch, by the code that makes launch plans."""
    memory = layout.plan(world_size, options.arena_bytes)
    site = SelectionFacts(f"sm_{architecture}", world_size, memory, layout.MAX_BLOCKS)
    variants: dict[str, Job] = {}

    def bind(function: Any, blocks: int, constexprs: dict[str, Any], bits: int | None, aligned: bool, more: Any) -> Any:
        variants.setdefault(repr((constexprs, bits, aligned)), (kernel.name, constexprs, bits, aligned, architecture))

    for name, calls in wanted.items():
        dtype: torch.dtype = getattr(torch, name)
        for call in calls:
            nbytes = call.count * kernel.kind.rows_in(world_size) * dtype.itemsize
            fitting = (kernel.algorithm,) if kernel.zero_copy else ()
            choice = choose(site, kernel.collective, nbytes, kernel.algorithm, kernel.protocol, zero_copy=fitting)
            more = check_data.options(kernel.collective, call.op, world_size, 0, call.count)
            root = more.get(kernel.kind.root, -1)
            given = dtype if kernel.collective != "barrier" else None
            request = launch_plan.Request(kernel.collective, call.op, root=root, dtype=given, elements=call.count)
            launch_plan.make(site, choice, request, call.aligned(kernel, dtype.itemsize), "eager", bind)
    return list(variants.values())


def compile_one(job: Job) -> str:
    """The error in words, or an empty string."""
    name, constexprs, bits, aligned, architecture = job
    try:
        function = next(k.function for k in registry.ALL if k.name == name)
        compile_kernel(function, constexprs, bits, aligned, architecture)
    except Exception as error:  # whatever a compiler may raise
        return f"{name} {constexprs} {bits} bits: {type(error).__name__}: {error}"
    return ""
