"""`check` and `simulate` over compiled kernels: shipped ones, public ones, a user's; reports, replay, bad input."""

import json
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl

import tricomm
from tests import forked
from tests.explorer.compiled import ptx_mutants
from tests.marks import compiles, some
from tricomm.errors import InvalidArgument
from tricomm.explorer import Report, replay, shipped
from tricomm.explorer.memory_model import allowed
from tricomm.kernels import primitives, wide_words

_KERNELS = {k.name: k for k in shipped.kernels(None, None, None) if compiles(k)}


# `test_bits` executes the kernels of a cube mesh.
@pytest.mark.parametrize(
    "name", some(_KERNELS, lambda number, name: number % 12 == 0 and not _KERNELS[name].needs_cube)
)
def test_a_shipped_kernel_is_passed(name):
    kernel = _KERNELS[name]
    world_size = 8 if kernel.needs_cube else 2
    sizes = (36, 1) if kernel.needs_cube else ptx_mutants.SIZES
    body = shipped.body(kernel, sizes)
    # A tile of codes needs more room than the smallest arena has.
    roomy = shipped.options(world_size, 1, compiled="sm_90", kernel=kernel)
    options = roomy if kernel.wire else ptx_mutants.options(world_size)
    report = tricomm.check(body, world_size, 3 if world_size == 2 else 1, options=options, compiled="sm_90")
    assert report.ok, report
    assert report.compiled == "sm_90"


def test_calls_on_a_handle_are_passed():
    """Every kernel that reads a handle in place. The stream orders the host's next write after the call."""

    def body(comm):
        made, w = [], comm.symmetric((80,), torch.int64)
        calls = {"all_reduce": 80, "all_gather": 160, "reduce_scatter": 40, "in place": 0}
        for number, (call, size) in enumerate(calls.items()):
            w.local.copy_(torch.arange(80) * (number + 1) + comm.rank)
            if size:
                getattr(comm, call)(w, out=(y := torch.full((size,), -1)))
            else:
                comm.all_reduce(w)
            made.append(y if size else w.local.clone())
        assert torch.equal(made[0], torch.arange(80) * 2 + 1) and torch.equal(made[3], torch.arange(80) * 8 + 1)
        return made

    report = tricomm.check(body, 2, 4, options=ptx_mutants.options(2), compiled="sm_90", identical=False)
    assert report.ok, report


@triton.jit
def _misaligned(x, N: tl.constexpr):
    tl.store(tl.multiple_of(x + 1, 16) + tl.arange(0, N), 1.0)


def test_an_address_that_contradicts_its_hint_is_a_finding():
    """The finding names the rank of the kernel, whatever its peers raise; it is not an invalid argument of `check`."""

    def body(comm):
        w = comm.symmetric((1028,), torch.float32)
        if comm.rank:
            comm.launch(_misaligned, 1, w.local, 1024)
        comm.barrier()
        return w.local

    report = tricomm.check(body, 2, 2, compiled="sm_90", identical=False)
    (finding,) = report.findings
    assert finding.kind == "exception" and finding.ranks == (1,)
    assert "not a multiple of 16" in finding.text and "test_check_compiled.py" in finding.text
    assert [f.key for f in replay(report, body)[0]] == [finding.key]


@triton.jit
def _await(flag):
    while tl.atomic_cas(flag, 1, 0, sem="acquire", scope="sys") != 1:
        pass
    tl.debug_barrier()


@triton.jit
def _hand_over(data, flags, out_ptr, rank, scale, WORLD: tl.constexpr, FLAG: tl.constexpr):
    lane = tl.arange(0, 64)
    for r in tl.static_range(WORLD):
        if (r == 1) & (rank == 0):
            tl.store(data[r] + lane, lane * scale)  # @ put
            tl.debug_barrier()
            if FLAG:
                tl.atomic_xchg(flags[r], 1, sem="release", scope="sys")
        elif (r == 1) & (rank == 1):
            if FLAG:
                _await(flags[r])
            tl.store(out_ptr + lane, tl.load(data[r] + lane))  # @ take


def handed_over(flag: bool, **launch_options: int):
    def fn(comm):
        data, flags = comm.symmetric((64,), torch.float32), comm.symmetric((1,), torch.int32)
        out = torch.zeros(64)
        comm.launch(_hand_over, 1, data.peers, flags.peers, out, comm.rank, 0.5, WORLD=2, FLAG=flag, **launch_options)
        return out

    return fn


@pytest.mark.parametrize("launch_options", [{}, {"num_warps": 1}, {"num_warps": 8}])
def test_a_users_kernel(launch_options):
    first, second = tricomm.simulate(handed_over(True, **launch_options), 2, compiled="sm_90")
    assert torch.equal(second, torch.arange(64) * 0.5) and not first.any()
    assert tricomm.check(handed_over(True, **launch_options), 2, 3, compiled="sm_90").ok


