"""The checks of the GPU tests without a GPU: which calls they make and compile, and that they find errors."""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import tricomm
from tests import ranks
from tests.gpu.exact import checks, message_checks, process_bodies, variants
from tests.marks import compiles
from tricomm.kernels.collective_specs import COLLECTIVES
from tricomm.kernels.collectives import registry
from tricomm.kernels.dtypes import DTYPES, reduction
from tricomm.perf.bench import collective_calls


def test_rows_of_unequal_length_are_checked_and_what_is_wrong_there_is_found(monkeypatch):
    kernel = registry.find("all_to_all_v", "one_shot", "ll")

    def body(comm):
        right = checks.wrong_uneven(comm, kernel, torch.int16, True)
        with monkeypatch.context() as patch:
            patch.setattr(comm, "all_to_all_v", lambda x, *splits, out, **how: out)
            return right, checks.wrong_uneven(comm, kernel, torch.int16, True)

    assert {n for rows in checks.uneven_rows(3, 0) for n in rows} == {0, 1, 2, 3}
    for right, spoilt in tricomm.simulate(body, 3, options=checks.FEW_OPTIONS):
        assert not right and len(spoilt) == 2 and "of 37 elements: " in spoilt[1], spoilt


@pytest.mark.parametrize("kernel", registry.ZERO_COPY, ids=lambda kernel: kernel.name)
def test_handles_are_passed_and_what_is_wrong_with_them_is_found(kernel, monkeypatch):
    handles, spoiled = [], set()
    right = collective_calls.call

    def made(comm, name, number, x, y, *more):
        result = right(comm, name, number, x, y, *more)
        handles.append(isinstance(x, tricomm.Symmetric))
        if comm.rank in spoiled:
            result.view(torch.uint8)[:1] ^= 1
        return result

    monkeypatch.setattr(collective_calls, "call", made)

    def body(comm):
        wanted = checks.calls(kernel, comm.world_size, "int32", True)
        whole = checks.wrong(comm, kernel, torch.int32, wanted)
        spoiled.add(comm.rank)
        return whole, checks.wrong(comm, kernel, torch.int32, wanted), len(wanted)

    for whole, spoilt, calls in tricomm.simulate(body, 2, options=checks.FEW_OPTIONS):
        assert not whole and len(spoilt) == calls and all("1 elements are wrong" in text for text in spoilt)
    assert all(handles)


def test_messages_are_checked_and_what_is_wrong_with_one_is_found(monkeypatch):
    def body(comm):
        right = message_checks.sweep(comm, True)
        real = comm.recv

        def spoilt(x, *where, **how):
            source = real(x, *where, **how)
            x.view(torch.uint8)[:1] ^= 1
            return source

        monkeypatch.setattr(comm, "recv", spoilt)
        monkeypatch.setattr(message_checks, "FEW", (37,))
        return right, message_checks.sweep(comm, True)

    for right, spoilt in tricomm.simulate(body, 2, options=checks.FEW_OPTIONS):
        assert right == [] and len(spoilt) >= 4 and "1 are wrong" in spoilt[0]


@pytest.mark.parametrize(
    "kernel", [k for k in (*registry.KERNELS, *registry.ZERO_COPY) if compiles(k)], ids=lambda kernel: kernel.name
)
def test_what_is_checked_is_what_was_compiled(kernel):
    parts = checks.parts(kernel)
    results = [variants.sweep(kernel, 8, (part,), 90) for part in parts]
    jobs = variants.sweep(kernel, 8, parts, 90)
    assert all(jobs.count(job) == 1 for part in results for job in part) and len(results[0]) == 1
    made = [(tuple(sorted(constexprs.items())), bits, aligned) for _, constexprs, bits, aligned, _ in jobs]
    assert len(made) == len(set(made)) <= 180
    widths = {None} if kernel.collective == "barrier" else {8, 16, 32, 64}
    assert {bits for _, bits, _ in made} == widths
    if kernel.collective != "barrier":
        in_place = kernel.zero_copy and kernel.algorithm == "two_shot"  # all of a handle, which begins aligned
        places = {True} if in_place else {False, True}
        assert {(bits, aligned) for _, bits, aligned in made} == set(itertools.product(widths, places))
    reductions = {(dict(values).get("ELEMENT"), dict(values).get("OP")) for values, _, _ in made}
    wanted = {reduction(dtype, op) for dtype in DTYPES.values() for op in dtype.ops}
    assert reductions == (wanted if kernel.reduces else {(None, None)})


