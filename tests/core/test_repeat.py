"""A call that was made before takes a short way: it must refuse and give what the first one does."""

import inspect
import textwrap
from types import SimpleNamespace

import pytest
import torch

import tricomm
from tricomm.core import collectives
from tricomm.core.collectives import Collectives
from tricomm.errors import InvalidArgument

SHAPE = (4, 6)


@pytest.fixture
def comm(tmp_path):
    tmp_path.chmod(0o700)
    options = tricomm.Options(arena_bytes=256 * 1024)
    with tricomm.init(f"file://{tmp_path}/store", 0, 1, "cpu", options=options) as result:
        result.all_reduce(torch.ones(SHAPE))
        result.all_reduce(torch.ones(25)[1:])  # the same count, not aligned
        yield result


def freed():
    x = torch.ones(SHAPE)
    x.untyped_storage().resize_(8)
    return x


BAD = {
    "grad": (lambda: torch.ones(SHAPE, requires_grad=True), "requires grad"),
    "negated": (lambda: torch.ones(SHAPE, dtype=torch.complex64).conj().imag, "negated"),
    "freed": (freed, "freed or shrunk"),
    "sparse": (lambda: torch.ones(SHAPE).to_sparse(), "to_dense"),
    "nested": (lambda: torch.nested.nested_tensor([torch.ones(12), torch.ones(12)]), "nested"),
    "meta": (lambda: torch.ones(SHAPE, device="meta"), "meta"),
    "shared elements": (lambda: torch.ones(1, 1).expand(SHAPE), "share memory"),
    "a list": (lambda: [], "empty list"),
    "no tensor": (lambda: 3, "a torch.Tensor is needed"),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("what", BAD)
def test_what_the_first_call_refuses(comm, what):
    make, words = BAD[what]
    with pytest.raises(InvalidArgument, match=words):
        comm.all_reduce(make())


@pytest.mark.parametrize(
    ("kwargs", "words"), [({"op": "median"}, "median"), ({"algorithm": ["ring"]}, "names or None")]
)
def test_arguments_that_the_first_call_refuses(comm, kwargs, words):
    with pytest.raises(InvalidArgument, match=words):
        comm.all_reduce(torch.ones(SHAPE), **kwargs)


LOOKS = {  # a line of `repeat`, and what gets through without it
    "and x.device == self._device": BAD["meta"][0],
    "and not x.is_nested": BAD["nested"][0],
    "and x.is_contiguous()": lambda: torch.ones(48)[::2],
    "and not x.requires_grad": BAD["grad"][0],
    "and not x.is_neg()": lambda: torch._neg_view(torch.ones(SHAPE)),
    "and len(x.untyped_storage()) >= x.storage_offset() * known.itemsize + known.nbytes": freed,
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("line", LOOKS)
def test_without_any_of_the_looks_a_tensor_gets_through_that_must_not(comm, monkeypatch, line):
    source = textwrap.dedent(inspect.getsource(Collectives.repeat))
    assert source.count(line) == 1
    names = dict(vars(collectives))
    exec("from __future__ import annotations\n" + source.replace(line, ""), names)
    launched = []
    monkeypatch.setattr(comm._collectives, "_launch", lambda *call: launched.append(call))
    known = comm.known("sum", torch.float32, 24)
    assert not comm.repeat(known, LOOKS[line]()) and launched == []
    assert names["repeat"](comm._collectives, known, LOOKS[line]()) and len(launched) == 1


def test_every_way_to_lie_in_memory(comm):
    for x in (torch.ones(SHAPE), torch.ones(25)[1:], torch.ones(6, 4).t(), torch.ones(48)[::2], torch.nn.Parameter(
        torch.ones(SHAPE), requires_grad=False
    )):  # fmt: skip
        for _ in range(2):
            x.fill_(7)
            assert comm.all_reduce(x) is x and torch.equal(x, torch.full_like(x, 7))


def test_repeats_are_counted_and_announced(comm):
    before, sequence = tricomm.stats()["kernels"]["all_reduce"], comm._launcher.sequence
    x = torch.ones(SHAPE)
    for _ in range(3):
        comm.all_reduce(x)
    known = comm.known("sum", x.dtype, 24)
    assert known is not None and comm.known("max", x.dtype, 24) is None
    assert comm.repeat(known, x)  # as a c10d group does
    assert tricomm.stats()["kernels"]["all_reduce"] == before + 4 and comm._launcher.sequence == sequence + 4


def test_after_close(comm):
    comm.close()
    with pytest.raises(tricomm.GroupAborted, match="closed"):
        comm.all_reduce(torch.ones(SHAPE))


def test_a_call_that_has_not_run_is_not_captured_and_the_group_goes_on(comm, monkeypatch):
    """On a GPU; here the communicator only says that it has one."""
    monkeypatch.setattr(comm._planner, "_gpu", SimpleNamespace(capturing=lambda: True))
    for call in (lambda: comm.all_reduce(torch.ones(7)), lambda: comm.all_gather(torch.ones(7)), comm.barrier):
        with pytest.raises(InvalidArgument, match="run this call once before capture"):
            call()
    monkeypatch.undo()
    assert not comm._launcher.captured, "a call that was refused is in no graph"
    assert torch.equal(comm.all_reduce(torch.ones(7)), torch.ones(7))


def test_what_known_has_not_returned_is_refused_and_the_group_goes_on(comm):
    for wrong, name in ((None, "NoneType"), ("sum", "str")):
        with pytest.raises(InvalidArgument, match=f"repeat: known={name}: what known"):
            comm.repeat(wrong, torch.ones(SHAPE))
    assert torch.equal(comm.all_reduce(torch.ones(7)), torch.ones(7))
