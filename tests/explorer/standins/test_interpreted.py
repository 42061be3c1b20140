"""Programs under Triton's interpreter: `compiled="none"`, or --compiled none."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
import triton
import triton.language as tl
from click.testing import CliRunner

import tricomm
from tests.explorer.standins import all_reduces
from tricomm.cli import cli
from tricomm.errors import InvalidArgument


@triton.jit
def signal(pads, peer, RANK: tl.constexpr):
    word = tl.load(pads.to(tl.pointer_type(tl.uint64)) + peer).to(tl.pointer_type(tl.int32)) + RANK
    while tl.atomic_cas(word, 0, 1, sem="release", scope="sys") != 0:
        pass


@triton.jit
def wait(pads, peer, RANK: tl.constexpr):
    word = tl.load(pads.to(tl.pointer_type(tl.uint64)) + RANK).to(tl.pointer_type(tl.int32)) + peer
    while tl.atomic_cas(word, 1, 0, sem="acquire", scope="sys") != 1:
        pass


@triton.autotune([triton.Config({"BLOCK": 128}), triton.Config({"BLOCK": 256})], key=["count"])
@triton.jit
def total(buffers, pads, out, count, RANK: tl.constexpr, WORLD: tl.constexpr, LAST: tl.constexpr, BLOCK: tl.constexpr):
    for peer in tl.static_range(WORLD):
        signal(pads, peer, RANK)
    for peer in tl.static_range(WORLD):
        wait(pads, peer, RANK)
    tl.debug_barrier()
    at = tl.arange(0, BLOCK)
    sum = tl.zeros([BLOCK], tl.float32)
    for peer in tl.static_range(WORLD):
        theirs = tl.load(buffers.to(tl.pointer_type(tl.uint64)) + peer).to(tl.pointer_type(tl.float32))
        sum += tl.load(theirs + at, mask=at < count, other=0.0)
    tl.store(out + at, sum, mask=at < count)
    if LAST:
        tl.debug_barrier()
        for peer in tl.static_range(WORLD):
            signal(pads, peer, RANK)
        for peer in tl.static_range(WORLD):
            wait(pads, peer, RANK)


_kept = {}


def run(last=True):
    rank, size = dist.get_rank(), dist.get_world_size()
    if "x" not in _kept:
        _kept["x"] = symm_mem.empty(100, dtype=torch.float32, device="cuda")
    handle = symm_mem.rendezvous(_kept["x"], dist.group.WORLD)
    for call in (1, 4):
        _kept["x"].fill_(rank + call)
        out = torch.full((100,), -1.0, device="cuda")
        total[lambda given: (triton.cdiv(100, given["BLOCK"]),)](
            handle.buffer_ptrs_dev, handle.signal_pad_ptrs_dev, out, 100, rank, size, last, num_warps=1
        )
        assert torch.equal(out, torch.full((100,), float(sum(r + call for r in range(size))), device="cuda"))
    return out


def unfinished():
    run(last=False)


@pytest.mark.parametrize("world_size", [2, 4])
def test_a_right_program_is_clean(world_size):
    report = tricomm.check(run, world_size, schedules=12, compiled="none")
    assert report.ok and report.steps and report.compiled is None
    assert [r.tolist() for r in tricomm.simulate(run, 2, compiled="none")] == [[9.0] * 100] * 2


def test_a_mistake_is_named_and_repeated(tmp_path):
    report = tricomm.check(unfinished, 2, schedules=12, compiled="none")
    assert report.findings[0].kind in ("race", "wrong_result") and "test_interpreted.py" in report.findings[0].where[0]
    report.save(tmp_path / "report.json")
    done = CliRunner().invoke(cli, ["check", "--replay", str(tmp_path / "report.json")])
    assert done.exit_code == 1 and "repeated: " in done.output


def test_the_command_interprets(tmp_path):
    asked = ["check", f"{__file__}:run", "--compiled", "none", "--schedules", "2"]
    done = CliRunner().invoke(cli, asked)
    assert done.exit_code == 0 and "compiled for" not in done.output, done.output
    shipped = ["check", "--collective", "barrier", "--compiled", "none", "--schedules", "1"]
    done = CliRunner().invoke(cli, shipped)
    assert done.exit_code == 0 and "compiled for" not in done.output, done.output


@triton.jit
def fails(x, N: tl.constexpr):
    tl.static_assert(N > 1, "N is too small")
    tl.store(x, N)


@triton.jit
def members(x, y):
    at = tl.arange(0, 16)
    tl.store(y, tl.load(x + at).sum(0) + tl.load(x + at).max(axis=0))


def test_code_that_the_interpreter_cannot_run_is_refused_with_line_and_remedy():
    said = r"kernel one_shot_kernel, .*all_reduces\.py:\d+: .*inline_asm.* compiled \(--compiled sm_90\) it may run"
    with pytest.raises(InvalidArgument, match=said):
        tricomm.check(lambda: all_reduces.one_shot(1.0), 2, schedules=1, compiled="none")
    for name in ("Stream", "CUDAGraph"):
        with pytest.raises(InvalidArgument, match=r"test_interpreted\.py:\d+: torch\.cuda\..*--compiled sm_90"):
            tricomm.check(lambda name=name: getattr(torch.cuda, name)(), 2, schedules=1, compiled="none")


def test_an_assertion_of_a_kernel_is_no_refusal():
    program = lambda: fails[1,](torch.zeros(1, device="cuda"), 1)  # noqa: E731
    report = tricomm.check(program, 2, schedules=1, compiled="none")
    assert report.findings[0].kind == "wrong_result" and "N is too small" in report.findings[0].text


def test_functions_of_the_language_are_methods_of_tensors():
    def program():
        y = torch.zeros(1, device="cuda")
        members[1,](torch.arange(16.0, device="cuda"), y)
        return y.item()

    assert tricomm.simulate(program, 2, compiled="none") == [135.0, 135.0]
