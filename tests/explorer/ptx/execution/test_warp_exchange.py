"""Exchanges between lanes against a model that follows the PTX manual's pseudo code lane by lane."""

import functools
import operator

import numpy as np
import pytest

from tests.explorer.ptx.execution.handwritten import kernel, run

UNITS = pytest.mark.parametrize("unit", ["warp", "block"])
TID = "mov.u32 %r0, %tid.x;"
STORE = "mul.wide.u32 %rd20, %r0, 4; add.s64 %rd21, %rd0, %rd20; st.global.u32 [%rd21], %r9;"
THREADS = 80  # the last warp has 16 lanes
M = 0xFFFFFFFF


def result(body, unit, values=None, threads=THREADS):
    out = np.full(threads, 0xDEAD, "u4")
    load = "mul.wide.u32 %rd20, %r0, 4; add.s64 %rd21, %rd1, %rd20; ld.global.u32 %r1, [%rd21];"
    values = np.arange(threads, dtype="u4") * 7 + 3 if values is None else values
    run(kernel(f"{TID} {load} {body} {STORE}", 2), [out, values], threads, unit=unit)
    return out.tolist(), values.tolist()


def shuffled(mode, values, lane, b, c, active):
    """(value, predicate) of one lane; `active` by lane of the warp."""
    b, clamp, segment = b & 31, c & 31, c >> 8 & 31
    most, least = (lane & segment) | (clamp & ~segment & 31), lane & segment
    if mode == "up":
        j = lane - b
        inside = j >= most
    else:
        j = {"down": lane + b, "bfly": lane ^ b, "idx": least | (b & ~segment & 31)}[mode]
        inside = j <= most
    j = j if inside else lane
    return (values[j] if j < len(active) and active[j] else values[lane]), inside


@UNITS
@pytest.mark.parametrize("mode", ["up", "down", "bfly", "idx"])
@pytest.mark.parametrize("c", [0x1F, 0, 0x1807, 0x1C03, 0x180F])
def test_shuffles(mode, c, unit):
    for b in (0, 1, 5, 16, 31):
        for step, code in ((b, str(b)), (None, "%r2")):
            body = f"""mul.lo.u32 %r2, %r0, 3; and.b32 %r2, %r2, 31; mov.u32 %r3, {c};
                shfl.sync.{mode}.b32 %r9|%p0, %r1, {code}, %r3, -1; selp.u32 %r4, 0x80000000, 0, %p0;
                or.b32 %r9, %r9, %r4;"""
            observed, values = result(body, unit)
            for t in range(THREADS):
                warp, lane = t // 32, t % 32
                own = values[32 * warp : 32 * warp + 32]
                amount = 3 * t & 31 if step is None else step
                value, inside = shuffled(mode, own, lane, amount, c, [True] * len(own))
                assert observed[t] == value | (0x80000000 if inside else 0), (t, b, code)


