"""A program's host code: tensors on the CPU and on the GPU, `torch.cuda`, and state that processes would not share."""

from __future__ import annotations

import copy as copy_of
import importlib
import os
import sys

import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
import triton
import triton.language as tl
from torch._C._distributed_c10d import _SymmetricMemory

import tricomm
from tricomm.errors import InvalidArgument
from tricomm.explorer import subjects

BOTH = pytest.mark.parametrize("compiled", ["none", None])


def places():
    rank, x = dist.get_rank(), torch.zeros(3)
    y = x.cuda()
    assert x.device == torch.device("cpu") and not x.is_cuda and x.is_cpu and x.get_device() == -1
    assert y.is_cuda and y.data_ptr() != x.data_ptr() and y.cuda().data_ptr() == y.data_ptr() and y.cpu().is_cpu
    assert (x + 1).is_cpu and x[1:].is_cpu and (y + x.sum()).is_cuda and y.view(3, 1).is_cuda and y.max(0)[1].is_cuda
    for moved in (x.to(y), x.to(0), x.to("cuda", torch.float64), x.to(device=rank, dtype=torch.int32)):
        assert moved.is_cuda and moved.get_device() == rank
    assert torch.as_tensor(x, device="cuda").data_ptr() != x.data_ptr() and x.to(torch.float64).is_cpu
    assert torch.from_numpy(x.numpy()).is_cpu and torch.ones(2, device=y.device).is_cuda
    pinned = torch.empty(3, pin_memory=True)
    assert pinned.is_pinned() and pinned.is_cpu and x.pin_memory().is_pinned() and not x.is_pinned()
    with torch.device("cuda"):
        assert torch.ones(3).is_cuda and torch.ones(3, device="cpu").is_cpu
    torch.set_default_device("cuda")
    assert torch.ones(3).is_cuda and torch.nn.Linear(3, 3)(y).is_cuda
    torch.set_default_device("cpu")
    assert torch.ones(3).is_cpu


def kinds():
    at = torch.tensor([[0, 1], [1, 0]])
    assert torch.sparse_coo_tensor(at, torch.ones(2), (2, 2), check_invariants=True).to_dense().is_cpu
    assert torch.empty(3, device="meta").device.type == "meta" and torch.empty(0, device="cuda").is_cuda
    leaf = torch.ones(3, device="cuda", requires_grad=True)
    (leaf * 2).sum().backward()
    assert leaf.grad.is_cuda and torch.nn.Parameter(torch.ones(3)).is_cpu
    assert torch.stack([torch.ones(1), torch.ones(1)]).is_cpu and torch.ones(4).split(2)[1].is_cpu
    assert copy_of.deepcopy(torch.ones(1)).is_cpu and torch.ones(2).new_zeros(3).is_cpu


def functions():
    rank = dist.get_rank()
    torch.rand(3, generator=torch.Generator(device="cuda").manual_seed(1), device="cuda")
    with torch.cuda.nvtx.range("a part"):
        assert torch.cuda.mem_get_info() == (80 << 30, 80 << 30)
    event, stream = torch.cuda.Event(enable_timing=True), torch.cuda.current_stream()
    event.record()
    stream.wait_event(event)
    torch.cuda.synchronize()
    assert isinstance(event, torch.cuda.Event) and isinstance(stream, torch.cuda.Stream)
    assert not isinstance(1, torch.cuda.Event) and torch.cuda.Event | None
    driver = triton.runtime.driver.active
    assert driver.get_current_device() == rank and driver.get_active_torch_device() == torch.device("cuda", rank)
    assert driver.get_current_target().arch == 90 and driver.get_device_capability() == (9, 0)
    assert driver.utils.get_device_properties(rank)["multiprocessor_count"] == 132


@BOTH
@pytest.mark.parametrize("program", [places, kinds, functions])
def test_it_finds_a_gpu(program, compiled):
    report = tricomm.check(program, 2, schedules=2, compiled=compiled)
    assert report.ok, str(report)