def test_a_number_of_warps_that_triton_refuses_is_the_callers_mistake():
    with pytest.raises(InvalidArgument, match="do not fit.*power of 2"):
        tricomm.simulate(handed_over(True, num_warps=3), 2, compiled="sm_90")


def test_a_finding_names_the_python_line_and_the_instruction(tmp_path):
    report = tricomm.check(handed_over(False), 2, 20, compiled="sm_90", identical=False)
    assert {f.kind for f in report.findings} <= {"race", "uninitialised"} and not report.ok
    finding = next(f for f in report.findings if f.kind == "race")
    lines = Path(__file__).read_text().splitlines()
    assert all("# @" in lines[int(where.rpartition(":")[2]) - 1] for where in finding.where)
    assert "PTX line" in finding.text and ".global" in finding.text and "thread" in finding.text
    report.save(tmp_path / "found.json")
    again = Report.load(tmp_path / "found.json")
    assert again.compiled == "sm_90"
    keys = {
        f.key for f in report.findings
    }  # each finding has its own shortest schedule, which may show them in another order
    assert all({f.key for f in repeated} == keys for repeated in replay(again, handed_over(False)))


def test_the_command_checks_and_replays(tmp_path, unshrunk):
    file = tmp_path / "mine.py"
    file.write_text(
        "import torch\n"
        "from tests.explorer.compiled.test_check_compiled import handed_over\n"
        "def body(comm):\n    return handed_over(False)(comm)\n"
    )
    result = tmp_path / "found.json"
    of_two = ["--world-size", "2", "--compiled", "sm_90"]
    one = forked.command("check", f"{file}:body", *of_two, "--schedules", "2", "--report", str(result))
    assert one.returncode == 1, one.stderr
    assert "compiled for sm_90" in one.stdout
    assert json.loads(result.read_text())["compiled"] == "sm_90"
    two = forked.script("-m", "tricomm", "check", "--replay", str(result), timeout=300)
    assert two.returncode == 1 and "1. repeated" in two.stdout, two.stdout + two.stderr


def test_the_command_names_the_kernels_that_cannot_be_compiled():
    of_two = ["--world-size", "2", "--schedules", "1", "--compiled", "sm_80"]
    some = forked.command("check", *of_two, "--collective", "broadcast", "--protocol", "simple")
    assert some.returncode == 0, some.stderr
    assert [line.split(":")[0] for line in some.stdout.splitlines()] == [
        "broadcast_one_shot_simple",
        "broadcast_two_shot_simple",
    ]
    assert some.stderr.startswith("left out: broadcast_multicast_simple: ")
    none = forked.command("check", *of_two, "--algorithm", "multicast")
    assert none.returncode == 2 and "no shipped kernel that was asked for can run so" in none.stderr
    assert "Run it without --compiled, which interprets the kernels" in " ".join(none.stderr.split())
    unknown = forked.command("check", *of_two[:-1], "sm_42", "--algorithm", "multicast")
    assert unknown.returncode == 2 and "sm_42" in unknown.stderr


@pytest.mark.parametrize("architecture", ["sm_42", "90", "", 90])
def test_an_unknown_architecture_is_refused(architecture):
    with pytest.raises(InvalidArgument, match="architecture"):
        tricomm.check(handed_over(True), 2, 1, compiled=architecture)


@triton.jit
def _endless(x_ptr, N):
    i = 0
    while i != N:
        i = (i * 5 + 1) % 8 + 8
    tl.store(x_ptr, i)


def test_a_kernel_that_never_ends_is_stopped_with_its_lines():
    def fn(comm):
        comm.launch(_endless, 1, torch.zeros(1, dtype=torch.int32), 3)

    report = tricomm.check(fn, 1, 1, compiled="sm_90")
    assert [f.kind for f in report.findings] == ["exception"]
    assert "StepLimit" in report.findings[0].text
    assert report.findings[0].where[0].startswith(f"{__file__}:")


@triton.jit
def _lonely(flag_ptr):
    while tl.atomic_add(flag_ptr, 0, sem="acquire", scope="sys") != 1:
        pass


def test_a_deadlock_names_the_word_that_is_polled():
    def fn(comm):
        flags = comm.symmetric((1,), torch.int32)
        comm.launch(_lonely, 1, flags.local)

    report = tricomm.check(fn, 1, 1, compiled="sm_90")
    (finding,) = report.findings
    assert finding.kind == "deadlock" and len(finding.ranks) == 2
    assert all(where.startswith(f"{__file__}:") for where in finding.where)
    assert "_lonely (warp 0) waits" in finding.text and "symmetric memory" in finding.text
    assert "_lonely (warps 1, 2, 3) waits for threads of its block" in finding.text


def _waits_for_rank_1(comm):
    flags = comm.symmetric((1,), torch.int32)
    assert comm.rank == 0, "rank 1 sends nothing"
    comm.launch(_lonely, 1, flags.local)


