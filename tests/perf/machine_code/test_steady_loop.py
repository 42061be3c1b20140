"""The cost of a loop, read from fake and real disassemblies; kraken's kernels compared with ours, if installed."""

import pytest

from devtools import kraken
from tricomm.errors import InvalidArgument
from tricomm.perf.machine_code import kernel_report, steady_loop
from tricomm.perf.machine_code.kernel_report import Variant

SASS = """\
        /*0000*/                   MOV R1, c[0x0][0x28] ;
.L_x_0:
        /*0010*/                   LDG.E.128 R4, desc[UR4][R2.64] ;
        /*0020*/               @P0 BRA `(.L_x_1) ;
        /*0030*/                   FADD R4, R4, R8 ;
        /*0040*/                   STG.E.128 desc[UR4][R6.64], R4 ;
        /*0050*/                   BRA `(.L_x_2) ;
.L_x_1:
        /*0060*/                   STG.E.U16 desc[UR4][R6.64], R4 ;
        /*0070*/                   STG.E.U16 desc[UR4][R6.64+0x2], R5 ;
        /*0080*/                   STG.E.U16 desc[UR4][R6.64+0x4], R6 ;
        /*0090*/                   STG.E.U16 desc[UR4][R6.64+0x6], R7 ;
.L_x_2:
        /*00a0*/                   IADD3 R2, R2, 0x10, RZ ;
        /*00b0*/              @!P1 BRA `(.L_x_0) ;
        /*00c0*/                   STG.E.128 desc[UR4][R6.64], R4 ;
        /*00d0*/                   EXIT ;
"""


def test_only_the_fast_path_of_a_loop_is_counted():
    assert steady_loop.loops(SASS, lambda access: True) == [7]
    assert steady_loop.loops(SASS, lambda access: access.store) == [7]
    assert steady_loop.loops(SASS, lambda access: False) == []
    assert steady_loop.loops(SASS.replace("@!P1 BRA `(.L_x_0)", "NOP"), lambda access: True) == []


def test_a_loop_that_clears_is_left_out():
    placed = SASS.replace(".L_x_0:\n", '.L_x_0:\n\t//## File "/kernels/mailbox.py", line 7\n')
    assert steady_loop.loops(placed, lambda access: True, lambda line: line[1] == 7) == []
    assert steady_loop.loops(placed, lambda access: True, lambda line: line[1] == 8) == [7]


def test_another_loop_is_counted_separately():
    longer = SASS.replace("        /*0040*/", "        /*0031*/                   NOP ;\n        /*0040*/")
    second = longer.replace("L_x_", "L_x_9")
    assert steady_loop.loops(SASS.replace("EXIT", "NOP") + second, lambda access: True) == [7, 8]


@pytest.mark.parametrize("name", kraken.INSTRUCTIONS)
def test_no_more_instructions_than_kraken(name):
    result = kernel_report.examine(Variant(f"all_reduce_{name}_zero_copy", "sm_90")).steady
    assert 100 < result <= kraken.INSTRUCTIONS[name]


def test_a_folder_that_is_no_checkout_of_kraken_is_named(tmp_path):
    with pytest.raises(InvalidArgument, match="is no checkout of kraken"):
        kraken.measured(tmp_path)
    (tmp_path / "kraken" / "comm").mkdir(parents=True)
    (tmp_path / "kraken" / "comm" / "one_shot_all_reduce.py").write_text("x = 1\n")
    with pytest.raises(InvalidArgument, match="other kernels than those known here"):
        kraken.measured(tmp_path)