def test_torch_and_triton_are_as_before():
    before = torch.cuda.Event, torch.Generator, torch.from_numpy, type(triton.runtime.driver).active, __import__
    tricomm.simulate(functions, 2)
    assert before == (
        torch.cuda.Event,
        torch.Generator,
        torch.from_numpy,
        type(triton.runtime.driver).active,
        __import__,
    )


@triton.jit
def copy(x, y):
    tl.store(y, tl.load(x))


def test_a_kernel_gets_no_memory_of_the_cpu():
    y = lambda: torch.zeros(1, device="cuda")  # noqa: E731
    report = tricomm.check(lambda: copy[1,](torch.ones(1), y()), 2, schedules=1)
    assert "kernel copy: argument x is a tensor on the CPU; pass x.cuda()" in report.findings[0].text
    tricomm.simulate(lambda: copy[1,](torch.ones(1).pin_memory(), y()), 2)
    tricomm.simulate(lambda: copy[1,](torch.ones(1).cuda(), y()), 2)


HELPER = "STATE, COUNT = {}, 0\nclass Counter:\n    made, number = [], 0\n"
PROGRAM = """
import importlib, torch, triton, torch.distributed as dist

class Workspace:
    of_rank, count = {}, 0
    def __init__(self):
        self.buffers = {}

class Larger(Workspace):
    pass

manager, table = Workspace(), torch.zeros(4)
on_gpu = torch.zeros(3, device=triton.runtime.driver.active.get_active_torch_device())
assert torch.cuda.get_device_capability() == (9, 0)

def apart():
    import helper
    from helper import STATE, Counter
    rank = dist.get_rank()
    assert importlib.import_module("helper").STATE is STATE
    assert not STATE and not helper.COUNT and not Counter.made and not Counter.number
    assert not Workspace.of_rank and not Workspace.count and not manager.buffers and not table.any()
    assert not hasattr(manager, "extra") and not hasattr(Larger, "own")
    STATE[rank], Workspace.of_rank[rank], manager.buffers[rank] = 1, 1, 1
    Counter.made.append(rank)
    helper.COUNT = Counter.number = Workspace.count = manager.extra = Larger.own = rank + 1
    table.fill_(rank + 1)
    dist.barrier()
    for held in (STATE, Workspace.of_rank, manager.buffers, Larger.of_rank):
        assert list(held) == [rank]
    assert Counter.made == [rank] and table.tolist() == [rank + 1] * 4 and table.is_cpu and on_gpu.is_cuda
    for number in (helper.COUNT, Counter.number, Workspace.count, manager.extra, Larger.own):
        assert number == rank + 1
"""


@BOTH
def test_ranks_share_no_state_of_classes_objects_and_late_imports(tmp_path, compiled, monkeypatch):
    (tmp_path / "helper.py").write_text(HELPER)
    (tmp_path / "apart.py").write_text(PROGRAM)
    monkeypatch.delitem(sys.modules, "helper", raising=False)
    before = list(sys.path)
    program = subjects.from_file(f"{tmp_path / 'apart.py'}:apart")
    for _ in range(2):  # the second time the helper has been imported
        tricomm.simulate(program, 3, compiled=compiled)
    assert sys.path == before
    module, helper = sys.modules[program.__module__], sys.modules["helper"]
    assert not helper.STATE and not helper.COUNT and not helper.Counter.made and not helper.Counter.number
    assert not module.Workspace.of_rank and not module.manager.buffers and not module.table.any()
    assert not hasattr(module.manager, "extra") and not hasattr(module.Larger, "own")


def test_a_file_is_imported_with_a_gpu_only_for_a_program(tmp_path):
    file = tmp_path / "devices.py"
    file.write_text("import torch\nthere = torch.cuda.is_available()\ndef body(comm): ...\ndef program(): ...\n")
    assert not subjects.from_file(f"{file}:body").__globals__["there"]
    assert subjects.from_file(f"{file}:program").__globals__["there"]
    file.write_text("import torch\nhas = torch.cuda.get_device_capability()\ndef program(): ...\n")
    for compiled, has in ((None, (9, 0)), ("none", (9, 0)), ("sm_80", (8, 0))):
        assert subjects.from_file(f"{file}:program", compiled=compiled).__globals__["has"] == has
    file.write_text("import torch.distributed as dist\ndist.init_process_group('nccl')\ndef program(): ...\n")
    with pytest.raises(InvalidArgument, match="while the file is imported; make it in the function that is checked"):
        subjects.from_file(f"{file}:program")