def test_a_wait_for_a_failed_rank_is_reported_as_a_consequence():
    report = tricomm.check(_waits_for_rank_1, 2, 1, compiled="sm_90")
    assert [f.kind for f in report.findings] == ["wrong_result"] and report.steps < 100


def test_a_kernel_that_never_reads_the_abort_word_is_a_deadlock_soon_after_the_abort():
    """It gets the number of rounds in which a shipped kernel reads the word once."""
    report = tricomm.check(handed_over(True), 2, 8, faults=["drop"], compiled="sm_90")
    assert [f.kind for f in report.findings] == ["deadlock"], report
    assert "aborted, but still running" in report.findings[0].text and report.steps < 1000, report.steps


@triton.jit
def _sum(x_ptr, out_ptr, N: tl.constexpr):
    tl.store(out_ptr, tl.sum(tl.load(x_ptr + tl.arange(0, N)), 0))


@pytest.mark.parametrize("elements", [16, 64])
def test_warps_that_copy_a_small_tile_into_shared_memory_do_not_race(elements):
    def fn(comm):
        x, out = torch.arange(elements, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
        comm.launch(_sum, 1, x, out, N=elements, num_warps=4)
        assert out[0] == x.sum()

    assert tricomm.check(fn, 1, 3, compiled="sm_90").ok


@triton.jit
def _meet(count_ptr, data_ptr, out_ptr, B: tl.constexpr):
    block, lane = tl.program_id(0), tl.arange(0, 4)
    tl.store(data_ptr + block, block + 1)
    tl.atomic_add(count_ptr, 1, sem="release", scope="gpu")
    seen = 0
    while seen != B:
        seen = tl.inline_asm_elementwise(
            "ld.global.acquire.gpu.b32 $0, [$1];", "=r,l", [count_ptr], dtype=tl.int32, is_pure=False, pack=1
        )
    tl.debug_barrier()
    tl.store(out_ptr + block * 4 + lane, tl.load(data_ptr + lane, lane < B), lane < B)


def test_blocks_wait_for_each_other_in_a_tensor_that_is_not_symmetric():
    def fn(comm):
        count, data, out = (torch.zeros(n, dtype=torch.int32) for n in (1, 3, 12))
        comm.launch(_meet, 3, count, data, out, B=3)
        assert torch.equal(out.view(3, 4)[:, :3], torch.arange(1, 4, dtype=torch.int32).repeat(3, 1))

    report = tricomm.check(fn, 1, 3, compiled="sm_90")
    assert report.ok, report


def test_a_kernel_from_a_cache_that_names_another_copy_of_the_source(tmp_path):
    """Triton's cache keeps the path of the first compilation; the copy may be gone."""
    text = Path(primitives.__file__).read_text()
    copy = tmp_path / "primitives.py"
    copy.write_text(text)
    assert allowed.present(str(copy)) == primitives.__file__
    copy.write_text(text + "\n")  # another file of that name
    assert allowed.present(str(copy)) == str(copy)
    copy.unlink()
    assert allowed.present(str(copy)) == primitives.__file__


@triton.jit
def _push_and_poll(boxes, out_ptr, rank, FLAG: tl.constexpr, WORDS: tl.constexpr):
    """The last round's payload has another layout than its flags, so Triton before 3.9 loads it again."""
    lane = tl.arange(0, WORDS)
    if rank == 0:
        tl.inline_asm_elementwise(
            "st.relaxed.sys.global.b64 [$1], $2; mov.u32 $0, 0;",
            "=r,l,l",
            [boxes[1] + lane, lane.to(tl.int64) + 5 + (FLAG << 32)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    else:
        late = 1
        while late > 0:
            words = tl.inline_asm_elementwise(
                "ld.relaxed.sys.global.b64 $0, [$1];", "=l,l", [boxes[1] + lane], dtype=tl.int64, is_pure=False, pack=1
            )
            late = tl.max(((words >> 32) != FLAG).to(tl.int32), axis=0)
            tl.store(out_ptr + lane, words.to(tl.int32))


def _polled(comm):
    box, out = comm.symmetric((128,), torch.int64), torch.full((128,), -1, dtype=torch.int32)
    box.local.zero_()
    comm.barrier()
    comm.launch(_push_and_poll, 1, box.peers, out, comm.rank, FLAG=7, WORDS=128, num_warps=1)
    assert comm.rank == 0 or torch.equal(out, torch.arange(128, dtype=torch.int32) + 5), "an old payload"


@pytest.mark.parametrize("strategy", ["random", "pct"])
def test_a_poll_that_triton_copies_is_seen_in_its_code_alone(strategy, unshrunk):
    """In each round the poll stores its value, so its loop does not look like one that waits."""
    report = tricomm.check(_polled, 2, 20, compiled="sm_90", strategy=strategy)
    if wide_words.COMPILES:
        assert report.ok and report.steps < 20_000, report
    else:
        assert [f.kind for f in report.findings] == ["wrong_result"] and "an old payload" in str(report), report
