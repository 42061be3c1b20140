"""One of several processes compiles a kernel; a rank that compiles delays its peers' calls but does not fail them."""

from __future__ import annotations

import os
import signal
import time
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import tricomm
from tests import ranks
from tests.c10d.bodies.groups import default_group
from tests.core.bodies.common_bodies import attempt, communicator
from tricomm.core import machine_code
from tricomm.core.faults import Faults
from tricomm.core.group import PROCESSES
from tricomm.core.watch import in_flight
from tricomm.kernels import layout
from tricomm.kernels.launch import compiler
from tricomm.options import Options
from tricomm.perf.machine_code import prebuild

KEY = "ab" * 32


def same_kernel(rank, world_size, tell, folder, locked):
    """A compiler that takes half a second and caches its result, as Triton does."""
    os.environ["TRITON_CACHE_DIR"] = folder
    cache, compiled = Path(folder) / "made", []

    def compile_kernel(*variant):
        if not cache.exists():
            compiled.append(variant)
            time.sleep(0.5)
            cache.touch()

    compiler.compile_kernel = compile_kernel
    if not locked:
        machine_code._one_at_a_time = lambda key: nullcontext()
    ranks.together(f"file://{folder}/x", rank, range(world_size))
    machine_code.compiled(KEY, "kernel")
    return len(compiled)


def test_two_processes_compile_one_kernel_once(tmp_path):
    assert sum(ranks.run(3, same_kernel, str(tmp_path), True)) == 1
    assert list((tmp_path / "tricomm-locks").iterdir()) == []


def test_without_the_lock_each_process_compiles_it(tmp_path):
    assert sum(ranks.run(2, same_kernel, str(tmp_path), False)) == 2


def with_triton(rank, world_size, tell, folder):
    import triton

    os.environ["TRITON_CACHE_DIR"] = f"{folder}/triton"
    hits = []
    triton.knobs.compilation.listener = lambda cache_hit, **more: hits.append(cache_hit)
    _, variant = prebuild.ordered(prebuild.Order("sm_90", 2, "ddp", ("barrier",)))[0]
    ranks.together(f"file://{folder}/x", rank, range(world_size))
    made = machine_code.get(variant.kernel, variant.constexprs, variant.bits, variant.aligned, 90)
    return hits, made.asm["cubin"][:4]


def test_the_other_processes_find_the_kernel_in_tritons_cache(tmp_path):
    results = ranks.run(2, with_triton, str(tmp_path))
    assert sorted(results) == [([False], b"\x7fELF"), ([True], b"\x7fELF")]


def holds(rank, world_size, tell, folder):
    os.environ["TRITON_CACHE_DIR"] = folder
    if rank == 0:
        with machine_code._one_at_a_time(KEY):
            tell("held")
            time.sleep(60)
    while not (Path(folder) / "waiting").exists():
        time.sleep(0.01)
    began = time.monotonic()
    tell("waits")
    with machine_code._one_at_a_time(KEY):
        return time.monotonic() - began


def test_a_process_that_dies_frees_its_lock(tmp_path):
    with ranks.start(2, holds, str(tmp_path)) as started:
        assert started.message(0) == "held"
        (tmp_path / "waiting").touch()
        assert started.message(1) == "waits"
        time.sleep(0.3)
        os.kill(started.pids[0], signal.SIGKILL)
        outcome = started.results([1])[1]
    assert outcome.error is None and 0.3 < outcome.value < 2.0 + ranks.BUSY


@pytest.mark.parametrize("kind", ["no directory", "patience"])
def test_a_kernel_is_compiled_if_no_lock_can_be_made(kind, tmp_path, monkeypatch):
    home = tmp_path / "home"
    monkeypatch.setenv("TRITON_CACHE_DIR", str(home))
    monkeypatch.setattr(compiler, "compile_kernel", lambda *variant: "made")
    if kind == "no directory":
        home.touch()
        assert machine_code.compiled(KEY, "kernel") == "made"
        return
    monkeypatch.setattr(machine_code, "_PATIENCE", 0.1)
    with machine_code._one_at_a_time(KEY):
        assert machine_code.compiled(KEY, "kernel") == "made"


