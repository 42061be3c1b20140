"""Fused calls over two fake GPUs: the fast path of a repeated call has the refusals and results of a first one; graphs;
host overhead."""

from __future__ import annotations

import inspect
import textwrap

import pytest
import torch

from devtools import null_launch
from tests.core.fused import fused_reference as reference
from tests.core.fused import test_expert_rows as experts
from tests.core.fused import test_prologue as prologues
from tests.core.gpu.conftest import MINE, device_of
from tests.core.gpu.test_host_path import ONE_OF_EACH, Operations, asked, kept_and_used
from tricomm import GroupAborted
from tricomm.core.calls import fused_calls
from tricomm.core.calls.fused_calls import FusedCalls, KnownCall
from tricomm.errors import InvalidArgument

ROWS, HIDDEN = 2, 48
EPS = 0.5


def tensors(seed=0, dtype=torch.bfloat16):
    x, residual, weight = reference.inputs(0, ROWS, HIDDEN, dtype, seed)
    return x, residual, weight, torch.full_like(x, 77), torch.full_like(x, 77)


def call(comm, x, residual, weight, norm_out, residual_out, **more):
    return comm.all_reduce_rms_norm(
        x, residual, weight, **{"eps": EPS, "norm_out": norm_out, "residual_out": residual_out} | more
    )


def right(given, result):
    x, residual, weight = given[:3]
    total = x.double() + residual.double()
    exact = reference.norm_of(total, weight, EPS)
    return torch.equal(result[1].double(), total) and reference.within_an_ulp(result[0], exact)


def test_a_repeated_call_makes_three_queries_and_has_separate_memory(comm, world):
    call(comm, *tensors())
    for seed in (1, 2):
        given = tensors(seed)
        assert asked(world, lambda: call(comm, *given)) == ONE_OF_EACH  # noqa: B023
        assert right(given, given[3:])
    x, residual, weight, norm, _ = given
    assert device_of(comm).launches[-1].words[0] == x.data_ptr()
    alone = comm.all_reduce_rms_norm(x, residual, weight, EPS)
    again = comm.all_reduce_rms_norm(x, residual, weight, EPS, async_op=True).wait()
    assert torch.equal(alone[0], norm) and torch.equal(again[0], norm) and again[0].data_ptr() != alone[0].data_ptr()
    flat = torch.zeros(ROWS * HIDDEN + 1, dtype=x.dtype)[1:].view(ROWS, HIDDEN)  # of a kernel compiled again
    for _ in range(2):
        assert torch.equal(call(comm, flat.copy_(x), *given[1:])[0], norm)
    for _ in range(2):  # in place
        y, other = x.clone(), residual.clone()
        call(comm, y, other, weight, y, other)
        assert torch.equal(y, norm) and torch.equal(other, alone[1])
    longer = torch.ones(1, HIDDEN, dtype=x.dtype)
    assert comm.all_reduce_rms_norm(longer, None, weight, EPS)[1].shape == (1, HIDDEN)


def test_a_replay_of_fused_calls_reads_the_current_inputs(comm, world):
    given, other = tensors(3), tensors(4)
    capture = lambda: world.capture(world.new_stream(torch.device("cuda", MINE)))  # noqa: E731
    with capture(), pytest.raises(InvalidArgument, match="run this call once before capture"):
        call(comm, *given)
    call(comm, *given)
    with capture() as graph:
        assert asked(world, lambda: call(comm, *given)) == ONE_OF_EACH
        call(comm, *other)
    assert len(graph) == 2 and comm._launcher.captured
    modes = {plan.mode: plan.fingerprint for plan in comm._planner.plans.values() if plan.numel == ROWS * HIDDEN}
    number = device_of(comm).launches[-1].parameters
    assert modes["graph"].to_bytes(4, "little") in [p[:4] for p in number]
    for seed in (5, 6):
        for held, fresh in ((given, tensors(seed)), (other, tensors(seed + 10))):
            for name, new in zip(held, fresh, strict=True):
                name.copy_(new)
        for replay in graph:
            replay()
        assert right(given, given[3:]) and right(other, other[3:])


