"""Functions of all_reduce_rows that do not work: refused by name, on ranks in processes and compiled for a GPU, before
anything is sent, so that the group stays usable."""

from dataclasses import replace

import pytest
import torch
import triton
import triton.language as tl

import tricomm
from tests import ranks
from tests.core.fused.test_prologue import SMALL, written
from tricomm.core import launch_plan
from tricomm.core.fused import row_functions
from tricomm.core.fused.expert_rows import finalize_types
from tricomm.core.fused.fused_call import Epilogue, UserEpilogue
from tricomm.core.launch_plan import Request
from tricomm.errors import GroupAborted, InvalidArgument
from tricomm.kernels import layout, wide_words
from tricomm.kernels.device.epilogue import nothing
from tricomm.kernels.device.rows import columns_at, values
from tricomm.policy.selection import Choice
from tricomm.policy.selection_facts import SelectionFacts

EPS = 1e-6


@triton.jit
def a_number(number, columns, inside, operands, SPEC: tl.constexpr):
    return 1.0


@triton.jit
def two_blocks(number, columns, inside, operands, SPEC: tl.constexpr):
    return columns, columns


@triton.jit
def no_block(number, columns, inside, operands, SPEC: tl.constexpr):
    return tl.load(operands[1])


@triton.jit
def of_no_type(number, columns, inside, operands, SPEC: tl.constexpr):
    pass


@triton.jit
def of_another_shape(number, columns, inside, operands, SPEC: tl.constexpr):
    return tl.zeros([2, 4], tl.float32)


@triton.jit
def pointers(number, columns, inside, operands, SPEC: tl.constexpr):
    return operands[1] + columns


@triton.jit
def of_four_operands(number, columns, inside, operands, SPEC: tl.constexpr):
    out, x, bias, factor = operands
    return tl.load(x + columns, mask=inside, other=0) * factor


@triton.jit
def indexed(number, columns, inside, operands, SPEC: tl.constexpr):
    out, x, index = operands
    return tl.load(x + tl.load(index + number) * SPEC.HIDDEN + columns, mask=inside, other=0)


@triton.jit
def of_two_operands(number, operands, SPEC: tl.constexpr):
    out, x = operands
    return (tl.load(x),)


@triton.jit
def five_operands(row, operands, SPEC: tl.constexpr):
    [out, x, bias, factor, more] = operands


@triton.jit
def of_no_field(row, operands, SPEC: tl.constexpr):
    at, inside = columns_at(0, 0, SPEC)
    tl.store(operands[0] + row.number * SPEC.HIDDEN + at, 5.0, mask=inside)
    tl.store(operands[0], row.length)


@triton.jit
def prepared_twice(row, operands, SPEC: tl.constexpr):
    first, second = row.prepared


# Each with the words of the interpreter's refusal and the compiler's.
EPILOGUES = {
    five_operands: ("epilogue unpacks 5 operands, it is called with 3",) * 2,
    of_no_field: ("epilogue of_no_field on row 0 of these operands: AttributeError", "length"),
    prepared_twice: ("epilogue prepared_twice on row 0 of these operands: ValueError", "unpack"),
}
PREPARES = {of_two_operands: ("prepare unpacks 2 operands, it is called with 3",) * 2}
PROLOGUES = {
    a_number: ("the prologue returns float; it has to return a block of numbers", "'float' object"),
    two_blocks: ("the prologue returns tuple", "'tuple' object"),
    no_block: ("the prologue returns fp32 of shape []", "in the shape of its columns"),
    of_no_type: ("the prologue returns NoneType", "'NoneType' object"),
    of_another_shape: ("the prologue returns fp32 of shape [2, 4]", "in the shape of its columns"),
    pointers: ("the prologue returns pointer<fp32>", "in_fp32"),
    of_four_operands: ("prologue unpacks 4 operands, it is called with 3",) * 2,
    indexed: ("prologue indexed on row 0 of these operands", "indexed"),  # its index has to be of integers
}


FUNCTIONS = {"prologue": PROLOGUES, "prepare": PREPARES, "epilogue": EPILOGUES}
WHYS = [why for functions in FUNCTIONS.values() for why in functions.values()]


def refusals(comm):
    """The refusals of calls with these functions, each followed by a call that works."""
    x, out, texts = torch.ones(3, 40), torch.zeros(3, 40), []
    for kind, function in ((kind, f) for kind, functions in FUNCTIONS.items() for f in functions):
        more = {"epilogue": written, kind: function}
        with pytest.raises(InvalidArgument) as refused:
            comm.all_reduce_rows(x, more.pop("epilogue"), out, x, x[0].contiguous(), **more)
        texts.append(str(refused.value))
        total = comm.all_reduce(torch.full((3,), 1.0 + comm.rank))
        assert total.tolist() == [sum(range(1, comm.world_size + 1))] * 3
    assert not out.any()
    return texts


def in_a_process(rank, world_size, tell, url):
    with tricomm.init(url, rank, world_size, "cpu") as comm:
        return refusals(comm)


def test_they_are_refused_on_ranks_in_processes_whose_group_stays_usable(url):
    for texts in ranks.run(2, in_a_process, url, timeout=150):
        for text, (why, _) in zip(texts, WHYS, strict=True):
            assert why in text and text.startswith("all_reduce_rows: "), text


