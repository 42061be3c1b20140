"""Divergent lanes: loops with different trip counts, early exits, barriers and exchanges of some lanes."""

import numpy as np
import pytest

from tests.explorer.ptx.execution.handwritten import kernel, run
from tests.explorer.ptx.execution.turns import Deadlock
from tricomm.explorer.ptx.units.divergence import LanesApart
from tricomm.explorer.ptx.units.unit import KernelTrap, StepLimit

UNITS = pytest.mark.parametrize("unit, watched", [("warp", False), ("block", False), ("warp", True)])
OUT = "mul.wide.u32 %rd10, %r0, 4; add.s64 %rd11, %rd0, %rd10; st.global.u32 [%rd11], %r9;"
TID = "mov.u32 %r0, %tid.x;"


def result(body, unit="warp", watched=False, threads=64, **options):
    out = np.full(threads, 0xDEAD, "u4")
    run(kernel(body), [out], threads, unit=unit, watched=watched, **options)
    return out.tolist()


@UNITS
def test_loops_of_different_lengths(unit, watched):
    """sum over i < tid % 7 of sum over j < i of (j + tid)"""
    body = f"""{TID} rem.u32 %r1, %r0, 7; mov.u32 %r9, 0; mov.u32 %r2, 0;
        outer: setp.ge.u32 %p0, %r2, %r1; @%p0 bra done;
        mov.u32 %r3, 0;
        inner: setp.ge.u32 %p1, %r3, %r2; @%p1 bra next;
        add.u32 %r4, %r3, %r0; add.u32 %r9, %r9, %r4; add.u32 %r3, %r3, 1; bra inner;
        next: add.u32 %r2, %r2, 1; bra.uni outer;
        done: {OUT}"""
    assert result(body, unit, watched) == [sum(j + t for i in range(t % 7) for j in range(i)) for t in range(64)]


@UNITS
def test_branches_within_branches(unit, watched):
    body = f"""{TID} and.b32 %r1, %r0, 1; and.b32 %r2, %r0, 2; setp.ne.u32 %p0, %r1, 0; setp.ne.u32 %p1, %r2, 0;
        @%p0 bra odd;
        @%p1 bra two; mov.u32 %r9, 10; bra end;
        two: mov.u32 %r9, 12; bra end;
        odd: @%p1 bra three; mov.u32 %r9, 11; bra end;
        three: mov.u32 %r9, 13;
        end: add.u32 %r9, %r9, %r0; {OUT}"""
    assert result(body, unit, watched) == [10 + t % 4 + t for t in range(64)]


@UNITS
def test_an_early_exit(unit, watched):
    body = f"{TID} setp.gt.u32 %p0, %r0, 40; @%p0 ret; mov.u32 %r9, 7; bar.sync 0; {OUT}"
    assert result(body, unit, watched) == [7] * 41 + [0xDEAD] * 23


@UNITS
def test_a_barrier_that_only_some_lanes_reach(unit, watched):
    """Lanes 0 to 15 of the first warp meet the second warp at barrier 1; the others go on meanwhile."""
    body = f"""{TID} mov.u32 %r9, 1; setp.lt.u32 %p0, %r0, 16; setp.ge.u32 %p1, %r0, 32; or.pred %p2, %p0, %p1;
        @!%p2 bra rest;
        @%p1 st.shared.u32 [0], 99;
        bar.sync 1, 48;
        ld.shared.u32 %r9, [0]; bra end;
        rest: mov.u32 %r9, 5;
        end: bar.sync 0; {OUT}"""
    assert result(body, unit, watched, shared=16) == [99] * 16 + [5] * 16 + [99] * 32


@UNITS
def test_lanes_that_poll_do_not_starve_those_that_write(unit, watched):
    """Lanes 1 to 31 wait for a store of lane 0 after the branch."""
    flag, out = np.zeros(1, "u4"), np.zeros(32, "u4")
    code = kernel(
        f"""{TID} mov.u32 %r9, 3; setp.eq.u32 %p0, %r0, 0; @%p0 bra behind;
        again: ld.relaxed.gpu.global.u32 %r1, [%rd1]; setp.eq.u32 %p1, %r1, 0; @%p1 bra again;
        behind: @%p0 st.relaxed.gpu.global.u32 [%rd1], 1; {OUT}""",
        parameters=2,
    )
    run(code, [out, flag], 32, unit=unit, watched=watched)
    assert out.tolist() == [3] * 32 and flag[0] == 1


