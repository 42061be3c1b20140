"""All instructions that Triton generates for the shipped kernels are supported; others are refused by name."""

import pytest

from tests.explorer.ptx.arithmetic.arithmetic_cases import instruction
from tests.explorer.ptx.corpus import parsed, shipped
from tests.marks import compiles, most, some
from tricomm.errors import InvalidArgument
from tricomm.explorer.ptx.arithmetic import OPCODES, rule, unknown
from tricomm.explorer.ptx.text.parser import parse
from tricomm.kernels.collectives import registry
from tricomm.kernels.dtypes import DTYPES
from tricomm.perf.machine_code.kernel_report import Variant

# Opcodes of the shipped kernels that do not compute.
OTHERS = {"atom", "bar", "bra", "ld", "redux", "ret", "shfl", "st"}
COMPILED = [k for k in registry.ALL if compiles(k)]
# Between them, these have nearly all forms of the shipped kernels.
QUICK = [
    Variant("all_reduce_two_shot_ll", "sm_90", "float32", world_size=3),
    Variant("reduce_one_shot_simple", "sm_90", "bfloat16", "max", 2),
    Variant("reduce_one_shot_simple", "sm_80", "float8_e4m3fn", "avg", 2),
    Variant("reduce_one_shot_simple", "sm_100", "float16", "sum", 2),
    Variant("reduce_one_shot_simple", "sm_90", "int8", "avg", 3),
    Variant("reduce_one_shot_simple", "sm_90", "float64", "min", 2),
]


@pytest.mark.parametrize("variant", QUICK, ids=lambda v: f"{v.kernel}-{v.arch}-{v.dtype}-{v.op}")
def test_shipped_kernels_are_known(variant):
    kernel = parsed(variant)
    assert [i.text for i in unknown(kernel)] == []
    assert {i.opcode for i in kernel.instructions} - OPCODES <= OTHERS


@pytest.mark.soak
@pytest.mark.parametrize("arch", ("sm_80", "sm_90", "sm_100"))
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_type_and_operation_is_known(arch, dtype):
    for op in DTYPES[dtype].ops:
        for name in ("all_reduce_one_shot_ll", "all_reduce_two_shot_simple"):
            assert [i.text for i in unknown(parsed(Variant(name, arch, dtype, op, 3)))] == []


@pytest.mark.parametrize("kernel", some(COMPILED, lambda _, k: False, most), ids=lambda kernel: kernel.name)
def test_every_kernel_is_known(kernel):
    for world_size in (8,) if kernel.needs_cube else (2, 8):
        assert [i.text for i in unknown(parsed(Variant(kernel.name, "sm_90", world_size=world_size)))] == []


@pytest.mark.parametrize(
    "kernel", some(COMPILED, lambda _, k: k.name == "all_gather_one_shot_simple", most), ids=lambda kernel: kernel.name
)
def test_every_kernel_compiles_for_misaligned_tensors(kernel):
    """Loops without a round are left out, because Triton 3.6 crashes on them."""
    variant = Variant(kernel.name, "sm_90", world_size=8 if kernel.needs_cube else 3, aligned=False)
    assert unknown(parsed(variant)) == []


def test_an_unknown_instruction_is_refused_by_name_and_place():
    """An instruction of a shipped kernel, with one word changed."""
    text = shipped(QUICK[0])
    line = next(i for i, row in enumerate(text.splitlines(), 1) if "add.rn.f32" in row)
    kernel = parse(text.replace("add.rn.f32", "add.rna.f32", 1))
    (result,) = unknown(kernel)
    assert result.line == line
    with pytest.raises(InvalidArgument, match=rf"\w+\.py:\d+, PTX line {line}: `add\.rna\.f32 .*`"):
        rule(result)


REGISTERS = {"a": "b32", "b": "b32", "c": "b32", "d": "b32", "h": "b16", "w": "b64", "p": "pred", "q": "pred"}


REFUSED = {
    "widths": "add.f32 w, a, b; add.s32 d, a, w; add.s64 w, a, b",
    "numbers of operands": "add.u32 d, a; add.u32 d, a, b, c; fma.rn.f32 d, a, b",
    "a predicate for a number": "add.u32 d, a, p; and.pred p, q, a",
    "modifiers that the type does not have": "add.sat.u32 d, a, b; add.rz.f16 h, h, h; mul.u32 d, a, b; "
    "mul.wide.u64 w, w, w; neg.u32 d, a; setp.lo.s32 p, a, b; setp.lt.b32 p, a, b; setp.ltu.s32 p, a, b; "
    "shl.u32 d, a, b; min.NaN.f64 w, w, w; bfe.b32 d, a, b, c; div.approx.rn.f32 d, a, b; rsqrt.rn.f32 d, a",
    "a rounding has to be said": "cvt.f16.f32 h, a; cvt.s32.f32 d, a; fma.f32 d, a, b, c; div.f32 d, a, b; "
    "sqrt.f32 d, a; ex2.f32 d, a",
    "a rounding too many": "cvt.rn.f32.f16 d, h; cvt.rn.rz.f16.f32 h, a; cvt.rs.f16x2.f32 d, a, b, c",
    "no such table, mode or pair": "lop3.b32 d, a, b, c, 256; prmt.b32.b4f d, a, b, c; mov.b64 {a, b, c}, w",
    "no compiler of Triton makes these": "setp.lt.and.s32 p, a, b, q; add.rz.f32 d, a, b; cvt.sat.u8.s32 h, a; "
    "prmt.b32.f4e d, a, b, c",
}


@pytest.mark.parametrize("text", [text for texts in REFUSED.values() for text in texts.split("; ")])
def test_a_form_that_is_not_ptx_is_refused(text):
    with pytest.raises(InvalidArgument, match="is not an instruction"):
        rule(instruction(text, **REGISTERS))


def test_instructions_that_do_not_compute_have_no_rule():
    for text in ("bar.sync 0", "ld.global.b32 d, w", "cvta.to.global.u64 w, w", "shfl.sync.bfly.b32 d, a, 1, 31, -1"):
        assert rule(instruction(text, **REGISTERS)) is None
