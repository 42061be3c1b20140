"""The parsed form of PTX text, the Python lines of its instructions, and truncated or wrong text."""

import pytest
import triton

from tests.explorer.ptx.corpus import parsed
from tests.explorer.ptx.texts import HEAD, module
from tricomm.errors import InvalidArgument
from tricomm.explorer.ptx.instructions import (
    Address,
    Float,
    Integer,
    Label,
    Negated,
    Pair,
    Parameter,
    Register,
    Special,
    Symbol,
    Variable,
    Vector,
)
from tricomm.explorer.ptx.text.parser import parse
from tricomm.perf.machine_code.kernel_report import Variant

P1, P2, P3 = (Register(f"%p{n}", "pred") for n in (1, 2, 3))
R1, R2, R3 = (Register(f"%r{n}", "b32") for n in (1, 2, 3))
RD1 = Register("%rd1", "b64")

FORMS = {
    "setp.lt.and.s32 %p1|%p2, %r1, -3, !%p3;": (Pair(P1, P2), R1, Integer(-3), Negated(P3)),
    "setp.lt.s32 _|%p2, %r1, 010;": (Pair(None, P2), R1, Integer(8)),
    "ld.global.v2.b32 {%r1, _}, [%rd1+-8];": (Vector((R1, None)), Address(RD1, -8)),
    "ld.volatile.global.b32 { %r1 }, [ %rd1 + 0 ];": (Vector((R1,)), Address(RD1)),
    "ld.global.b32 %r1, [%rd1-0x10];": (R1, Address(RD1, -16)),
    "st.shared.b32 [smem + 4], 0f3F800000;": (Address(Symbol("smem"), 4), Float(0x3F800000, 32)),
    "st.shared.b32 [4096], 0b101;": (Address(None, 4096), Integer(5)),
    "mov.b64 %rd1, 0d3FF0000000000000;": (RD1, Float(0x3FF << 52, 64)),
    "mov.b64 %rd1, 1.5;": (RD1, Float(0x3FF8 << 48, 64)),
    "mov.u32 %r1, 0xFFFFFFFFU;": (R1, Integer(2**32 - 1)),
    "mov.u64 %rd1, smem+4;": (RD1, Address(Symbol("smem"), 4)),
    "mov.b64 {%r1,_}, %rd1;": (Vector((R1, None)), RD1),
    "mov.u32 %r1, %ctaid.y;": (R1, Special("%ctaid.y")),
    "mov.u32 %r1, WARP_SZ;": (R1, Integer(32)),
    "mbarrier.arrive.shared::cta.b64 _, [%r1];": (Pair(None, None), Address(R1)),
    "ld.global.L1::evict_last.b32 %r1, [%rd1];": (R1, Address(RD1)),
    "call (smem), smem, (%r1, %r2);": (Vector((Symbol("smem"),)), Symbol("smem"), Vector((R1, R2))),
    "bar.sync 0;": (Integer(0),),
    "ret;": (),
}


@pytest.mark.parametrize("text", FORMS)
def test_operands(text):
    (instruction,) = parse(module(f".shared .align 16 .b8 smem[64]; {text}")).instructions
    assert instruction.operands == FORMS[text]
    assert instruction.text == text
    assert instruction.name == text.split()[0].rstrip(";")


def test_a_module():
    text = (
        HEAD + ".extern .func (.param .b32 out) vprintf (.param .b64 a, .param .b64 b)\n;\n"
        ".global .align 1 .b8 message[4] = {1, 0x2, 03};\n"
        ".func helper(.param .b32 a) { .reg .b32 %r<2>; { add.s32 %r0, %r1, 1; } ret; }\n"
        ".visible .entry other() { ret; }\n"
        ".visible .entry k(.param .u32 a, .param .u64 .ptr .global .align 16 b, "
        ".param .align 8 .b8 t[24], .param .b8 q)\n"
        ".maxntid 128, 2\n.minnctapersm 2 .maxnreg 96\n{\n"
        '.shared .align 8 .b64 x; .reg .b32 %r<2>; .pragma "nounroll"; /* a\ncomment; } */ @!%p1 bra.uni DONE;'
        ".reg .pred %p<2>; DONE: // }\nret; }\n.section .debug_info { .b8 1 // {\n }\n"
    )
    kernel = parse(text, "k")
    assert (kernel.name, kernel.target, kernel.version) == ("k", "sm_90a", (8, 7))
    assert kernel.parameters == (
        Parameter("a", "u32", 0, 4),
        Parameter("b", "u64", 8, 8, True),
        Parameter("t", "b8", 16, 24),
        Parameter("q", "b8", 40, 1),
    )
    assert (kernel.threads, kernel.most, kernel.max_registers) == (None, 256, 96)
    assert kernel.variables["message"] == Variable("message", "global", 4, 1, b"\1\2\3\0")
    assert kernel.variables["x"] == Variable("x", "shared", 8, 8)
    assert [i.line for i in kernel.instructions] == [14, 15]
    assert kernel.instructions[0].guard == (Register("%p1", "pred"), True)
    assert kernel.instructions[0].operands == (Label("DONE"),) and kernel.labels == {"DONE": 1}
    assert parse(text, "other").instructions[0].opcode == "ret"
    with pytest.raises(InvalidArgument, match=r"2 kernels \(other, k\)"):
        parse(text)
    with pytest.raises(InvalidArgument, match="no kernel m; it has other, k"):
        parse(text, "m")