@pytest.mark.parametrize("mode", ["", "relaxed.sys."])
def test_a_unit_that_polls_does_not_starve_others(mode):
    """Each block waits for the next one, which starts later; also if its loads are weak."""
    flags = np.zeros(8, "u4")
    code = kernel(
        f"""mov.u32 %r1, %ctaid.x; mul.wide.u32 %rd9, %r1, 4; add.s64 %rd10, %rd0, %rd9; setp.eq.u32 %p0, %r1, 7;
        @%p0 bra last; again: ld.{mode}global.u32 %r2, [%rd10+4]; setp.eq.u32 %p1, %r2, 0; @%p1 bra again;
        last: add.u32 %r3, %r1, 1; st.{mode}global.u32 [%rd10], %r3;"""
    )
    run(code, [flags], 32, blocks=8)
    assert flags.tolist() == list(range(1, 9))


@UNITS
def test_lanes_meet_for_a_shuffle(unit, watched):
    """Both halves of the warp reach the same shuffle, one of them later; its member mask is in a register."""
    body = f"""{TID} mov.u32 %r5, -1; setp.lt.u32 %p0, %r0, 5; mov.u32 %r1, %r0; @%p0 bra low;
        add.u32 %r1, %r1, 100;
        low: shfl.sync.idx.b32 %r9, %r1, 31, 31, %r5; shfl.sync.bfly.b32 %r9, %r1, 16, 31, 0xffffffff; {OUT}"""
    assert result(body, unit, watched, threads=32) == [(t ^ 16) + (100 if (t ^ 16) >= 5 else 0) for t in range(32)]


def test_a_shuffle_within_a_branch():
    body = f"""{TID} mov.u32 %r9, %r0; setp.ge.u32 %p0, %r0, 8; @%p0 bra end;
        shfl.sync.down.b32 %r9, %r0, 1, 31, 0xff;
        end: {OUT}"""
    out = result(body, threads=32)
    assert out[:7] == [1, 2, 3, 4, 5, 6, 7] and out[8:] == list(range(8, 32))


@UNITS
def test_values_that_lanes_get_on_different_paths(unit, watched):
    """A register that is uniform on each path differs between lanes after both, also once the lanes reconverge."""
    body = f"""{TID} setp.lt.u32 %p0, %r0, 3; @%p0 bra low; mov.u32 %r1, 1; bra join;
        low: mov.u32 %r1, 2;
        join: mov.u32 %r2, 0; mov.u32 %r9, 0;
        loop: add.u32 %r9, %r9, %r1; add.u32 %r2, %r2, 1; setp.lt.u32 %p1, %r2, 5; @%p1 bra loop; {OUT}"""
    assert result(body, unit, watched) == [10] * 3 + [5] * 61


def test_an_endless_loop_is_stopped_with_its_lines():
    body = ".loc 1 7 3\nmov.u32 %r0, 1;\nloop:\n.loc 1 9 3\nadd.u32 %r0, %r0, 1;\n.loc 1 11 3\nbra loop;\n"
    code = kernel(body, variables='.file 1 "/there/mine.py"\n')
    with pytest.raises(StepLimit, match=r"mine\.py:9, .*mine\.py:11"):
        run(code, [np.zeros(1, "u4")], steps=1000)


def test_an_endless_loop_of_some_lanes_is_stopped():
    body = f"{TID} setp.eq.u32 %p0, %r0, 3; loop: @%p0 bra loop;"
    with pytest.raises(StepLimit, match="PTX line"):
        run(kernel(body), [np.zeros(1, "u4")], steps=1000)


def test_a_barrier_that_never_opens_is_a_deadlock():
    body = f"{TID} setp.lt.u32 %p0, %r0, 32; @%p0 bra end; bar.sync 3, 64; end:"
    with pytest.raises(Deadlock):
        run(kernel(body), [np.zeros(1, "u4")], 64)


def test_lanes_of_a_warp_that_wait_for_each_other_at_different_places():
    body = f"""{TID} setp.lt.u32 %p0, %r0, 3; @%p0 bra low; bar.warp.sync -1; bra end;
        low: shfl.sync.idx.b32 %r1, %r0, 0, 31, -1; end: ret;"""
    with pytest.raises(LanesApart, match="different instructions"):
        run(kernel(body), [np.zeros(1, "u4")])


def test_trap_names_its_line():
    with pytest.raises(KernelTrap, match="trap"):
        run(kernel(f"{TID} setp.eq.u32 %p0, %r0, 3; @%p0 trap;"), [np.zeros(1, "u4")])
