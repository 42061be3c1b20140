"""The machine code of the shipped kernels meets the bars, and a bad kernel fails each of them."""

import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import click
import pytest
import triton
import triton.language as tl
from click.testing import CliRunner
from triton.language import constexpr, int64

from tests.marks import compiles, most, some
from tricomm.cli import cli
from tricomm.commands import common
from tricomm.core.fused.fused_call import FUSED
from tricomm.errors import InvalidArgument
from tricomm.kernels.collectives import registry
from tricomm.kernels.device.packing import load_words, store_words
from tricomm.kernels.dtypes import DTYPES
from tricomm.kernels.primitives import signal, wait_sequence
from tricomm.perf.machine_code import accesses, kernel_report
from tricomm.perf.machine_code.kernel_report import Variant


def _name(variant: Variant) -> str:
    return f"{variant.kernel}-{variant.arch}-{variant.dtype}{'' if variant.aligned else '-misaligned'}"


def _widest(arch: str) -> list[Variant]:
    """Keep each kernel's type that takes the most registers."""
    return list({v.kernel: v for v in reversed(kernel_report.variants((arch,)))}.values())


def _of_each_kind(arch: str, which: float) -> list[Variant]:
    """Keep one kernel of those that share flags, loads and stores: the first, the last, or one between."""
    kinds: dict[tuple[object, ...], list[Variant]] = {}
    widest = {variant.kernel: variant for variant in _widest(arch)}
    for kernel in filter(compiles, registry.ALL):
        if kernel.collective != "barrier" and kernel.name in widest:
            kind = (kernel.protocol, kernel.zero_copy, kernel.pairwise, kernel.reduces, kernel.multicast)
            kinds.setdefault(kind, []).append(widest[kernel.name])
    return [result[round((len(result) - 1) * which)] for result in kinds.values()]


MISALIGNED = [replace(v, aligned=False) for v in _of_each_kind("sm_90", 0.5)]
# Every kernel on one architecture, and each other parameter once; `make soak` has all combinations.
SLOW = [k.name for k in registry.FUSED if k.wide]  # Triton compiles them for minutes
VARIANTS = [
    pytest.param(variant, marks=pytest.mark.soak) if variant.kernel in SLOW else variant
    for variant in _widest("sm_90") + _of_each_kind("sm_80", 0.0) + _of_each_kind("sm_100", 1.0) + MISALIGNED
]
QUICK = _of_each_kind("sm_90", 0.0)
SPILLING = (
    "all_reduce_hybrid_cube_mesh_ll128-sm_90-float8_e4m3fn-misaligned",  # one word, in a form that no table chooses
)


def _long(number: int, variant: Variant) -> bool:
    """Leave out two of three, and one that takes minutes to compile."""
    return most(number, variant) or variant.kernel == "all_reduce_rms_norm_one_shot_ll"


@pytest.mark.parametrize("variant", some(VARIANTS, lambda number, variant: variant in QUICK, _long), ids=_name)
def test_each_kernel_meets_the_bars(variant: Variant) -> None:
    broken = kernel_report.check(kernel_report.examine(variant))
    assert [bar.split(":")[0] for bar in broken] == ["spills"] * (_name(variant) in SPILLING), broken


@pytest.mark.soak
@pytest.mark.timeout(14400)
@pytest.mark.parametrize("arch", kernel_report.ARCHITECTURES)
@pytest.mark.parametrize("kernel", [k for k in kernel_report.KERNELS if compiles(k)], ids=lambda kernel: kernel.name)
def test_all_variants(kernel: registry.Kernel, arch: str) -> None:
    if kernel.why_not_compiled(int(arch.removeprefix("sm_"))) is not None:
        pytest.skip("refused by name")
    result = kernel_report.examine_all(kernel_report.variants((arch,), kernel.name, everything=True))
    broken = {str(report.variant): bad for report in result if (bad := kernel_report.check(report))}
    assert [bad for variant, bad in broken.items() if "+top" not in variant or "spills" not in bad[0] or bad[1:]] == []


# Kernels that miss one bar each. Each signals and waits like a good kernel, except for its one mistake.


@triton.jit
def _flags(group, call, LANES: constexpr):
    lane = tl.arange(0, LANES)
    signal(group + lane, tl.zeros([LANES], tl.int64) + call, lane < 8, True, True)
    return wait_sequence(group, group + lane, call, lane < 8, True)


@triton.jit
def _copied(x_ptr, y_ptr, group, numel, call, BLOCK: constexpr, LANES: constexpr, ALIGNED: constexpr):
    words = load_words(x_ptr, tl.program_id(0) * BLOCK, numel, BLOCK, ALIGNED)
    _flags(group[0], call, LANES)
    store_words(y_ptr, tl.program_id(0) * BLOCK, words, numel, BLOCK, ALIGNED)
    return words


@triton.jit
def _good(x_ptr, y_ptr, group, numel: int64, call: int64, BLOCK: constexpr, LANES: constexpr, ALIGNED: constexpr):
    _copied(x_ptr, y_ptr, group, numel, call, BLOCK, LANES, ALIGNED)


