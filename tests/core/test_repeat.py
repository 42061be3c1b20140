"""A repeated call takes a fast path, which must have the refusals and results of a first call."""

import inspect
import sys
import textwrap
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

import tricomm
from devtools import null_launch
from tricomm.core.calls import prepared_calls
from tricomm.core.calls.prepared_calls import PreparedCalls
from tricomm.core.planner import Planner
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
def test_a_repeated_call_refuses_the_tensors_that_a_first_one_refuses(comm, what):
    make, words = BAD[what]
    with pytest.raises(InvalidArgument, match=words):
        comm.all_reduce(make())


@pytest.mark.parametrize(
    ("kwargs", "words"), [({"op": "median"}, "median"), ({"algorithm": ["ring"]}, "names or None")]
)
def test_a_repeated_call_refuses_the_arguments_that_a_first_one_refuses(comm, kwargs, words):
    with pytest.raises(InvalidArgument, match=words):
        comm.all_reduce(torch.ones(SHAPE), **kwargs)


LOOKS = {  # tensors that are accepted without the check of the tensor, or without that of its storage
    "meta": BAD["meta"][0],
    "gaps": lambda: torch.ones(4, 12)[:, ::2],
    "grad": BAD["grad"][0],
    "negated": lambda: torch._neg_view(torch.ones(SHAPE)),
    "another type": lambda: torch.nn.Parameter(torch.ones(SHAPE)),
    "freed": freed,
}


@pytest.mark.parametrize("what", LOOKS)
def test_without_the_checks_an_invalid_tensor_is_accepted(comm, monkeypatch, what):
    source = textwrap.dedent(inspect.getsource(PreparedCalls.run))
    look = "if not known.look(x):"
    storage = "if len(x.untyped_storage()) >= x.storage_offset() * known.itemsize + known.nbytes:"
    assert source.count(look) == source.count(storage) == 1
    names = dict(vars(prepared_calls))
    mutant = source.replace(storage, "if True:") if what == "freed" else source.replace(look, "if False:")
    exec("from __future__ import annotations\n" + mutant, names)
    launched, calls = [], comm._calls
    monkeypatch.setattr(calls, "_launch", lambda *call: launched.append(call))
    call = ("all_reduce", "sum", None, None, -1, True), LOOKS[what]()
    assert calls.run(*call, known_only=True) is None and launched == []
    assert names["run"](calls, *call, known_only=True) is not None
    assert len(launched) == 1


WAYS = {  # a call over one rank, and its result
    "all_reduce": lambda comm, x, y: comm.all_reduce(x, out=y),
    "all_gather": lambda comm, x, y: comm.all_gather(x, out=y),
    "reduce_scatter": lambda comm, x, y: comm.reduce_scatter(x, out=y),
    "all_to_all": lambda comm, x, y: comm.all_to_all(x, out=y),
    "gather": lambda comm, x, y: comm.gather(x, 0, out=y),
    "scatter": lambda comm, x, y: comm.scatter(x, 0, out=y),
    "broadcast": lambda comm, x, y: y.copy_(comm.broadcast(x, 0)),
    "reduce": lambda comm, x, y: y.copy_(comm.reduce(x, 0)),
    "all_to_all_v": lambda comm, x, y: comm.all_to_all_v(x, [len(x)], [len(x)], out=y),
    "allocated": lambda comm, x, y: y.copy_(comm.all_gather(x)),
    "scattered, allocated": lambda comm, x, y: y.copy_(comm.reduce_scatter(x)),
    "exchanged, allocated": lambda comm, x, y: y.copy_(comm.all_to_all_v(x, (len(x),), (len(x),))),
    "another operation": lambda comm, x, y: comm.all_reduce(x, dist.ReduceOp.MAX, out=y),
}


