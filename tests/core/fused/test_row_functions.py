"""Functions of all_reduce_rows that do not work: refused by name, on ranks in processes and compiled for a GPU, before
anything is sent, so that the group stays usable."""

import pytest
import torch
import triton
import triton.language as tl

import tricomm
from tests import ranks
from tests.core.fused.test_prologue import written
from tricomm.core import launch_plan
from tricomm.core.fused import row_functions
from tricomm.core.fused.expert_rows import finalize_types
from tricomm.core.fused.fused_call import Epilogue, UserEpilogue
from tricomm.core.launch_plan import Request
from tricomm.errors import GroupAborted, InvalidArgument
from tricomm.kernels import layout, wide_words
from tricomm.kernels.device.epilogue import nothing
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


# Each with the words of the interpreter's refusal and the compiler's.
PROLOGUES = {
    a_number: ("the prologue returns float; it has to return a block of numbers", "'float' object"),
    two_blocks: ("the prologue returns tuple", "'tuple' object"),
    no_block: ("the prologue returns fp32 of shape []", "in the shape of its columns"),
    of_no_type: ("the prologue returns NoneType", "'NoneType' object"),
    of_another_shape: ("the prologue returns fp32 of shape [2, 4]", "in the shape of its columns"),
    pointers: ("the prologue returns pointer<fp32>", "in_fp32"),
    of_four_operands: ("of_four_operands on row 0 of these operands: ValueError", "unpack"),
    indexed: ("prologue indexed on row 0 of these operands", "indexed"),  # its index has to be of integers
}


def refusals(comm, prepares=(of_two_operands,)):
    """The refusals of calls with these functions, each followed by a call that works."""
    x, out, texts = torch.ones(3, 40), torch.zeros(3, 40), []
    for functions in (*({"prologue": f} for f in PROLOGUES), *({"prepare": f} for f in prepares)):
        with pytest.raises(InvalidArgument) as refused:
            comm.all_reduce_rows(x, written, out, x, x[0].contiguous(), **functions)
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
        for text, (why, _) in zip(texts, (*PROLOGUES.values(), ("prepare of_two_operands on row 0", "")), strict=True):
            assert why in text and text.startswith("all_reduce_rows: "), text


def test_they_are_refused_when_compiled_for_a_gpu():
    # Triton before 3.9 gives two names the first two of four values.
    prepares = (of_two_operands,) if wide_words.why_not(90) is None else ()
    for texts in tricomm.simulate(lambda comm: refusals(comm, prepares), 2, compiled="sm_90"):
        whys = [why for _, why in PROLOGUES.values()] + ["of_two_operands"] * len(prepares)
        for text, why in zip(texts, whys, strict=True):
            assert "cannot compile all_reduce_rows_one_shot for sm_90" in text, text
            assert why in text or not prepares, text  # the words of an older Triton are others


def test_without_the_trial_the_group_is_lost(monkeypatch):
    monkeypatch.setattr(row_functions, "attempt", lambda *args: None)

    def body(comm):
        x, out = torch.ones(3, 40), torch.zeros(3, 40)
        with pytest.raises((ValueError, GroupAborted)):
            comm.all_reduce_rows(x, written, out, x, prologue=of_four_operands)
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