def strided():
    made = _SymmetricMemory.empty_strided_p2p((3, 2), (1, 4), torch.int32, torch.device("cuda", dist.get_rank()))
    assert made.stride() == (1, 4) and made.shape == (3, 2)
    handle = symm_mem.rendezvous(made, dist.group.WORLD)
    made.fill_(dist.get_rank())
    handle.barrier()
    theirs = handle.get_buffer(1 - dist.get_rank(), (7,), torch.int32)
    assert theirs.tolist()[:3] == [1 - dist.get_rank()] * 3
    handle.barrier()
    _SymmetricMemory.stream_write_value32(made.T[0], 1, 77)
    torch.ops.symm_mem.stream_write_value32_(made.T[0], 2, 78)
    handle.stream_write_value32(made.T[0], offset=0, val=79)
    assert made.T[0].tolist() == [79, 77, 78]
    handle.memset32(made.T[0], offset=1, val=5, count=2)
    assert made.T[0].tolist() == [79, 5, 5]


def views():
    rank = dist.get_rank()
    whole = symm_mem.empty((4, 8), dtype=torch.int32, device="cuda")
    whole.copy_(torch.arange(32, device="cuda").view(4, 8) + 100 * rank)
    first, part = (symm_mem.rendezvous(x, dist.group.WORLD) for x in (whole, whole[2]))
    assert (first.offset, part.offset) == (0, 64) and part.buffer_ptrs == first.buffer_ptrs
    assert part.signal_pad_ptrs == first.signal_pad_ptrs
    first.barrier()
    for handle, row in ((first, 0), (part, 2)):
        assert handle.get_remote_tensor(1 - rank, (2,), torch.int32)[0].item() == 8 * row + 100 * (1 - rank)
        assert handle.get_buffer(1 - rank, (2,), torch.int32, 8)[0].item() == 8 + 100 * (1 - rank)
    with pytest.raises(InvalidArgument, match="get_remote_tensor: bytes 64 to 192 of rank 0: there are 128 bytes"):
        part.get_remote_tensor(0, (32,), torch.int32)


@BOTH
@pytest.mark.parametrize("program", [strided, views])
def test_symmetric_memory_has_the_asked_strides_and_offsets(program, compiled):
    tricomm.simulate(program, 2, compiled=compiled)


def test_an_error_that_ends_a_program_is_named_with_its_line():
    def leaves():
        sys.exit(3)

    def lacks():
        importlib.import_module("no_such_gpu_library")

    for program, said in ((leaves, "sys.exit(3)"), (lacks, "no_such_gpu_library")):
        (finding,) = tricomm.check(program, 2, schedules=1).findings
        assert said in finding.text and "test_host_code.py:" in finding.where[0]


@triton.jit
def misspelt(x):
    tl.no_such_function(x)


@triton.jit
def calls_misspelt(x):
    misspelt(x)


def not_compilable():
    calls_misspelt[(1,)](torch.ones(1, device="cuda"))


def test_a_kernel_that_does_not_compile_is_named_with_launch_and_reason():
    (finding,) = tricomm.check(not_compilable, 2, schedules=1).findings
    launch = not_compilable.__code__.co_firstlineno + 1
    assert finding.where == (f"{__file__}:{launch}",) and "no_such_function" in finding.text


def leaves_at_once():
    os._exit(0)


@pytest.mark.parametrize("function", [leaves_at_once, lambda comm: leaves_at_once()])
def test_a_function_that_ends_its_process_does_not_end_the_check(function):
    before = os._exit
    (finding,) = tricomm.check(function, 2, schedules=1).findings
    assert finding.kind == "exception" and "it called sys.exit(0)" in finding.text
    assert os._exit is before


def test_a_check_of_a_program_inside_of_another_one_is_refused():
    with pytest.raises(InvalidArgument, match="this process checks a program already, in another thread or around"):
        tricomm.check(lambda: tricomm.check(not_compilable, 2, schedules=1), 2, schedules=1)
