"""A symmetric handle as the tensor of a call: read without a copy, and no rank's memory is freed too early."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import tricomm
from tests.explorer.compiled import ptx_mutants
from tests.explorer.mutation import Edit, loaded
from tests.marks import some
from tricomm.errors import InvalidArgument
from tricomm.kernels import multimem, reference
from tricomm.options import Tuning, tuned

OPTIONS = tricomm.Options(arena_bytes=256 << 10, _tuning=Tuning(blocks=2, tile=16))


def exact(result: torch.Tensor, wanted: torch.Tensor) -> bool:
    return torch.equal(result.contiguous().reshape(-1).view(torch.uint8), wanted.reshape(-1).view(torch.uint8))


def values(rank: int, turn: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    numbers = torch.arange(torch.Size(shape).numel()).view(shape) % 3 + (rank + turn) % 2
    return (numbers % 2 if dtype == torch.bool else numbers).to(dtype)


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("name", some(["float64", "bfloat16", "float8_e5m2", "int8", "bool", "complex64"], 2))
def test_in_place_out_of_place_and_gathered(name, world_size):
    dtype = getattr(torch, name)

    def body(comm):
        wrong = []
        for turn, shape in enumerate([(1,), (5, 31), (160,)]):
            w = comm.symmetric(shape, dtype)
            parts = [values(r, turn, shape, dtype) for r in range(world_size)]
            total = reference.reduced("sum", parts)
            w.local.copy_(parts[comm.rank])
            out = torch.zeros(shape, dtype=dtype)
            gathered = comm.all_gather(w)
            wrong += [] if exact(comm.all_reduce(w, out=out), total) else [(shape, "out")]
            wrong += [] if exact(gathered, torch.cat(parts)) else [(shape, "gather")]
            wrong += [] if comm.all_reduce(w) is w and exact(w.local, total) else [(shape, "in place")]
            rows = comm.symmetric((world_size * len(parts[0]), *shape[1:]), dtype)
            row = slice(comm.rank * len(parts[0]), (comm.rank + 1) * len(parts[0]))
            rows.local[row] = parts[comm.rank]
            wrong += [] if comm.all_gather(rows.local[row], out=rows) is rows else [(shape, "not the handle")]
            wrong += [] if exact(rows.local, torch.cat(parts)) else [(shape, "gather in place")]
            whole = [values(r, turn + 1, tuple(rows.shape), dtype) for r in range(world_size)]
            rows.local.copy_(whole[comm.rank])
            mine = reference.reduced("sum", whole)[row]
            wrong += [] if exact(comm.reduce_scatter(rows), mine) else [(shape, "reduce_scatter")]
            comm.reduce_scatter(rows, out=rows.local[row])
            wrong += [] if exact(rows.local[row], mine) else [(shape, "reduce_scatter in place")]
        return wrong

    assert tricomm.simulate(body, world_size, options=OPTIONS) == [[]] * world_size


CALLS = {
    "all_reduce_one_shot_zero_copy": lambda comm, w: comm.all_reduce(w, out=torch.empty(40, dtype=torch.int64)),
    "all_reduce_two_shot_zero_copy": lambda comm, w: comm.all_reduce(w).local.clone(),
    "all_gather_one_shot_zero_copy": lambda comm, w: comm.all_gather(w),
    "all_gather_one_shot_zero_copy, in place": lambda comm, w: comm.all_gather(_own(comm, w), out=w).local.clone(),
    "reduce_scatter_one_shot_zero_copy": lambda comm, w: comm.reduce_scatter(w),
    "all_reduce_multicast_zero_copy": lambda comm, w: comm.all_reduce(w, algorithm="multicast").local.clone(),
    "all_reduce_multicast_zero_copy, into another": lambda comm, w: _into(comm, w).local.clone(),
}


def _own(comm, w):
    return w.local.view(comm.world_size, -1)[comm.rank]


def _into(comm, w):
    """Over memory that the host has written right before the call."""
    v = comm.symmetric(w.shape, w.dtype)
    v.local.fill_(-1)
    return comm.all_reduce(w, out=v, algorithm="multicast")


def check(kernel, **more):
    """The host writes what the kernel reads, before every call."""

    def body(comm):
        w = comm.symmetric((40,), torch.int64)
        results = []
        for turn in range(2):
            w.local.copy_(torch.arange(40) + turn * 100 + comm.rank * 1000)
            results.append(CALLS[kernel](comm, w))
        return results

    return tricomm.check(body, 2, **{"schedules": 6, "options": OPTIONS, **more})


@pytest.mark.parametrize("kernel", CALLS)
def test_no_schedule_shows_a_race(kernel):
    assert check(kernel).ok
    assert check(kernel, schedules=3, strategy="pct", seed=3).ok


@pytest.mark.parametrize("phase", [0, 1])
@pytest.mark.parametrize("kernel", CALLS)
def test_each_barrier_is_needed(kernel, phase, unshrunk):
    """Without the first, memory is read before it is written; without the second, written while it is still read."""
    line = f"status = barrier(group, start, call, {phase}, SPEC.WORLD_SIZE, SPEC.LANES, SPEC.PTX)"
    name = kernel.partition("_zero_copy")[0]
    with loaded((Edit(f"kernels/collectives/{name}.py", line, "status = 0"),)):
        report = check(kernel, schedules=40)
    assert {f.kind for f in report.findings} & {"race", "wrong_result", "rank_mismatch"}, str(report)


def test_a_row_that_peers_read_is_not_written(unshrunk):
    """In place, a rank that also copied its own row would write to memory that its peers read."""
    edit = Edit("kernels/collectives/all_gather_one_shot.py", "range(in_place.to(tl.int32), SPEC", "range(0, SPEC")
    with loaded((edit,)):
        report = check("all_gather_one_shot_zero_copy, in place", schedules=40)
    assert "race" in {f.kind for f in report.findings}, str(report)


def test_a_plain_tensor_against_a_handle_is_another_call():
    def body(comm):
        w = comm.symmetric((8,), torch.float32)
        comm.all_reduce(w if comm.rank else w.local)

    with pytest.raises(tricomm.CollectiveMismatch, match="made different calls"):
        tricomm.simulate(body, 2)


def test_unsupported_uses_of_a_handle_are_refused_with_the_remedy():
    def body(comm):
        w = comm.symmetric((8,), torch.float32)
        w.local.fill_(comm.rank)
        with pytest.raises(InvalidArgument, match="there is two_shot/simple.*; other kernels take handle.local"):
            comm.all_reduce(w, algorithm="one_shot")
        with pytest.raises(InvalidArgument, match="there is one_shot/simple"):
            comm.all_gather(w, protocol="ll")
        with pytest.raises(InvalidArgument, match="not defined for float32"):
            comm.all_reduce(w, "bor")
        with pytest.raises(InvalidArgument, match=f"x has to be its row {comm.rank}.*pass out=handle.local"):
            comm.all_gather(torch.zeros(4), out=w)
        with pytest.raises(InvalidArgument, match="not a multiple of the world size 2"):
            comm.reduce_scatter(comm.symmetric((3,), torch.float32))
        return comm.broadcast(w, 1).local.tolist(), comm.all_reduce(w.local, protocol="ll").tolist()

    assert tricomm.simulate(body, 2, options=tuned(OPTIONS, tile=None)) == [([1.0] * 8, [2.0] * 8)] * 2


def test_a_view_of_the_handle_is_in_place():
    def body(comm):
        w = comm.symmetric((40,), torch.int64)
        w.local.copy_(torch.arange(40) + comm.rank)
        assert comm.all_reduce(w, out=w.local.view(40)).data_ptr() == w.local.data_ptr()
        return w.local.tolist()

    report = tricomm.check(body, 2, schedules=6, options=OPTIONS)
    assert report.ok, report
    assert tricomm.simulate(body, 2, options=OPTIONS) == [[2 * n + 1 for n in range(40)]] * 2


def test_a_handle_of_another_communicator_is_refused():
    def body(comm):
        w = comm.symmetric((4,), torch.int64)
        w.group = "0123abcd"
        for call in (comm.all_reduce, comm.all_gather, comm.reduce_scatter):
            with pytest.raises(InvalidArgument, match="this handle is of communicator 0123abcd"):
                call(w)

    tricomm.simulate(body, 2, options=OPTIONS)


SWITCHED = [
    (torch.float32, (33,)),
    (torch.bfloat16, (5, 31)),
    (torch.int32, (1,)),
    (torch.int64, (160,)),
    (torch.complex64, (7,)),
]


def through_the_switch(comm):
    """In place and into another handle, with and without a last piece under 16 bytes; return the wrong ones."""
    wrong, size = [], comm.world_size
    for turn, (dtype, shape) in enumerate(SWITCHED):
        parts = [values(r, turn, shape, dtype) for r in range(size)]
        total, w, v = reference.reduced("sum", parts), comm.symmetric(shape, dtype), comm.symmetric(shape, dtype)
        w.local.copy_(parts[comm.rank])
        v.local.fill_(-7)
        right = [comm.all_reduce(w, out=v, algorithm="multicast") is v, exact(v.local, total)]
        right += [exact(w.local, parts[comm.rank])]
        right += [comm.all_reduce(w, algorithm="multicast") is w, exact(w.local, total)]
        wrong += [] if all(right) else [(shape, right)]
    return wrong


def test_handles_through_the_switch():
    for world_size in (1, 2):
        assert tricomm.simulate(through_the_switch, world_size, options=OPTIONS) == [[]] * world_size
    report = tricomm.check(through_the_switch, 3, schedules=2, options=OPTIONS)  # only the handles in use
    assert report.ok, report
    assert tricomm.simulate(through_the_switch, 3, options=OPTIONS) == [[]] * 3


def test_handles_have_a_multicast_address_if_the_group_has_one_and_it_is_wanted():
    def body(comm):
        w, v = comm.symmetric((3,), torch.int8), comm.symmetric((3,), torch.int8)
        without = comm.symmetric((3,), torch.float32, multicast=False)
        arena = comm._internal.group.arena
        assert not w.no_multicast and len({0, arena.multicast, w.multicast, v.multicast}) == 4
        assert comm.explain("all_reduce", without).reason.endswith("through a switch: it was made with multicast=False")
        arena.multicast, arena.no_multicast = 0, "the probe said no"
        refused = comm.symmetric((3,), torch.int8)
        return w.multicast, w.table.tolist(), without.multicast, refused.multicast, refused.no_multicast

    result = tricomm.simulate(body, 2, options=OPTIONS)
    assert result[0] == result[1] and result[0][2:] == (0, 0, "the probe said no") and len(result[0][1]) == 2


@pytest.mark.skipif(multimem.why_not(90) is not None, reason="this Triton is refused multimem")
def test_handles_through_the_switch_compiled():
    def body(comm):
        w, v = comm.symmetric((9001,), torch.int32), comm.symmetric((9001,), torch.int32)
        w.local.copy_(torch.arange(9001) + comm.rank)
        v.local.fill_(-1)
        chosen = [comm.explain("all_reduce", w, out=out).algorithm for out in (None, v, v.local)]
        results = [comm.all_reduce(w, out=v, algorithm="multicast").local.tolist()]
        results.append(comm.all_reduce(w, algorithm="multicast").local.tolist())
        return chosen, [each == [6 * n + 15 for n in range(9001)] for each in results]

    results = []
    texts = ptx_mutants.launched(lambda: results.extend(tricomm.simulate(body, 6, compiled="sm_90")))
    assert results == [(["two_shot", "multicast", "one_shot"], [True, True])] * 6
    # The ranks wrote by their unicast addresses in launches that have ended, so no alias fence is needed.
    assert [text.count("fence.proxy.alias") for text in texts["all_reduce_multicast_zero_copy"]] == [0]


@pytest.mark.skipif(multimem.why_not(90) is not None, reason="this Triton is refused multimem")
def test_no_access_through_the_switch_is_made_twice():
    """The smallest tiles have a word for each thread: a thread without one would add another thread's word twice."""

    def body(comm):
        w = comm.symmetric((1029,), torch.int32)
        w.local.copy_(torch.arange(1029) + comm.rank)
        choice = comm.explain("all_reduce", w, algorithm="multicast")
        right = comm.all_reduce(w, algorithm="multicast").local.tolist() == [2 * n + 1 for n in range(1029)]
        return right, choice.block >= 64 * choice.warps

    for tile in (64, 256):
        options = tricomm.Options(arena_bytes=256 << 10, _tuning=Tuning(tile=tile))
        assert tricomm.simulate(body, 2, options=options, compiled="sm_90") == [(True, True)] * 2
    with pytest.raises(InvalidArgument, match="tiles of 64 to"):
        tricomm.simulate(body, 2, options=tuned(options, tile=32), compiled="sm_90")