@UNITS
def test_votes(unit):
    body = """setp.gt.u32 %p0, %r1, 200; vote.sync.ballot.b32 %r2, %p0, -1; vote.sync.any.pred %p1, %p0, -1;
        vote.sync.all.pred %p2, !%p0, 0xffffffff; vote.sync.uni.pred %p3, %p0, -1; mov.u32 %r5, 0xff;
        setp.lt.u32 %p4, %r0, 8; activemask.b32 %r6;
        selp.u32 %r3, 1, 0, %p1; selp.u32 %r4, 2, 0, %p2; or.b32 %r3, %r3, %r4; selp.u32 %r4, 4, 0, %p3;
        or.b32 %r3, %r3, %r4; shl.b32 %r3, %r3, 8; xor.b32 %r9, %r2, %r3; xor.b32 %r9, %r9, %r6;"""
    observed, values = result(body, unit)
    for t in range(THREADS):
        own = values[t // 32 * 32 : t // 32 * 32 + 32]
        bits = [v > 200 for v in own]
        ballot = sum(bit << n for n, bit in enumerate(bits))
        flags = any(bits) | (not any(bits)) << 1 | (all(bits) or not any(bits)) << 2
        assert observed[t] == ballot ^ flags << 8 ^ ((1 << len(own)) - 1)


@UNITS
def test_votes_of_some_lanes(unit):
    """In a branch that only lanes 0 to 7 of each warp take, whose member mask names them."""
    body = """mov.u32 %r9, 1; and.b32 %r3, %r0, 31; setp.gt.u32 %p0, %r3, 7; @%p0 bra end;
        and.b32 %r2, %r0, 1; setp.eq.u32 %p1, %r2, 1; vote.sync.ballot.b32 %r4, %p1, 0xff; activemask.b32 %r5;
        redux.sync.add.s32 %r6, %r0, 0xff; shl.b32 %r5, %r5, 8; or.b32 %r9, %r4, %r5; add.u32 %r9, %r9, %r6; end:"""
    observed, _ = result(body, unit, threads=64)
    for t in range(64):
        total = sum(range(t // 32 * 32, t // 32 * 32 + 8))
        assert observed[t] == (0xAA + 0xFF00 + total if t % 32 < 8 else 1)


@UNITS
@pytest.mark.parametrize(
    "op, kind",
    [("add", "u32"), ("min", "u32"), ("max", "s32"), ("min", "s32"), ("and", "b32"), ("or", "b32"), ("xor", "b32")],
)
def test_redux(op, kind, unit):
    models = {"add": operator.add, "min": min, "max": max, "and": int.__and__, "or": int.__or__, "xor": int.__xor__}
    values = np.random.default_rng(5).integers(0, 1 << 32, THREADS, dtype="u4")
    observed, values = result(f"redux.sync.{op}.{kind} %r9, %r1, -1;", unit, values)
    for t in range(THREADS):
        own = values[t // 32 * 32 : t // 32 * 32 + 32]
        if kind == "s32":
            own = [v - (1 << 32) if v >> 31 else v for v in own]
        assert observed[t] == functools.reduce(models[op], own) & M


@UNITS
def test_redux_of_floats(unit):
    values = np.arange(32, dtype="f4") - 20
    values[7] = np.nan
    body = """redux.sync.min.f32 %r2, %r1, -1; redux.sync.max.abs.f32 %r3, %r1, -1;
        redux.sync.max.NaN.f32 %r4, %r1, -1; setp.eq.u32 %p0, %r0, 0; setp.eq.u32 %p1, %r0, 1; mov.u32 %r9, %r4;
        @%p0 mov.u32 %r9, %r2; @%p1 mov.u32 %r9, %r3;"""
    observed, _ = result(body, unit, values.view("u4"), threads=32)
    assert np.array(observed[:2], "u4").view("f4").tolist() == [-20, 20] and set(observed[2:]) == {0x7FFFFFFF}


@UNITS
def test_special_registers(unit):
    """Blocks and grids of three dimensions; the lane masks."""
    out = np.zeros(2 * 3 * 2 * 24 * 8, "u4")
    names = ["%tid.x", "%tid.y", "%tid.z", "%ctaid.x", "%ctaid.y", "%ctaid.z", "%laneid", "%lanemask_lt"]
    stores = "".join(f"mov.u32 %r9, {name}; st.global.u32 [%rd11+{4 * n}], %r9;" for n, name in enumerate(names))
    body = f"""mov.u32 %r1, %tid.x; mov.u32 %r2, %tid.y; mov.u32 %r3, %tid.z; mov.u32 %r4, %ntid.x;
        mov.u32 %r5, %ntid.y;
        mad.lo.u32 %r1, %r2, %r4, %r1; mul.lo.u32 %r6, %r4, %r5; mad.lo.u32 %r1, %r3, %r6, %r1;
        mov.u32 %r2, %ctaid.x; mov.u32 %r3, %nctaid.x; mov.u32 %r5, %ctaid.y; mad.lo.u32 %r2, %r5, %r3, %r2;
        mov.u32 %r5, %nctaid.y; mul.lo.u32 %r5, %r5, %r3; mov.u32 %r6, %ctaid.z; mad.lo.u32 %r2, %r6, %r5, %r2;
        mad.lo.u32 %r1, %r2, 24, %r1; mul.wide.u32 %rd10, %r1, 32; add.s64 %rd11, %rd0, %rd10; {stores}"""
    run(kernel(body), [out], (4, 3, 2), blocks=(2, 3, 2), unit=unit)
    rows = out.reshape(-1, 8).tolist()
    for number, row in enumerate(rows):
        t, b = number % 24, number // 24
        assert row[:6] == [t % 4, t // 4 % 3, t // 12, b % 2, b // 2 % 3, b // 6]
        assert row[6:] == [t, (1 << t) - 1]


@UNITS
def test_barriers_that_reduce_and_that_only_arrive(unit):
    """Warp 0 only arrives at barrier 2; the second warp waits for it and reads what it has written."""
    body = """setp.ge.u32 %p0, %r0, 40; bar.red.popc.u32 %r2, 0, %p0; bar.red.or.pred %p1, 0, %p0;
        barrier.cta.red.and.pred %p2, 1, 64, !%p0; selp.u32 %r3, 100, 0, %p1; selp.u32 %r4, 1000, 0, %p2;
        setp.lt.u32 %p3, %r0, 32; @%p3 st.shared.u32 [0], 7; @%p3 bar.arrive 2, 64; mov.u32 %r5, 0;
        @%p3 bra skip; barrier.sync 2, 64; ld.shared.u32 %r5, [0]; skip:
        add.u32 %r9, %r2, %r3; add.u32 %r9, %r9, %r4; add.u32 %r9, %r9, %r5;"""
    out, values = np.zeros(64, "u4"), np.zeros(64, "u4")
    load = "mul.wide.u32 %rd20, %r0, 4; add.s64 %rd21, %rd1, %rd20; ld.global.u32 %r1, [%rd21];"
    run(kernel(f"{TID} {load} {body} {STORE}", 2), [out, values], 64, unit=unit, shared=16)
    assert out.tolist() == [124] * 32 + [131] * 32


def test_events_that_the_environment_receives():
    body = f"{TID} fence.acq_rel.gpu; membar.sys; fence.sc.cta; bar.sync 0; bar.warp.sync -1; st.global.u32 [%rd0], 1;"
    told = run(kernel(body), [np.zeros(1, "u4")], 32, watched=True)[0].told
    everyone = list(range(32))
    assert told == [
        ("fence", "acq_rel", "gpu", everyone),
        ("fence", "sc", "sys", everyone),
        ("fence", "sc", "cta", everyone),
        ("arrive", 0, everyone),
        ("barrier", 0, everyone),
        ("warp", everyone),
    ]


@pytest.mark.parametrize("name", ["fence", "membar"])
def test_an_alias_fence_has_two_names(name):
    told = run(kernel(f"{TID} {name}.proxy.alias; st.global.u32 [%rd0], 1;"), [np.zeros(1, "u4")], 32, watched=True)
    assert told[0].told == [("fence", "alias", "sys", list(range(32)))]


def test_hints_have_no_effect():
    out = np.zeros(1, "u4")
    body = """prefetch.global.L2 [%rd0]; discard.global.L2 [%rd0], 128;
        applypriority.global.L2::evict_normal [%rd0], 128;
        nanosleep.u32 20; fence.proxy.async.shared::cta;
        createpolicy.fractional.L2::evict_last.b64 %rd1, 1.0;
        st.global.L1::evict_last.L2::cache_hint.u32 [%rd0], 5, %rd1; fence.mbarrier_init.release.cluster;"""
    assert run(kernel(body), [out], 32, watched=True)[0].told == [] and out[0] == 5


def test_grids_depend_by_thread_and_by_block():
    body = f"{TID} griddepcontrol.wait; griddepcontrol.launch_dependents; st.global.u32 [%rd0], 1;"
    told = run(kernel(body), [np.zeros(1, "u4")], 32, watched=True)
    assert told[0].told == [("launches", list(range(32))), ("dependents",)]


def test_clocks_are_read_from_the_environment():
    out = np.zeros(2, "u8")
    body = """mov.u64 %rd1, %globaltimer; st.global.b64 [%rd0], %rd1; mov.u64 %rd2, %clock64;
        st.global.b64 [%rd0+8], %rd2;"""
    run(kernel(body), [out], 32, watched=True)
    assert out.tolist() == [12345, 12345]