def test_names_of_an_inner_scope_shadow_outer_ones():
    kernel = parse(
        module(
            "{ .reg .pred p; setp.ne.b32 p, %r1, 0; L: @p bra L; { .reg .b32 %r1; mov.b32 %r1, 1; } }\n"
            "{ .reg .pred p; L: @p bra L; }\nmov.b32 %r1, 2;"
        )
    )
    assert [i.operands[0] for i in kernel.instructions] == [
        Register("p@1", "pred"),
        Label("L@1"),
        Register("%r1@2", "b32"),
        Label("L@3"),
        R1,
    ]
    assert kernel.labels == {"L@1": 1, "L@3": 3}


def test_python_lines():
    """Inline assembly has the line of its first location, as have the instructions up to the next location."""
    loc = ".loc\t2 {} 5, function_name $L__info_string{}, inlined_at 1 7 3\n"
    body = (
        ".loc 1 7 3\nmov.b32 %r1, 0;\n"
        + loc.format(20, 1)
        + "mov.b32 %r1, 1;\n// begin inline asm\n"
        + loc.format(20, 1)
        + "mov.b32 %r1, 2;\n"
        + loc.format(21, 1)
        + "mov.b32 %r1, 3;\n\n// end inline asm\n"
        "mov.b32 %r1, 4;\n.loc 2 0 5\nmov.b32 %r1, 5;\n" + loc.format(22, 0) + "mov.b32 %r1, 6;\n"
    )
    names = "".join(
        f"$L__info_string{n}:\n" + "".join(f".b8 {byte} // x\n" for byte in (*name, 0))
        for n, name in enumerate((b"k", b"put"))
    )
    files = '.file 1 "/a/k.py"\n.file 2 "/a/b.py"\n'
    kernel = parse(module(body) + files + ".section .debug_str\n{\n" + names + "\n}\n")
    lines = [[(s.file, s.line, s.function) for s in i.source] for i in kernel.instructions]
    outer, put = ("/a/k.py", 7, None), ("/a/b.py", 20, "put")
    assert lines == [[outer], *[[put, outer]] * 5, [("/a/b.py", 22, None), outer]]
    assert [i.inline for i in kernel.instructions] == [False, False, True, True, False, False, False]


def test_a_shipped_kernel():
    kernel = parsed(Variant("send_ll", "sm_90", "float32", world_size=2))
    assert kernel.name == "send" and kernel.threads == (256, 1, 1) and kernel.target == "sm_90a"
    pushes = [i for i in kernel.instructions if i.name.startswith("st.relaxed.sys.global.v2")]
    assert pushes and all(i.inline and i.guard and i.source[0].file.endswith("primitives.py") for i in pushes)
    assert all(i.source for i in kernel.instructions)
    if triton.__version__ >= "3.8":  # older ones name an inlined line, but not its caller
        assert pushes[0].source[-1].file.endswith("send.py")


def test_text_that_was_cut_anywhere_is_refused():
    text = module("setp.eq.b32 %p1, %r1, 0;\n@%p1 bra L;\n{ .reg .b32 x; mov.b32 x, 1; }\n// a\nL: ret;").rstrip()
    assert len(parse(text).instructions) == 4
    for end in range(len(text)):
        with pytest.raises(InvalidArgument):
            parse(text[:end])


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("mov.b32 %r99, 0;", r"PTX line 8: 'mov.b32 %r99, 0': %r99 is not declared"),
        ("@%q bra L; L: ret;", "%q is not declared"),
        ("bra L;", "the label L is missing"),
        ("{ L: ret; } bra L;", "the label L is missing"),
        ("L: L: ret;", "the label L is defined twice"),
        ("ld.global.b32 %r1, [x];", "x is not declared"),
        ("{ .reg .b32 x; } mov.b32 x, 0;", "x is not declared"),
        ("mov.b32 %r1, 12x;", "'12x' is not a known operand"),
        ("mov.b32 %r1, 1 ret;", "'1 ret' is not a known operand"),
        (".reg .b32 %q<2>, 7 8;", "'7 8' is no register"),
        (".strange 1;", "the directive '.strange 1' is not known"),
        ("5 + 3;", "this is no instruction"),
        (".loc 1 2 3\nmov.b32 %r1, y;", r"y is not declared \(made of k.py:2\)"),
        ("mov.b32 %r1, {%r2, %r3;", "a brace is not closed"),
        ("} }", "a closing brace without an opening one"),
    ],
)
def test_wrong_text_is_refused(body, message):
    with pytest.raises(InvalidArgument, match=message):
        parse('.file 1 "k.py"\n' + module(body))


def test_text_that_is_not_ptx():
    for text in ("", "hello", "ret;"):
        with pytest.raises(InvalidArgument):
            parse(text)
