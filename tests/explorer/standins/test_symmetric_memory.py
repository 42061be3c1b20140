"""Programs over torch's symmetric memory are checked as they are: right ones pass, and each mistake is named."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
from torch._C._distributed_c10d import _SymmetricMemory
from torch.cuda import is_available
from torch.distributed import get_rank
from torch.overrides import _get_current_function_mode_stack

import tricomm
from tests.explorer.standins import all_reduces
from tricomm.errors import InvalidArgument
from tricomm.explorer import subjects

SCHEDULES = 40
ONE, TWO = "one_shot", "two_shot"
CALLS = {ONE: "float(rank + 1)", TWO: "torch.arange(300.0, device='cuda') * (rank + 1)"}


def one_shot():
    for call in (1, 5):
        out = all_reduces.one_shot(float(dist.get_rank() + call))
        total = sum(rank + call for rank in range(dist.get_world_size()))
        assert torch.equal(out, torch.full((150,), float(total), device="cuda"))
    return out


def two_shot():
    for call in (1, 7):
        x = torch.arange(300.0, device="cuda") * (dist.get_rank() + call)
        total = sum(rank + call for rank in range(dist.get_world_size()))
        assert torch.equal(all_reduces.two_shot(x), torch.arange(300.0, device="cuda") * total)


@pytest.mark.parametrize("program", [one_shot, two_shot])
@pytest.mark.parametrize("world_size", [2, 4])
def test_a_right_program_is_clean(program, world_size):
    report = tricomm.check(program, world_size, schedules=12)
    assert report.ok and report.steps, report


def test_simulate_returns_the_results_of_a_program():
    results = tricomm.simulate(lambda: all_reduces.one_shot(float(dist.get_rank() + 1)), 2, seed=3)
    assert all(torch.equal(result, torch.full((150,), 3.0)) for result in results)


CAS = "atom.global.{SEM}.sys.cas.b32 %before, [$1], "
EARLY = "race uninitialised"
# Function, text in its file, replacement, kinds of findings that name the mistake.
MISTAKES = {
    "no barrier before the reduction": (TWO, "    barrier(pads, RANK, WORLD_SIZE, True, True)  # 1\n", "", EARLY),
    "no barrier after the reduction": (TWO, "    barrier(pads, RANK, WORLD_SIZE, True, True)  # 2\n", "", "race"),
    "no barrier at one shot's end": (ONE, "    barrier(pads, RANK, WORLD_SIZE, True, False)  # 2\n", "", "race"),
    "no barrier at one shot's begin": (ONE, "    barrier(pads, RANK, WORLD_SIZE, False, True)  # 1\n", "", EARLY),
    "the first barrier releases nothing": (TWO, "True, True)  # 1", "False, True)  # 1", EARLY),
    "the first barrier acquires nothing": (TWO, "True, True)  # 1", "True, False)  # 1", EARLY),
    "the second barrier releases nothing": (TWO, "True, True)  # 2", "False, True)  # 2", "race"),
    "the second barrier acquires nothing": (TWO, "True, True)  # 2", "True, False)  # 2", "race"),
    "one shot's last barrier releases nothing": (ONE, "True, False)  # 2", "False, False)  # 2", "race"),
    "a signal in the GPU's scope": (TWO, f"{CAS}0", f"{CAS.replace('sys', 'gpu')}0", f"scope {EARLY}"),
    "a wait in the GPU's scope": (TWO, f"{CAS}1", f"{CAS.replace('sys', 'gpu')}1", f"scope {EARLY}"),
    "a relaxed signal": (TWO, '"release" if AFTER', '"relaxed" if AFTER', EARLY),
    "a relaxed wait": (TWO, '"acquire" if BEFORE', '"relaxed" if BEFORE', EARLY),
    "a signal before the block's other threads": (TWO, "    if AFTER:\n        tl.debug_barrier()\n", "", EARLY),
    "accesses before the first threads' wait": (TWO, "    if BEFORE:\n        tl.debug_barrier()\n", "", EARLY),
    "a signal in a wrong word": (TWO, "+ block + RANK", "+ block", "deadlock"),
    "a wait in a wrong word": (TWO, "+ block + peers", "+ block + peers * 0", "deadlock"),
    "blocks share their words": (TWO, "block = tl.program_id(0) * WORLD_SIZE", "block = 0", f"deadlock {EARLY}"),
    "each rank reduces the same share": (TWO, "+ RANK * BLOCK +", "+", "race"),
    "a share past the end": (TWO, "total, mask=share < count)", "total)", "out_of_bounds race"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_named(tmp_path, mistake):
    function, text, instead, kinds = MISTAKES[mistake]
    source = Path(all_reduces.__file__).read_text()
    assert source.count(text) == 1, text
    file = tmp_path / "mistaken.py"
    file.write_text(source.replace(text, instead))
    name = f"{file}:{function}"
    program = subjects.with_arguments(subjects.from_file(name), CALLS[function], 2, name)
    report = tricomm.check(program, 2, schedules=SCHEDULES)
    assert not report.ok and report.findings[0].kind in kinds.split(), report
    if report.findings[0].kind == "race":
        assert all(".py:" in where for where in report.findings[0].where)


def test_barriers_and_signals_of_the_handle_order_accesses():
    def program(safe):
        rank, size = dist.get_rank(), dist.get_world_size()
        x = symm_mem.empty((size, 4), dtype=torch.int32, device=f"cuda:{rank}").fill_(-1)
        handle = symm_mem.rendezvous(x, dist.group.WORLD)
        handle.barrier()
        for peer in range(size):
            handle.get_buffer(peer, (4,), torch.int32, 4 * rank).fill_(rank)
        if safe:
            handle.barrier(channel=1)
        assert x.tolist() == [[source] * 4 for source in range(size)]
        following = (rank + 1) % size
        handle.put_signal(following, channel=2)
        handle.wait_signal((rank - 1) % size, channel=2)
        assert not handle.get_signal_pad(rank).any()

    report = tricomm.check(lambda: program(safe=True), 3, schedules=20)
    assert report.ok, report
    report = tricomm.check(lambda: program(safe=False), 3, schedules=20)
    assert report.findings[0].kind in ("race", "wrong_result")


@pytest.mark.filterwarnings("ignore:.*deprecated:FutureWarning")
def test_calls_of_a_process_group_are_exact():
    def program():
        rank, size = dist.get_rank(), dist.get_world_size()
        dist.init_process_group("nccl", rank=rank, world_size=size)
        torch.cuda.set_device(rank)
        assert torch.cuda.current_device() == rank and torch.cuda.device_count() == size
        x = torch.full((3,), rank + 1, device="cuda")
        dist.all_reduce(x, op=dist.ReduceOp.MAX)
        assert x.tolist() == [size] * 3 and x.device == torch.device("cuda", rank) and x.is_cuda
        root = torch.full((2,), rank, device="cuda")
        dist.broadcast(root, src=1)
        parts = [torch.empty(1, device="cuda") for _ in range(size)]
        dist.all_gather(parts, torch.full((1,), float(rank), device="cuda"))
        whole, shard = torch.empty(2 * size, device="cuda"), torch.empty(2, device="cuda")
        dist.all_gather_into_tensor(whole, torch.arange(2.0, device="cuda") + 10 * rank)
        dist.reduce_scatter_tensor(shard, whole * (rank + 1))
        others = torch.empty(size, device="cuda")
        dist.all_to_all_single(others, torch.arange(float(size), device="cuda") + 100 * rank)
        objects = [None] * size
        dist.all_gather_object(objects, {"rank": rank})
        dist.barrier()
        return root.tolist(), torch.cat(parts).tolist(), whole.tolist(), shard.tolist(), others.tolist(), objects

    for rank, got in enumerate(tricomm.simulate(program, 3)):
        assert got == (
            [1, 1],
            [0.0, 1.0, 2.0],
            [0.0, 1.0, 10.0, 11.0, 20.0, 21.0],
            [60.0 * rank, 60.0 * rank + 6],
            [rank, 100.0 + rank, 200.0 + rank],
            [{"rank": r} for r in range(3)],
        )


def test_each_rank_has_its_own_module_globals_and_torch_is_unchanged_afterwards():
    before = symm_mem.empty, dist.init_process_group, torch.cuda.is_available, vars(_SymmetricMemory)["rendezvous"]

    def program():
        assert not all_reduces._buffers
        x = torch.ones(64, device="cuda")
        all_reduces.two_shot(x)
        ((device, _),) = all_reduces._buffers
        return device.index, all_reduces.symmetric(8).data_ptr()

    (first, one), (second, other) = tricomm.simulate(program, 2)
    assert (first, second) == (0, 1) and one != other
    assert not all_reduces._buffers and not all_reduces.symmetric.cache_info().currsize and not dist.is_initialized()
    assert before == (
        symm_mem.empty,
        dist.init_process_group,
        torch.cuda.is_available,
        vars(_SymmetricMemory)["rendezvous"],
    )


def refused(program, kind="exception", world_size=2):
    report = tricomm.check(program, world_size, schedules=1)
    assert [finding.kind for finding in report.findings] == [kind]
    return report.findings[0].text


def test_calls_that_torch_would_refuse_or_hang_in_are_findings():
    def differing():
        dist.barrier() if dist.get_rank() else dist.all_reduce(torch.ones(3, device="cuda"))

    def ordinary():
        symm_mem.rendezvous(torch.ones(4, device="cuda"), dist.group.WORLD)

    def missing():
        if dist.get_rank():
            dist.barrier()

    def sizes():
        symm_mem.rendezvous(symm_mem.empty(4 + dist.get_rank(), device="cuda"), dist.group.WORLD)

    assert "rank 0 has all_reduce(float32 [3]), rank 1 has barrier()" in refused(differing)
    assert "not made by symmetric memory's `empty`" in refused(ordinary)
    assert "float32 [5]" in refused(sizes)
    assert "rank 1" in refused(missing, "deadlock")


def test_unsupported_arguments_are_refused():
    with pytest.raises(InvalidArgument, match="rank=0, world_size=4"):
        tricomm.check(lambda: dist.init_process_group("nccl", rank=0, world_size=4), 2, schedules=1)


def test_a_call_of_the_group_orders_launches_before_and_after_it():
    def program(ordered):
        rank, size = dist.get_rank(), dist.get_world_size()
        x = symm_mem.empty(8, dtype=torch.int32, device=rank)
        handle = symm_mem.rendezvous(x, dist.group.WORLD)
        x.fill_(rank)
        if ordered:
            dist.barrier()
        total = sum(handle.get_buffer(peer, (8,), torch.int32) for peer in range(size))
        dist.all_reduce(torch.ones(1, device=rank))
        return total

    assert tricomm.check(lambda: program(True), 2, schedules=8).ok
    assert not tricomm.check(lambda: program(False), 2, schedules=8).ok


def test_devices_are_those_that_the_program_names():
    def program(n=3):
        rank = dist.get_rank()
        symm_mem.enable_symm_mem_for_group(dist.group.WORLD.group_name)
        with torch.device("cuda"):
            x = torch.ones(n)
        assert x.device == torch.device(rank) and x.get_device() == rank and x.to(rank) is x.cuda() is x
        assert is_available() and get_rank() == rank and os.environ["LOCAL_WORLD_SIZE"] == "2"
        all_reduces.one_shot_kernel.warmup(x, x, x, 3, 0, 2, grid=(1,))
        return float(torch.zeros(2, device=rank).sum() + x.sum())

    assert tricomm.simulate(program, 2) == [3.0, 3.0]


@pytest.mark.parametrize("how", ["deadlock", "exception"])
def test_nothing_of_a_rank_stays_in_the_process(how):
    def program():
        os.environ["OF_A_PROGRAM"], rank = "1", dist.get_rank()
        handle = symm_mem.rendezvous(symm_mem.empty(4, device="cuda"), dist.group.WORLD)
        torch.set_default_dtype(torch.float64)
        with torch.device("cuda"), torch.inference_mode(), torch.autocast("cpu"):
            if how == "exception" and rank:
                raise ValueError("of a rank")
            handle.wait_signal(1 - rank)
            torch.zeros(1).tolist()

    before = state()
    report = tricomm.check(program, 2, schedules=1)
    assert [finding.kind for finding in report.findings] == [how] and state() == before


def state():
    return (
        len(_get_current_function_mode_stack()),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.get_default_dtype(),
        dict(os.environ),
    )


@pytest.mark.parametrize("compiled", ["none", None])
def test_a_signal_without_a_wait_is_left_over_and_named_by_its_call(compiled):
    def program(taken):
        rank = dist.get_rank()
        handle = symm_mem.rendezvous(symm_mem.empty(4, device="cuda"), dist.group.WORLD)
        handle.barrier()
        handle.put_signal(1 - rank, 3)
        if taken:
            handle.wait_signal(1 - rank, 3)

    assert tricomm.check(lambda: program(True), 2, schedules=4, compiled=compiled).ok
    (finding,) = tricomm.check(lambda: program(False), 2, schedules=4, compiled=compiled).findings
    assert finding.kind == "leftover" and "'s signal pad of symmetric memory 0 byte 28" in finding.text
    put = next(
        n for n, text in enumerate(Path(__file__).read_text().splitlines(), 1) if ".put_signal(1 - rank, 3)" in text
    )
    assert finding.where == (f"{__file__}:{put}",) and "signal_kernels.py:" in finding.text


@pytest.mark.parametrize("compiled", ["none", None])
def test_a_barrier_that_a_rank_leaves_out_is_a_deadlock_at_its_call(compiled):
    def program():
        handle = symm_mem.rendezvous(symm_mem.empty(4, device="cuda"), dist.group.WORLD)
        if dist.get_rank() == 0:
            handle.barrier()

    (finding,) = tricomm.check(program, 2, schedules=2, compiled=compiled).findings
    barrier = program.__code__.co_firstlineno + 3
    assert finding.kind == "deadlock" and finding.where[0] == f"{__file__}:{barrier}"
    assert "rank 0's signal pad of symmetric memory 0 byte 4" in finding.text
