"""Clocks of warps: handwritten PTX whose time can be counted, on a GPU whose latencies are round numbers."""

import pytest

from tests.explorer.timing.timed_ptx import BARRIER, FENCE, INVALIDATE, LINKS, ONE_WAY, timed
from tricomm.explorer.timing.timed_links import ByteQueue
from tricomm.explorer.timing.warp_clock import PARTS
from tricomm.perf.cost_model.machines import MachineSpec


def test_a_chain_of_additions_costs_its_latency_and_independent_ones_a_slot_each() -> None:
    chain = "mov.u32 %r0, 1;" + "add.s32 %r0, %r0, 1;" * 5 + "st.global.u32 [%a0+4096], %r0;"
    # Five times four cycles, then the slots of the store and of the return.
    assert sum(timed(chain).path()) == pytest.approx(5 * 4 + 2)
    apart = "".join(f"add.s32 %r{n}, 1, 1;" for n in range(5)) + "st.global.u32 [%a0+4096], %r4;"
    assert sum(timed(apart).path()) == pytest.approx(4 + 4 + 2)


def test_accesses_of_a_dependent_launch_before_its_wait_are_not_on_its_path() -> None:
    before, after = "ld.global.u64 %a2, [%a0];", "add.s64 %a2, %a2, 1; st.global.u64 [%a0+4096], %a2;"
    assert sum(timed(before + after).path()) == pytest.approx(100 + 6 + 2)
    assert sum(timed(before + "griddepcontrol.wait;" + after).path()) == pytest.approx(6 + 2)


@pytest.mark.parametrize(("cold", "far"), [(False, 100), (True, 1000)])
def test_a_load_costs_the_latency_of_its_place(cold: bool, far: int) -> None:
    chase = "ld.global.u64 %a2, [%a0+8]; ld.global.u64 %a3, [%a2]; st.global.u64 [%a0+4096], %a3;"
    assert sum(timed(chase, cold=cold).path()) == pytest.approx(2 * far + 2)
    again = "ld.global.u64 %a2, [%a0]; ld.global.u64 %a3, [%a2+16]; st.global.u64 [%a0+4096], %a3;"  # one line of L1
    assert sum(timed(again, cold=cold).path()) == pytest.approx(far + 10 + 2)


def test_loads_that_do_not_depend_on_each_other_overlap() -> None:
    both = (
        "ld.global.u64 %a2, [%a0+8]; add.s64 %a2, %a2, 1; ld.global.u64 %a3, [%a0+512]; st.global.u64 [%a0+4096], %a3;"
    )
    assert sum(timed(both).path()) == pytest.approx(1 + 2 + 100 + 2)


def test_a_load_from_a_peer_is_a_round_trip() -> None:
    parts = dict(zip(PARTS, timed("ld.global.u64 %a2, [%a1]; st.global.u64 [%a0+4096], %a2;", 2).path(), strict=True))
    assert parts["hop"] == pytest.approx(2 * ONE_WAY + 100 - 1)  # the load's own slot is work
    assert sum(parts.values()) == pytest.approx(2 * ONE_WAY + 100 + 2)


_PUSH = "st.global.u64 [%a1+4104], %a0;"
_SIGNAL = "st.release.sys.global.u64 [%a1+4096], %a0;"
_POLL = "L: ld.acquire.sys.global.u64 %a2, [%a0+4096]; setp.eq.s64 %p0, %a2, 0; @%p0 bra L;"


def test_a_poll_ends_a_hop_after_the_peers_store() -> None:
    result = timed(_SIGNAL + _POLL, 2)
    parts = dict(zip(PARTS, result.path(), strict=True))
    assert parts["hop"] == pytest.approx(ONE_WAY) and parts["fence"] == pytest.approx(FENCE)
    # From its arrival: the rest of the spin that just misses it, at most, then the load that sees it.
    spin = 100 + INVALIDATE + 12
    assert 100 < parts["poll"] <= 2 * spin
    assert sum(parts.values()) == pytest.approx(max(c.time for clocks in result.clocks for c in clocks))
    assert [int(words[512]) for words in result.words] == [words.ctypes.data for words in result.words[::-1]]


def test_a_release_waits_until_the_pushes_before_it_are_acknowledged() -> None:
    parts = dict(zip(PARTS, timed(_PUSH + _SIGNAL + _POLL, 2).path(), strict=True))
    # There and back, and an answer from L2; a slot of the push has passed when it begins.
    assert parts["fence"] == pytest.approx(2 * ONE_WAY + 100 - 1)
    relaxed = timed(_PUSH + _SIGNAL.replace("release", "relaxed") + _POLL, 2).path()
    assert sum(relaxed) < sum(parts.values()) - 2000 and relaxed[PARTS.index("fence")] == 0


def test_a_fence_of_the_gpu_does_not_wait_for_peers() -> None:
    for scope, least in (("gpu", 100), ("sys", 2 * ONE_WAY + 100)):
        result = timed(_PUSH + f"fence.acq_rel.{scope};", 2).path()
        assert least - 2 <= result[PARTS.index("fence")] <= least


def test_an_alias_fence_waits_for_a_hop_and_its_answer_only_if_a_store_is_on_its_way() -> None:
    idle, behind = (timed(code + "fence.proxy.alias;", 2) for code in ("", _PUSH))
    assert idle.path()[PARTS.index("fence")] == pytest.approx(max(FENCE - 2 * ONE_WAY, 100))
    assert behind.path()[PARTS.index("fence")] == pytest.approx(2 * ONE_WAY + 100 - 1)
    assert idle.system_fences() == behind.system_fences() == 0  # it begins no barrier


def test_a_barrier_joins_the_clocks_of_a_blocks_warps() -> None:
    body = """mov.u32 %r0, %tid.x; setp.lt.u32 %p0, %r0, 32; @%p0 bra S;
 ld.global.u64 %a2, [%a0+8]; ld.global.u64 %a3, [%a2]; st.global.u64 [%a0+4096], %a3;
S: bar.sync 0;"""
    result = timed(body, threads=64)
    first, second = (clock.time for clock in result.clocks[0])
    assert first == second > 200 + BARRIER
    alone = timed(body.replace("bar.sync 0;", "mov.u32 %r0, 1;"), threads=64)
    slow = max(clock.time for clock in alone.clocks[0])
    assert first == pytest.approx(slow + 1 + BARRIER)


def test_bytes_wait_for_a_link() -> None:
    queue = ByteQueue(2.0)
    assert (queue.carries(10, 0), queue.carries(10, 3), queue.carries(4, 100)) == (5, 10, 102)
    slow = MachineSpec("slow", "sm_90", 1e-3, 1e-3, 1e15, 1e15, hop=1100, barrier=0, launch=0)  # a byte a microsecond
    wide = "mov.u32 %r0, %tid.x; mul.wide.u32 %a2, %r0, 8; add.s64 %a3, %a1, %a2; st.global.u64 [%a3+4096], %a0;"
    quick, late = (timed(wide + "fence.acq_rel.sys;", 2, machine=m).path() for m in (LINKS, slow))
    assert sum(late) - sum(quick) == pytest.approx(256)  # out of one GPU and into the other at once


def test_the_kernels_timer_reads_the_clock() -> None:
    result = timed(
        "ld.global.u64 %a2, [%a0+8]; st.global.u64 [%a2+4096], %a2; mov.u64 %a3, %globaltimer;"
        "st.global.u64 [%a0+4096], %a3;"
    )
    assert int(result.words[0][512]) == 1000 * 101