def test_a_variant_that_does_not_compile_is_named(monkeypatch):
    monkeypatch.setattr(variants, "_workers", lambda: ThreadPoolExecutor(1))  # processes would import torch
    order, compiled = [], variants.compile_one
    monkeypatch.setattr(variants, "compile_one", lambda job: order.append(job[0]) or compiled(job))
    barrier = registry.find("barrier", "one_shot", "simple")
    (job,) = variants.jobs(barrier, 2, 90, {"float32": checks.calls(barrier, 2, "float32")}, checks.OPTIONS)
    variants.compile_all([job])
    bad = ("two_shot", {**job[1], "num_warps": 3}, *job[2:])
    with pytest.raises(RuntimeError, match="1 of 2 variants do not compile: two_shot"):
        variants.compile_all([job, bad, job])
    assert order[1:] == ["two_shot", "barrier"]  # two shots take longer; none is compiled twice


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_first_operation_meets_every_size_and_the_others_a_few(dtype):
    result = checks.calls(registry.find("all_reduce", "two_shot", "ll"), 8, dtype, False)
    assert tuple(call.count for call in result[: len(checks.COUNTS)]) == checks.COUNTS
    assert [bool(call.offset) for call in result[: len(checks.COUNTS)]] == [False, True] * 4
    assert {(call.op, call.count) for call in result[len(checks.COUNTS) :]} == set(
        itertools.product(DTYPES[dtype].ops[1:], checks.OTHERS)
    )
    assert not any(call.offset for call in result[len(checks.COUNTS) :])
    kernel = registry.find("all_reduce", "two_shot", "ll")
    parts = [checks.of_part(kernel, 8, part, False).get(dtype, []) for part in checks.PARTS]
    assert sum(parts, []) == (result if dtype != "bfloat16" else [result[4], *result[:4], *result[5:]])
    assert [len(part) for part in parts[:2]] == ([1, 7] if dtype == "bfloat16" else [0, 0])
    cube = next(k for k in registry.KERNELS if k.needs_cube)
    assert checks.calls(cube, 8, dtype, False) and not checks.calls(cube, 4, dtype, False)


def test_what_is_wrong_beside_the_result_is_found(monkeypatch):
    """Results, the memory around them, inputs, and the memory of a rank that gets nothing."""
    dtype, call = torch.bfloat16, checks.CheckedCall(5, "sum", 1)

    def told(comm, collective, spoil):
        def made(comm, name, number, x, y, *more):
            result = right(comm, name, number, x, y, *more)
            spoil(x, y)
            return result

        monkeypatch.setattr(collective_calls, "call", made)
        kernel = next(k for k in registry.KERNELS if k.collective == collective)
        observed = checks.wrong(comm, kernel, dtype, [call] * comm.world_size)
        monkeypatch.setattr(collective_calls, "call", right)
        return observed

    def beside(y):
        y.as_strided((1,), (1,), y.storage_offset() + len(y)).zero_()

    def body(comm):
        nothing = [told(comm, c, lambda x, y: None) for c in COLLECTIVES]
        return nothing, {
            "result": told(comm, "all_to_all", lambda x, y: y[3:].zero_()),
            "beside": told(comm, "scatter", lambda x, y: beside(y)),
            "input": told(comm, "gather", lambda x, y: x[1:2].zero_()),
            "unasked": told(comm, "gather", lambda x, y: y.zero_()),
            "in place": told(comm, "reduce", lambda x, y: y.zero_()),
        }

    right = collective_calls.call
    for rank, (nothing, observed) in enumerate(tricomm.simulate(body, 2, options=checks.FEW_OPTIONS)):
        assert nothing == [[]] * len(COLLECTIVES)
        for texts in (observed["result"], observed["beside"], observed["input"]):
            assert len(texts) == 2 and texts[0].startswith(f"rank {rank}, CheckedCall(count=5, op='sum', offset=1): ")
        assert "elements are wrong" in observed["result"][0] and "memory around the output" in observed["beside"][0]
        assert "the input was written" in observed["input"][0]
        for name in ("unasked", "in place"):  # calls 0 and 1, roots 0 and 1
            kinds = ["elements are wrong" in text for text in observed[name]]
            assert kinds == ([True, False] if rank == 0 else [False, True]), observed[name]


FEW = (
    "all_reduce_one_shot_ll",
    "reduce_scatter_one_shot_simple",
    "gather_one_shot_ll",
    "all_to_all_v_one_shot_ll",
    "barrier",
    *(kernel.name for kernel in registry.ZERO_COPY),
)
FUSED = "all_reduce_rms_norm_one_shot_ll"


def test_bodies_of_processes_run_on_a_cpu_and_find_nothing(url):
    """As on a GPU, but for the calls' sizes and their number."""
    bodies = [
        (process_bodies.swept, FEW, checks.PARTS),
        (process_bodies.two_groups, FEW),
        (process_bodies.memory,),
        (process_bodies.epochs, FEW[2]),
        (process_bodies.graphs, FEW[2], 2),
        (process_bodies.multicast,),
        (process_bodies.messages, 2**32 - 6),
        (process_bodies.fused, [FUSED]),
    ]
    for number, (kind, errors) in enumerate(ranks.run(2, in_turn, url, bodies, timeout=200)[0]):
        right = None if bodies[number][0] is process_bodies.multicast else []  # memory of the CPU has no multicast
        assert errors == right and kind == "posix_shm", bodies[number]


def in_turn(rank, world_size, tell, url, bodies):
    return [
        body(rank, world_size, tell, f"{url}-{number}", "cpu", *more) for number, (body, *more) in enumerate(bodies)
    ]


def test_every_registered_kernel_has_its_tests_in_worlds_that_can_run_it():
    for world_size in (2, 4, 8):
        known = [k for k in registry.KERNELS if compiles(k) and (world_size == 8 or not k.needs_cube)]
        assert checks.kernels(world_size) == known
        assert set(checks.of_processes(world_size)) == {*known, *registry.ZERO_COPY}
    assert all(checks.of_part(kernel, 8, part) for kernel in checks.of_processes(8) for part in checks.parts(kernel))