@pytest.mark.parametrize("collective", WAYS)
def test_every_collective_is_repeated_without_a_plan(comm, monkeypatch, collective):
    call, x = WAYS[collective], torch.arange(24.0).view(SHAPE)
    call(comm, x, torch.empty(SHAPE))
    with torch.inference_mode():  # another mode: checked once more
        call(comm, x, torch.empty(SHAPE))
    monkeypatch.setattr(Planner, "plan", lambda *request: pytest.fail("planned again"))
    for mode in (torch.enable_grad, torch.inference_mode, torch.enable_grad):
        with mode():
            y = torch.full(SHAPE, torch.nan)
            call(comm, x, y)
        assert torch.equal(y, x)


OUTS = {
    "shape": (lambda x: torch.empty(24), "expected"),
    "dtype": (lambda x: torch.empty(SHAPE, dtype=torch.float64), "dtype"),
    "gaps": (lambda x: torch.empty(4, 12)[:, ::2], "not contiguous"),
    "grad": (lambda x: torch.empty(SHAPE, requires_grad=True), "requires grad"),
    "freed": (lambda x: freed(), "freed or shrunk"),
    "overlap": (lambda x: x.view(-1).as_strided(SHAPE, (6, 1), 1), "overlaps"),
    "no tensor": (lambda x: 3, "a torch.Tensor is needed"),
    "nested": (lambda x: BAD["nested"][0](), "nested"),
    "sparse": (lambda x: BAD["sparse"][0](), "to_dense"),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize(
    "collective", ["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "all_to_all_v", "gather", "scatter"]
)
@pytest.mark.parametrize("what", OUTS)
def test_a_repeated_call_refuses_a_bad_output(comm, collective, what):
    call, (make, words) = WAYS[collective], OUTS[what]
    x = torch.arange(48.0)[:24].view(SHAPE)
    call(comm, x, torch.empty(SHAPE))
    sequence = comm._launcher.sequence
    with pytest.raises(InvalidArgument, match=words):
        call(comm, x, make(x))
    assert comm._launcher.sequence == sequence
    y = torch.empty(SHAPE)
    call(comm, x, y)
    assert torch.equal(y, x)


@pytest.mark.parametrize("root", [True, 0.0, False])
def test_a_repeated_call_refuses_a_root_that_is_no_number(comm, root):
    x = torch.ones(SHAPE)
    comm.broadcast(x, 0)
    with pytest.raises(InvalidArgument, match="a rank from 0 to 0"):
        comm.broadcast(x, root)


SPLITS = {  # of 4 rows
    "sum": ([3], [3], "add up to 3"),
    "negative": ([-4], [-4], "in_splits"),
    "no integers": ([4.0], [4], "in_splits"),
    "a truth": ([True], [True], "in_splits"),
    "another rank": ([4, 0], [4], "1 numbers of rows"),
    "itself": ([4], [5], "sends itself 4 rows"),
    "no list": (4, [4], "in_splits"),
}


@pytest.mark.parametrize("what", SPLITS)
def test_a_repeated_call_checks_splits(comm, what):
    x, (sends, takes, words) = torch.arange(24.0).view(SHAPE), SPLITS[what]
    for rows in (4, 2, 3):  # the numbers of rows may change
        assert torch.equal(comm.all_to_all_v(x[:rows], [rows], [rows]), x[:rows])
    sequence = comm._launcher.sequence
    with pytest.raises(InvalidArgument, match=words):
        comm.all_to_all_v(x, sends, takes)
    assert comm._launcher.sequence == sequence


def test_alternating_shapes_and_dtypes(comm, monkeypatch):
    shapes, dtypes = [(24,), (4, 6), (2, 12), (1, 24)], [torch.float32, torch.int32, torch.float16]
    tensors = [torch.arange(24, dtype=dtype).view(shape) for shape in shapes[:2] for dtype in dtypes]
    for x in tensors:
        comm.all_reduce(x), comm.all_gather(x)
    monkeypatch.setattr(Planner, "plan", lambda *request: pytest.fail("planned again"))
    for x in 3 * tensors:
        assert comm.all_reduce(x) is x and torch.equal(x.view(-1), torch.arange(24, dtype=x.dtype))
        y = comm.all_gather(x)
        assert y.shape == x.shape and y.dtype == x.dtype and torch.equal(x, y)


def test_in_place_by_an_output_that_is_the_input(comm):
    x = torch.arange(24.0).view(SHAPE)
    for _ in range(3):
        assert comm.all_gather(x, out=x) is x and comm.all_reduce(x, out=x) is x
        assert comm.reduce_scatter(x, out=x) is x
        with pytest.raises(InvalidArgument, match="overlaps"):
            comm.all_to_all(x, out=x)
        comm.all_to_all(x, out=torch.empty(SHAPE))
    assert torch.equal(x, torch.arange(24.0).view(SHAPE))


def test_every_memory_layout(comm):
    for x in (
        torch.ones(SHAPE),
        torch.ones(25)[1:],
        torch.ones(6, 4).t(),
        torch.ones(48)[::2],
        torch.nn.Parameter(torch.ones(SHAPE), requires_grad=False),
    ):
        for _ in range(2):
            x.fill_(7)
            assert comm.all_reduce(x) is x and torch.equal(x, torch.full_like(x, 7))


def test_repeats_are_counted_and_announced(comm):
    before, sequence = tricomm.stats()["kernels"]["all_reduce"], comm._launcher.sequence
    x = torch.ones(SHAPE)
    for _ in range(3):
        comm.all_reduce(x)
    assert comm._internal.repeat("sum", x) and not comm._internal.repeat("max", x)  # as a c10d group does
    flat = torch.ones(24)
    assert (
        not comm._internal.repeat("sum", flat)
        and comm._internal.remember("sum", flat)
        and not comm._internal.remember("max", flat)
    )
    assert tricomm.stats()["kernels"]["all_reduce"] == before + 4 and comm._launcher.sequence == sequence + 4


def test_after_close(comm):
    comm.close()
    with pytest.raises(tricomm.GroupAborted, match="closed"):
        comm.all_reduce(torch.ones(SHAPE))


def test_a_call_that_has_not_run_is_refused_in_a_capture_and_the_group_still_works(comm, monkeypatch):
    """As on a GPU; the communicator here only claims to have one."""
    monkeypatch.setattr(comm._planner, "_gpu", SimpleNamespace(capturing=lambda: True))
    for call in (lambda: comm.all_reduce(torch.ones(7)), lambda: comm.all_gather(torch.ones(7)), comm.barrier):
        with pytest.raises(InvalidArgument, match="run this call once before capture"):
            call()
    monkeypatch.undo()
    assert not comm._launcher.captured, "a refused call is in no graph"
    assert torch.equal(comm.all_reduce(torch.ones(7)), torch.ones(7))


def executed(call):
    """The numbers of bytecodes and of calls into C that `call` executes."""
    counts = {"opcode": 0, "c_call": 0}

    def count(frame, event, argument):
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        counts[event] = counts.get(event, 0) + 1
        return count

    for watch in (sys.settrace, sys.setprofile):
        before = sys.gettrace() if watch is sys.settrace else sys.getprofile()
        watch(count)
        try:
            call()
        finally:
            watch(before)
    return counts["opcode"], counts["c_call"]


@pytest.mark.parametrize("collective", ["all_reduce", "all_gather", "reduce_scatter", "broadcast"])
def test_a_repeat_executes_few_lines_more_than_one_in_place(collective):
    """On a GPU the host's time for a call, apart from the launch, is the time of its bytecodes."""
    x, y = torch.ones(64), torch.ones(64)
    calls = {**WAYS, "broadcast": lambda comm, x, y: comm.broadcast(x, 0)}
    with null_launch.communicator() as comm:
        for call in (lambda: comm.all_reduce(x), lambda: calls[collective](comm, x, y)) * 3:
            call()
        base, counted = (executed(partial(*each)) for each in ((comm.all_reduce, x), (calls[collective], comm, x, y)))
    assert counted[0] <= 1.2 * base[0] and counted[1] <= base[1] + 5, (counted, base)