def test_static_scales_are_those_that_a_graph_may_read(comm, world):
    x, residual, weight, *_ = tensors()
    one = comm.all_reduce_rms_norm_quantized(x, residual, weight, EPS, quantize="fp8", scale=0.25)
    with world.capture(world.new_stream(torch.device("cuda", MINE))) as graph:
        # Keep all results: on a GPU the graph's pool keeps the memory that a replay writes to, here nothing else does.
        again = comm.all_reduce_rms_norm_quantized(x, residual, weight, EPS, quantize="fp8", scale=0.25)
    graph[0]()
    assert torch.equal(again.codes.view(torch.uint8), one.codes.view(torch.uint8)) and again.codes.float().any()


def freed():
    x = tensors()[0]
    x.untyped_storage().resize_(8)
    return x


BAD = {
    "another device": (lambda g: (torch.empty(ROWS, HIDDEN, device="meta").bfloat16(), *g[1:]), "meta"),
    "negated": (lambda g: (g[0], torch._neg_view(g[1]), *g[2:]), "negated"),
    "freed": (lambda g: (freed(), *g[1:]), "freed or shrunk"),
    "gaps": (lambda g: (g[0].t().contiguous().t(), *g[1:]), "strides"),
    "grad": (lambda g: (g[0].requires_grad_(), *g[1:]), "requires grad"),
    "type": (lambda g: (*g[:2], g[2].half(), *g[3:]), "weight: torch.float16"),
    "shape": (lambda g: (*g[:2], g[2][:40], *g[3:]), r"weight: .*\(40,\)"),
    "over another": (lambda g: (*g[:3], g[3], g[3]), "overlaps norm_out"),
    "over a weight": (lambda g: (*g[:2], g[3][1], *g[3:]), "norm_out overlaps weight"),
    "no tensor": (lambda g: (*g[:2], [1.0], *g[3:]), "a torch.Tensor is needed, found list"),
}


@pytest.fixture
def known(comm):
    call(comm, *tensors())
    call(comm, *tensors())
    return comm


def test_a_repeated_fused_call_refuses_what_a_first_one_refuses(known):
    for make, words in BAD.values():
        with pytest.raises(InvalidArgument, match=words):
            call(known, *make(tensors()))
    before = device_of(known).calls.count("cuLaunchKernel")
    call(known, *tensors(), weight_bias=1.0)
    for numbers in ({"weight_bias": True}, {"eps": [1]}, {"weight_bias": False}, {"algorithm": "ring"}):
        with pytest.raises(InvalidArgument):
            call(known, *tensors(), **numbers)
    assert device_of(known).calls.count("cuLaunchKernel") == before + 1
    given = tensors(9)
    assert right(given, call(known, *given))


LOOK = "known: KnownCall = first_like(variants, *looked_at)"
STORAGE = "elif len(t.untyped_storage()) < t.storage_offset() * itemsize + nbytes:"
APART = "if start < first + more and first < start + nbytes and not (may_be and start == first):"
LOOKS = {
    "a wrapper": (LOOK, lambda g: (*g[:2], type("Wrapped", (torch.Tensor,), {})(g[2]), *g[3:])),
    **{what: (LOOK, BAD[what][0]) for what in ("type", "shape", "gaps", "grad", "negated")},
    "another device": (LOOK, lambda g: (*g[:2], torch.empty_like(g[2], device="meta"), *g[3:])),
    "freed": (STORAGE, BAD["freed"][0]),
    "over another": (APART, lambda g: (*g[:4], g[3].view(ROWS, HIDDEN))),
}