@pytest.mark.parametrize("kind", ["every process compiles", "a cache that others do not share"])
def test_without_a_shared_cache_there_is_no_lock(kind, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    if kind == "every process compiles":
        monkeypatch.setenv("TRITON_ALWAYS_COMPILE", "1")
    else:
        monkeypatch.setenv("TRITON_CACHE_DIR", "here")
    with machine_code._one_at_a_time(KEY), machine_code._one_at_a_time(KEY):
        assert list(tmp_path.iterdir()) == []


def slow_rank(rank, world_size, tell, url, marked, most):
    """Rank 1 loads for longer than the calls' timeout, while rank 0 waits in the call."""
    bind = PROCESSES.bind

    def slowly(kernel, *arguments, **keywords):
        time.sleep(3.0 * ("all_reduce" in kernel.fn.__name__))
        return bind(kernel, *arguments, **keywords)

    in_flight._MOST_LOADING = most
    if not marked:
        Faults._loading = lambda self: nullcontext()
    if rank == 1:
        PROCESSES.bind = slowly
    with communicator(rank, world_size, url) as comm:
        comm.barrier()
        comm._monitor._timeout = 1.0
        try:
            x = comm.all_reduce(torch.ones(4))
        except tricomm.TricommError as error:
            return type(error).__name__
        assert comm._group.words[layout.LOADING] == 0
        return x.tolist()


def test_a_peer_that_compiles_does_not_use_up_the_calls_timeout(url):
    assert ranks.run(2, slow_rank, url, True, 600.0) == [[2.0] * 4] * 2


@pytest.mark.parametrize(("marked", "most"), [(False, 600.0), (True, 0.5)])
def test_without_the_mark_or_beyond_its_limit_the_call_times_out(marked, most, url):
    assert ranks.run(2, slow_rank, url, marked, most)[0] == "CollectiveTimeout"


def as_on_a_gpu(device, by, kernel, *variant):
    if "all_reduce" in kernel.fn.__name__:
        by(kernel, *variant, 90)


def must_compile(rank, world_size, tell, url, those):
    """The ranks `those` lack the kernel of a call and may not compile it."""
    if rank in those:
        PROCESSES.compile = as_on_a_gpu
    with communicator(rank, world_size, url, compile_after_set_up=False) as comm:
        comm.barrier()
        return attempt(lambda: comm.all_reduce(torch.ones(4)))


def must_compile_in_c10d(rank, world_size, tell, url, given):
    PROCESSES.compile = as_on_a_gpu
    os.environ["TRICOMM_COMPILE_AFTER_SET_UP"] = "0"
    with default_group(rank, world_size, url, "kernels", options=given):
        return attempt(lambda: dist.all_reduce(torch.ones(4)))


@pytest.mark.parametrize("given", [None, Options(arena_bytes=256 << 10)])
def test_the_variable_holds_for_c10d_groups(given, url):
    for kind, text, _ in ranks.run(2, must_compile_in_c10d, url, given):
        assert kind == "ResourceError" and "compile_after_set_up=False" in text


@pytest.mark.parametrize("those", [(1,), (0, 1)])
def test_a_compile_after_set_up_is_an_error_that_all_ranks_get_within_two_seconds(those, url, monkeypatch):
    results = ranks.run(2, must_compile, url, those)
    for rank, (kind, text, seconds) in enumerate(results):
        assert kind == "ResourceError" if rank in those else kind == "GroupAborted"
        assert "all_reduce_one_shot for sm_90 would have to be compiled" in text or len(those) == 2
        assert "compile_after_set_up=False" in text and seconds < 2.0 + ranks.BUSY