@triton.jit
def _masked(x_ptr, y_ptr, group, numel: int64, call: int64, BLOCK: constexpr, LANES: constexpr, ALIGNED: constexpr):
    at = tl.program_id(0) * BLOCK * 4 + tl.arange(0, BLOCK * 4)
    values = tl.load(x_ptr + at, mask=at < numel)
    _flags(group[0], call, LANES)
    tl.store(y_ptr + at, values, mask=at < numel)


@triton.jit
def _masked_store(
    x_ptr, y_ptr, group, numel: int64, call: int64, BLOCK: constexpr, LANES: constexpr, ALIGNED: constexpr
):
    words = _copied(x_ptr, y_ptr, group, numel, call, BLOCK, LANES, ALIGNED)
    at = tl.arange(0, BLOCK)
    tl.store(group[0] + 4096 + at, words, mask=at < numel)


@triton.jit
def _gpu_scope(x_ptr, y_ptr, group, numel: int64, call: int64, BLOCK: constexpr, LANES: constexpr, ALIGNED: constexpr):
    _good(x_ptr, y_ptr, group, numel, call, BLOCK, LANES, ALIGNED)
    tl.atomic_xchg(group[0] + 512, call, sem="release", scope="gpu")


@triton.jit
def _no_flag_is_read(
    x_ptr, y_ptr, group, numel: int64, call: int64, BLOCK: constexpr, LANES: constexpr, ALIGNED: constexpr
):
    words = load_words(x_ptr, tl.program_id(0) * BLOCK, numel, BLOCK, ALIGNED)
    lane = tl.arange(0, LANES)
    signal(group[0] + lane, tl.zeros([LANES], tl.int64) + call, lane < 8, True, True)
    store_words(y_ptr, tl.program_id(0) * BLOCK, words, numel, BLOCK, ALIGNED)


@triton.jit
def _spills(x_ptr, y_ptr, group, numel: int64, call: int64, BLOCK: constexpr, LANES: constexpr, ALIGNED: constexpr):
    parts = ()
    for i in tl.static_range(96):
        parts = parts + (tl.load(group[0] + i * BLOCK + tl.arange(0, BLOCK)),)
    _flags(group[0], call, LANES)
    for i in tl.static_range(96):
        tl.store(group[0] + i * BLOCK + tl.arange(0, BLOCK), parts[i] + parts[95 - i])


def _found(function: object, arch: str = "sm_90") -> str:
    return " | ".join(kernel_report.check(kernel_report.examine(Variant("test", arch), function)))


@pytest.mark.parametrize("arch", kernel_report.ARCHITECTURES)
def test_a_good_kernel_passes(arch: str) -> None:
    assert _found(_good, arch) == ""


def test_a_masked_bulk_access_is_found_in_ptx_and_in_sass() -> None:
    result = _found(_masked)
    assert "PTX: " in result and "SASS: " in result and "narrower than 128 bits" in result
    assert "test_kernel_report.py" in result


def test_one_narrow_store_among_wide_ones_is_found() -> None:
    assert "narrower than 128 bits" in _found(_masked_store)


def test_a_flag_of_gpu_scope_is_found() -> None:
    result = _found(_gpu_scope)
    assert "not `.sys`" in result and "gpu" in result and "test_kernel_report.py" in result


def test_a_kernel_that_reads_no_flag_is_found() -> None:
    assert "no `.sys` flag" in _found(_no_flag_is_read)


def test_spills_are_found() -> None:
    report = kernel_report.examine(Variant("test", "sm_90"), _spills)
    assert report.resources.spill_loads > 0 and report.resources.spill_stores > 0
    assert "spills" in " ".join(kernel_report.check(report))


def test_a_misaligned_variant_is_narrow_and_is_not_blamed_for_it() -> None:
    report = kernel_report.examine(Variant("test", "sm_90", aligned=False), _good)
    assert report.sass.body_wide_loads == 0 and report.sass.tail > 0
    assert kernel_report.check(report) == []


@triton.jit
def _does_not_compile(x_ptr, y_ptr, group, numel: int64, call: int64):
    tl.store(y_ptr + tl.arange(0, 3), numel)


def test_a_kernel_that_does_not_compile_is_found() -> None:
    assert "does not compile" in _found(_does_not_compile)


@pytest.mark.parametrize("arch", ["sm_70", "sm_75", "sm_86", "sm_89", "sm_120"])
def test_other_architectures_are_compiled_and_reported(arch: str) -> None:
    (variant, *_) = kernel_report.variants((arch,), "all_reduce_one_shot_ll")
    report = kernel_report.examine(variant)
    assert kernel_report.check(report) == [] and 32 < report.resources.registers <= 255
    assert report.ptx.body_wide_stores > 0 and (report.sass.body_wide_stores > 0) is report.disassembled
    assert report.disassembled or arch == "sm_70"
    assert ("  -  " in kernel_report.lines([report])[-1]) is not report.disassembled