@pytest.mark.parametrize("what", LOOKS)
def test_without_one_of_the_checks_an_invalid_tensor_is_accepted(known, monkeypatch, what):
    line, make = LOOKS[what]
    source = textwrap.dedent(inspect.getsource(FusedCalls.repeat))
    assert source.count(line) == 1
    names = dict(vars(fused_calls))
    other = "known: KnownCall = variants[0]" if line is LOOK else "elif False:" if line is STORAGE else "if False:"
    exec("from __future__ import annotations\n" + source.replace(line, other), names)
    ((key, (call_known,)),) = [
        (key, kept) for key, kept in known._planner.prepared.items() if isinstance(kept[0], KnownCall)
    ]
    x, residual, weight, norm_out, residual_out = make(tensors())
    given = (x, residual_out, weight, residual, norm_out, None, None, None)
    looked_at = [x, weight, residual, norm_out, residual_out]
    launched, fused = [], known._fused
    monkeypatch.setattr(fused._launcher, "launch", lambda *call: launched.append(call))
    assert fused.repeat(key[1], given, looked_at) is None and launched == []
    assert names["repeat"](fused, key[1], given, looked_at) is not None
    assert len(launched) == 1 and call_known.plans != [None] * 4


def test_after_a_fault_prepared_calls_are_refused(known):
    known._faults.abort(GroupAborted, "as a test wants it")
    with pytest.raises(GroupAborted, match="as a test wants it"):
        call(known, *tensors())


def test_evicted_plans_are_made_again(known):
    known.time_calls(1)
    given = tensors(7)
    assert right(given, call(known, *given))
    known.time_calls(0)
    given = tensors(8)
    assert right(given, call(known, *given))


def test_a_repeated_call_leaves_no_object_and_allocates_no_memory_of_torch(monkeypatch):
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "40")  # the flight recorder is full before the calls that are counted
    with null_launch.communicator() as made:
        given = tensors()
        run = lambda: call(made, *given)  # noqa: E731
        run()
        blocks, objects, used = kept_and_used(run, 1000)
        assert blocks < 400 and objects < 50 and used < 4000
        with Operations() as operations:
            run()  # in another mode: one more first call
            operations.seen.clear()
            run()
        assert operations.seen == []


def test_rows_are_made_again_when_a_graph_replays(comm, world):
    """Of the operands as they are then; in a capture nothing new is compiled."""

    def call(operands, out):
        comm.all_reduce_rows(torch.empty_like(out), prologues.written, out, *operands, prologue=prologues.split_k)

    made, operands = prologues.split_k_case(0, 2, 48, torch.bfloat16)
    out = torch.full((2, 48), 77, dtype=torch.bfloat16)
    with world.capture(world.new_stream(torch.device("cuda", MINE))), pytest.raises(InvalidArgument, match="run this"):
        call(operands, out)
    call(operands, out)
    assert torch.equal(out, made.bfloat16())
    with world.capture(world.new_stream(torch.device("cuda", MINE))) as graph:
        call(operands, out)
    for seed in (5, 6):
        made, (parts, _, _) = prologues.split_k_case(seed, 2, 48, torch.bfloat16)
        operands[0].copy_(parts)
        graph[0]()
        assert torch.equal(out, made.bfloat16())


def test_expert_rows_are_summed_again_when_a_graph_replays(comm, world):
    given, (_, residual, weight, _, residual_out) = experts.drawn(comm, HIDDEN, torch.bfloat16), tensors()
    residual, residual_out = (t[:1].repeat(experts.TOKENS, 1) for t in (residual, residual_out))
    workspace = experts.workspace_of(comm, HIDDEN, torch.bfloat16)
    call = lambda: experts.moe(comm, workspace, 7, given, residual, weight, residual_out=residual_out)  # noqa: E731
    call()
    with world.capture(world.new_stream(torch.device("cuda", MINE))) as graph:
        kept = call()
    given[0].copy_(torch.arange(len(given[0]))[:, None] - 5.0)
    graph[0]()
    total = experts.summed(*given).double() + residual.double()
    assert torch.equal(residual_out, total.bfloat16())
    assert reference.within_an_ulp(kept, reference.norm_of(residual_out.double(), weight, experts.EPS))