def test_the_output_handle_is_part_of_the_call():
    def body(comm):
        w, *others = (comm.symmetric((4,), torch.int64) for _ in range(3))
        comm.all_reduce(w, out=others[comm.rank], algorithm="multicast")

    with pytest.raises(tricomm.CollectiveMismatch, match="handle 1 into 2"):
        tricomm.simulate(body, 2, options=OPTIONS)


def test_calls_that_cannot_use_nvls_are_refused_by_name():
    def body(comm):
        w, v = comm.symmetric((8,), torch.float32), comm.symmetric((8,), torch.float32)
        with pytest.raises(InvalidArgument, match="the switch has no avg of float32; .* there is two_shot/simple"):
            comm.all_reduce(w, "avg", algorithm="multicast")
        with pytest.raises(InvalidArgument, match="there is no multicast kernel; there is one_shot/simple"):
            comm.all_reduce(w, out=torch.empty(8), algorithm="multicast")
        with pytest.raises(InvalidArgument, match="there is no multicast kernel; there is one_shot/simple"):
            comm.all_gather(w, algorithm="multicast")
        v.no_multicast = "the probe said no"
        with pytest.raises(InvalidArgument, match="here the probe said no; there is one_shot/simple"):
            comm.all_reduce(w, out=v, algorithm="multicast")
        assert comm.explain("all_reduce", w, out=v).reason.endswith("not through a switch: the probe said no")
        comm.all_reduce(w, out=v)

    tricomm.simulate(body, 2, options=OPTIONS)


def test_a_batch_invariant_group_does_not_go_through_the_switch():
    def body(comm):
        w = comm.symmetric((8,), torch.float32)
        assert comm.explain("all_reduce", w).algorithm == "two_shot"
        with pytest.raises(InvalidArgument, match="reduces in rank order; there is two_shot/simple"):
            comm.all_reduce(w, algorithm="multicast")

    tricomm.simulate(body, 2, options=replace(OPTIONS, batch_invariant=True))
