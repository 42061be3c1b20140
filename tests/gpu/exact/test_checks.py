"""The checks of the GPU tests without a GPU: which calls they make and compile, and that they find errors."""

import itertools

import pytest
import torch

import tricomm
from tests import ranks
from tests.gpu.exact import checks, process_bodies, variants
from tests.marks import compiles
from tricomm.kernels.collective_specs import COLLECTIVES
from tricomm.kernels.collectives import registry
from tricomm.kernels.dtypes import DTYPES, reduction
from tricomm.perf.bench import collective_calls


@pytest.mark.parametrize(
    "kernel", [k for k in (*registry.KERNELS, *registry.ZERO_COPY) if compiles(k)], ids=lambda kernel: kernel.name
)
def test_the_checked_code_is_the_compiled_code(kernel):
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


def test_errors_outside_the_result_are_found(monkeypatch):
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