def test_unknown_names_are_refused_with_those_that_exist() -> None:
    with pytest.raises(InvalidArgument, match="sm_80, sm_86, sm_87, sm_89, sm_90, sm_100"):
        kernel_report.variants(("sm_42",))
    with pytest.raises(InvalidArgument, match="all_reduce_one_shot_ll"):
        kernel_report.variants(("sm_90",), "no_such_kernel")
    told = "nothing can be compiled: left out: all_reduce_multicast_simple: sm_80: sm_80 has no multimem instructions"
    with pytest.raises(InvalidArgument, match=told):
        kernel_report.variants(("sm_80",), "all_reduce_multicast_simple")
    assert kernel_report.left_out(("sm_90", "sm_80"), "all_reduce_one_shot_ll") == []


@pytest.mark.skipif(not compiles(registry.find(FUSED, "two_shot", "ll128")), reason="refused by name as a whole")
def test_rows_that_a_fused_kernel_does_not_take_are_named() -> None:
    name = "all_reduce_rms_norm_two_shot_ll128"
    forms = [variant.form for variant in kernel_report.variants(("sm_90",), name)]
    assert forms == ["norm@8192", "fp8@8192", "fp8_per_token@8192", "norm@8192+top8"]
    (line,) = kernel_report.left_out(("sm_90",), name)
    assert line.startswith(f"left out: {name}: sm_90: nvfp4@8192: two_shot/ll128: planes of a row of 8192 begin ")


def test_all_variants_are_all_types_operations_worlds_and_alignments() -> None:
    result = kernel_report.variants(("sm_90",), "all_reduce_one_shot_ll", everything=True)
    each = sum(len(dtype.ops) for dtype in DTYPES.values())
    assert len(result) == len(set(result)) == each * len(kernel_report.WORLDS) * 2


def test_a_report_is_plain_json_and_a_line() -> None:
    report = kernel_report.examine(Variant("test", "sm_90"), _good)
    record = json.loads(json.dumps(kernel_report.record(report)))
    assert record["violations"] == [] and record["variant"]["arch"] == "sm_90"
    heading, line = kernel_report.lines([report])
    assert len(line) == len(heading) and line.split()[:4] == ["test", "sm_90", "bfloat16", "sum"]
    weak = replace(report, weak_flags=("st.release.gpu at x.py:1",))
    assert kernel_report.lines([weak])[2] == (
        "! test sm_90 bfloat16 sum of 8 ranks: flags that are not `.sys`: st.release.gpu at x.py:1"
    )


def test_inline_assembly_does_not_shift_lines() -> None:
    ptx = "\n".join(
        [
            '.file 1 "/x.py"', ".loc 1 7 0", "// begin inline asm", ".loc 1 7 0", "mov.u64 a, 0x0;", ".loc 1 8 0",
            "@%p ld.global.b64 { a }, [ b + 0 ];", "// end inline asm", ".loc 1 9 0",
            "st.global.v2.b64 [ b ], { a, a };",
        ]
    )  # fmt: skip
    result = accesses.ptx_accesses(accesses.plain_lines(ptx))
    assert [(a.line[1], a.bits, a.store) for a in result] == [(7, 64, False), (9, 128, True)]


def test_sass_is_attributed_to_the_innermost_line() -> None:
    sass = "\n".join(
        [
            '\t//## File "/a.py", line 3 inlined at "/b.py", line 9',
            '\t//## File "/b.py", line 9',
            "        /*0090*/              @!P0 LDG.E.128.STRONG.SYS R4, desc[UR10][R4.64+0x30] ;",
            "        /*00a0*/                   STG.E.U16 desc[UR10][R4.64], R3 ;",
        ]
    )
    result = accesses.sass_accesses(sass)
    assert [(a.line, a.bits, a.store, a.system) for a in result] == [
        (("/a.py", 3), 128, False, True),
        (("/a.py", 3), 16, True, False),
    ]


def _told(monkeypatch: pytest.MonkeyPatch, seconds: float) -> list[str]:
    """The lines of `tricomm kernels` on stderr. If they come every few ms, the second report waits for one."""
    good, told, echo = kernel_report.examine(Variant("barrier", "sm_90")), threading.Event(), click.echo

    def examined(chosen: list[Variant]) -> Iterator[kernel_report.KernelReport]:
        yield replace(good, variant=chosen[0])
        told.clear()
        assert seconds > 1 or told.wait(60)
        yield replace(good, variant=chosen[1])

    def heard(text: str, **how: Any) -> None:
        echo(text, **how)
        told.set()

    monkeypatch.setattr(kernel_report, "examine_all", examined)
    monkeypatch.setattr(common, "SECONDS", seconds)
    monkeypatch.setattr(click, "echo", heard)
    done = CliRunner().invoke(cli, ["kernels", "--arch", "sm_90", "--kernel", "all_reduce_one_shot_ll"])
    monkeypatch.setattr(click, "echo", echo)
    assert done.exit_code == 0 and "2 variants, 0 break a bar" in done.stdout
    return done.stderr.splitlines()


def test_the_command_prints_its_progress_without_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    said = _told(monkeypatch, 0.01)
    assert "  1 of 4 compiled; all_reduce_one_shot_ll sm_90 sum is next" in said
    assert _told(monkeypatch, 3600) == []