def expert_call(comm, workspace, given, **more):
    """(norm, residual_out) of pattern 7, and whether they are right."""
    residual = torch.arange(experts.TOKENS * HIDDEN).view(experts.TOKENS, HIDDEN).bfloat16() % 7
    weight, out = torch.ones(HIDDEN).bfloat16(), torch.full_like(residual, 77)
    norm = experts.moe(comm, workspace, 7, given, residual, weight, residual_out=out, **more)
    total = experts.summed(*given).double() + residual.double()
    exact = reference.norm_of(out.double(), weight, experts.EPS)
    return torch.equal(out, total.bfloat16()) and reference.within_an_ulp(norm, exact)


@pytest.mark.parametrize("without", [(), (2,), (3,), (2, 3)])
def test_a_repeated_call_of_expert_rows_skips_the_checks_of_a_first_one(comm, monkeypatch, without):
    workspace = experts.workspace_of(comm, HIDDEN, torch.bfloat16)

    def drawn(seed):
        comm_of_seed = type("Rank", (), {"rank": seed})
        return [None if n in without else t for n, t in enumerate(experts.drawn(comm_of_seed, HIDDEN, torch.bfloat16))]

    first, checked, checks = fused_calls.fused_call.checked, [], []
    monkeypatch.setattr(fused_calls.fused_call, "checked", lambda *asked: checks.append(1) or first(*asked))
    for seed in (0, 1, 2):
        assert expert_call(comm, workspace, drawn(seed))
        checked.append(len(checks))
    assert checked == [1, 1, 1]
    rows, places, weight, shared = drawn(3)
    for change in (
        (rows[:5].contiguous(), places, weight, shared),  # fewer rows, so that more places are outside
        (rows, places[:, :4].contiguous(), None if weight is None else weight[:, :4].contiguous(), shared),
        (torch.cat([rows.view(-1), rows[0]])[HIDDEN:].view_as(rows), places, weight, shared),
    ):
        assert expert_call(comm, workspace, change)
    for change, words in (
        ((rows, places.long(), weight, shared), "expert places: torch.int64"),
        ((rows.half(), places, weight, shared), "expert rows: torch.float16"),
        ((rows, places[:2], weight, shared), "expert places"),
        ((rows, places.t().contiguous().t(), weight, shared), "expert places"),
        ((rows, places, [1.0], shared), "expert weight: a torch.Tensor is needed"),
    ):
        with pytest.raises(InvalidArgument, match=words):
            expert_call(comm, workspace, change)
    with pytest.raises(InvalidArgument, match="norm_out overlaps expert rows"):
        expert_call(comm, workspace, (rows, places, weight, shared), norm_out=rows[2 : 2 + experts.TOKENS])
    into = torch.full((experts.TOKENS, HIDDEN), 77).bfloat16()
    for _ in range(2):
        assert expert_call(comm, workspace, (rows, places, weight, shared), norm_out=into)
    with pytest.raises(InvalidArgument, match="overlaps expert rows"):  # like a known call, but for the memory
        expert_call(comm, workspace, (rows, places, weight, shared), norm_out=rows[2 : 2 + experts.TOKENS])
    assert expert_call(comm, workspace, (rows, places, weight, shared))


def test_a_tensor_that_is_given_twice_is_no_other_one_later(comm):
    workspace = experts.workspace_of(comm, HIDDEN, torch.bfloat16)
    rows, places, weight, _ = experts.drawn(comm, HIDDEN, torch.bfloat16)
    for shared in (rows[: experts.TOKENS], torch.ones(experts.TOKENS, HIDDEN).bfloat16(), rows[3 : 3 + experts.TOKENS]):
        for _ in range(2):
            assert expert_call(comm, workspace, (rows, places, weight, shared))
    residual = torch.ones(experts.TOKENS, HIDDEN).bfloat16()
    for shared in (residual, residual.clone(), residual):
        given = rows, places, weight, shared
        out = torch.empty_like(residual)
        experts.moe(comm, workspace, 7, given, residual, residual[0], residual_out=out)
        assert torch.equal(out, (experts.summed(*given).double() + residual.double()).bfloat16())