def test_they_are_refused_when_compiled_for_a_gpu():
    known = wide_words.why_not(90) is None  # the words of an older Triton are others
    for texts in tricomm.simulate(refusals, 2, compiled="sm_90"):
        for text, (of_trial, why) in zip(texts, WHYS, strict=True):
            assert of_trial == why or "cannot compile all_reduce_rows_one_shot for sm_90" in text, text
            assert why in text or (not known and of_trial != why), text


@triton.jit
def of_one_operand(row, operands, SPEC: tl.constexpr):
    operands = operands[1:]
    out, bias = operands
    tl.store(out, row.number)


def test_operands_that_were_assigned_before_may_have_any_number_of_names():
    def body(comm):
        out = torch.full((1,), 9.0)
        comm.all_reduce_rows(torch.ones(1, 8), of_one_operand, 1.0, out, 2.0)
        return out.item()

    assert tricomm.simulate(body, 2) == [0.0, 0.0]


@triton.jit
def added(row, operands, SPEC: tl.constexpr):
    """The first element of each word; the rows are counted."""
    at, inside = columns_at(0, 0, SPEC)
    places = operands[0] + row.number * SPEC.HIDDEN + at
    tl.store(places, tl.load(places, mask=inside) + values(row, 0, 0, SPEC), mask=inside)
    tl.atomic_add(operands[1], 1.0)


@triton.jit
def until_stored(row, operands, SPEC: tl.constexpr):
    while tl.load(operands[0]) == 0:
        tl.store(operands[0], 1.0)


@triton.jit
def counted(number, operands, SPEC: tl.constexpr):
    tl.store(operands[2], tl.load(operands[2]) + 1)
    return ()


def accumulated(comm):
    out, count, prepared = torch.full((3, 40), 5.0), torch.zeros(1), torch.zeros(1)
    for _ in range(2):
        comm.all_reduce_rows(torch.ones(3, 40), added, out, count, prepared, prepare=counted)
    ended = torch.zeros(1)
    comm.all_reduce_rows(torch.ones(3, 40), until_stored, ended)
    return out[:, ::2].unique().tolist(), count.item(), prepared.item(), ended.item()


def test_a_trial_changes_nothing():
    assert tricomm.simulate(accumulated, 2) == [([9.0], 6.0, 6.0, 1.0)] * 2


def test_without_its_director_a_trial_changes_the_results(monkeypatch):
    def access(self, access):
        access.perform(None)

    monkeypatch.setattr(row_functions._WithoutStores, "access", access)
    assert tricomm.simulate(accumulated, 2) != [([9.0], 6.0, 6.0, 1.0)] * 2


@triton.jit
def failing_later(row, operands, SPEC: tl.constexpr):
    if row.number > tl.load(operands[0]):
        tl.store(operands[0], row.length)


def late_failure(rank, world_size, tell, url):
    """A function that fails on rank 1 for the last of several rows, in a later chunk."""
    with tricomm.init(url, rank, world_size, "cpu", options=replace(SMALL, timeout=60.0)) as comm:
        comm.all_reduce(torch.ones(3))
        ranks.together(url, rank, range(world_size))
        x, last, said = torch.ones(40, 200), torch.full((1,), 36.0 if rank else 99.0), []
        for call in (lambda: comm.all_reduce_rows(x, failing_later, last), lambda: comm.all_reduce(x)):
            try:
                call()
                said.append("")
            except Exception as error:
                said.append(f"{type(error).__name__}: {error}")
        return said


def test_a_function_that_fails_for_a_later_row_is_named_on_all_ranks_and_no_rank_waits(url):
    first, second = ranks.run(2, late_failure, url, timeout=150)
    assert second[0] == "AttributeError: 'Row' object has no attribute 'length'"
    for text in (first[1], second[1]):
        assert "GroupAborted" in text and "rank 1 was stopped by AttributeError: 'Row' object has no" in text, text


def test_without_the_trial_the_group_is_lost(monkeypatch):
    monkeypatch.setattr(row_functions, "attempt", lambda *args: None)

    def body(comm):
        x, out = torch.ones(3, 40), torch.zeros(3, 40)
        with pytest.raises((AttributeError, GroupAborted)):
            comm.all_reduce_rows(x, of_no_field, out)
        with pytest.raises(GroupAborted, match="is lost"):
            comm.all_reduce(x)

    tricomm.simulate(body, 2)


@pytest.mark.parametrize("kind", ["own", "experts", "plain"])
def test_calls_without_another_route_are_fused_whatever_their_size(kind):
    """On a GPU a plain norm of more than 2 MiB is not."""
    site = SelectionFacts("sm_90", 8, layout.plan(8, 64 << 20), 64)
    plain = Epilogue(7168, torch.bfloat16, EPS)
    epilogue = {
        "own": UserEpilogue(7168, written, nothing, ()),
        "experts": plain._replace(experts=finalize_types(torch.bfloat16), top_k=8),
        "plain": plain,
    }[kind]
    for rows, fused in ((100, True), (256, kind != "plain"), (1 << 17, kind != "plain")):
        request = Request("all_reduce", "sum", epilogue=epilogue).sized(torch.bfloat16, rows * 7168)
        choice = launch_plan.choose_fused(site, request, "eager")
        assert isinstance(choice, Choice) == fused, choice
