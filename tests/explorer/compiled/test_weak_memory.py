"""Outcomes of small PTX programs: those that the memory model allows occur, those that it forbids do not."""

import functools

import pytest
import torch
import triton
import triton.language as tl

import tricomm
from tests.explorer.compiled.ptx_mutants import changed
from tricomm.explorer.compiled import weak_memory

_HEAD = """
.version 9.0
.target sm_90a
.address_size 64
.visible .entry _frame(.param .u64 p0, .param .u64 p1, .param .u64 p2, .param .u64 p3)
.reqntid 64
{
  .reg .pred %p<8>;
  .reg .b32 %r<16>;
  .reg .b64 %d<32>;
  .reg .b128 %q<4>;
  ld.param.u64 %d0, [p0];
  ld.param.u64 %d1, [p1];
  mov.u64 %d10, 1;
  mov.u32 %r1, %ctaid.x;
  mov.u32 %r2, %tid.x;
  setp.eq.u32 %p1, %r2, 0;
  setp.ne.u32 %p2, %r1, 0;
  @%p2 bra $other;
"""
_BETWEEN = """
  ret;
$other:
"""
# The second block's first thread stores the values that it has read into %d4 and %d5.
_TAIL = """
  @%p1 st.global.u64 [%d1], %d4;
  @%p1 st.global.u64 [%d1+8], %d5;
  ret;
}
"""


@triton.jit
def _frame(data_ptr, out_ptr):
    tl.store(out_ptr, tl.load(data_ptr))


def outcomes(
    one: str, other: str, schedules: int = 60, faults: tuple[str, ...] = ("delay",), final: bool = False
) -> set[tuple[int, ...]]:
    """The values that the second block reads over all schedules, or the `final` values of memory; races are ignored."""
    seen = set()

    def fn(comm):
        data, out = comm.symmetric((32,), torch.int64), torch.full((2,), -1, dtype=torch.int64)
        data.local.zero_()
        comm.launch(_frame, 2, data.local, out, num_warps=2)
        seen.add((*out.tolist(), int(data.local[0])) if final else tuple(out.tolist()))

    text = f"{_HEAD}{one}{_BETWEEN}{other}{_TAIL}"
    with changed(text, lambda _: text, "_frame"):
        tricomm.check(fn, 1, schedules, faults=faults, keep_going=True, compiled="sm_90")
    return seen


_STORES = "@%p1 st.relaxed.gpu.u64 [%d0], %d10; {} @%p1 st.{}.gpu.u64 [%d0+64], %d10;"
_LOADS = "@%p1 ld.{}.gpu.u64 %d4, [%d0+64]; {} @%p1 ld.relaxed.gpu.u64 %d5, [%d0];"
_FENCE = "fence.acq_rel.gpu;"


@functools.cache
def passed(
    store: str = "relaxed",
    load: str = "relaxed",
    before: str = "",
    after: str = "",
    faults: tuple[str, ...] = ("delay",),
) -> set[tuple[int, ...]]:
    return outcomes(_STORES.format(before, store), _LOADS.format(load, after), 80, faults)


def test_relaxed_stores_and_loads_pass_each_other():
    assert passed() == {(0, 0), (0, 1), (1, 0), (1, 1)}
    assert (1, 0) not in passed(faults=())  # only weak memory shows it


@pytest.mark.parametrize(("store", "load"), [("release", "acquire"), ("relaxed", "acquire"), ("release", "relaxed")])
def test_release_and_acquire_together_forbid_reordering(store, load):
    assert ((1, 0) in passed(store, load)) == ("relaxed" in (store, load))


@pytest.mark.parametrize(("before", "after"), [(_FENCE, _FENCE), ("", _FENCE), (_FENCE, "")])
def test_two_fences_forbid_reordering(before, after):
    assert ((1, 0) in passed(before=before, after=after)) == ("" in (before, after))


def test_stores_are_buffered_unless_a_fence_is_between_them():
    side = "@%p1 st.relaxed.gpu.u64 [%d0+{0}], %d10; {2} @%p1 ld.relaxed.gpu.u64 %d{3}, [%d0+{1}];"
    for fence, weak in (("", True), ("fence.sc.gpu;", False)):
        one = side.format(0, 64, fence, 4) + "@%p1 st.global.u64 [%d0+128], %d4;"
        wait = "bar.sync 0;"
        other = side.format(64, 0, fence, 5) + wait + "$again: @%p1 ld.relaxed.gpu.u64 %d4, [%d0+192];"
        one = one.replace("st.global.u64 [%d0+128], %d4", "st.release.gpu.u64 [%d0+128], %d4")
        one += "@%p1 st.release.gpu.u64 [%d0+192], %d10;"
        other += "@%p1 ld.acquire.gpu.u64 %d6, [%d0+192]; setp.ne.u64 %p3, %d6, 1; and.pred %p3, %p3, %p1;"
        other += "@%p3 bra $again; @%p1 ld.relaxed.gpu.u64 %d4, [%d0+128];"
        assert ((0, 0) in outcomes(one, other, 80)) == weak


def test_loads_of_one_word_never_go_back():
    store = "@%p1 st.relaxed.gpu.u64 [%d0], %d10;"
    load = "@%p1 ld.relaxed.gpu.u64 %d4, [%d0]; @%p1 ld.relaxed.gpu.u64 %d5, [%d0];"
    assert (1, 0) not in outcomes(store, load)


def test_a_thread_sees_its_own_store():
    own = "mov.u64 %d4, 0; @%p1 st.global.u64 [%d0+8], %d10; @%p1 ld.global.u64 %d5, [%d0+8];"
    assert outcomes("", own, 20) == {(0, 1)}


def test_a_pair_of_64_bits_may_tear_and_128_bits_may_not():
    pair = outcomes("@%p1 st.relaxed.gpu.v2.b64 [%d0], {%d10, %d10};", "@%p1 ld.relaxed.gpu.v2.b64 {%d4, %d5}, [%d0];")
    assert (0, 1) in pair and (1, 0) in pair
    whole = outcomes(
        "mov.b128 %q0, {%d10, %d10}; @%p1 st.relaxed.gpu.b128 [%d0], %q0;",
        "@%p1 ld.relaxed.gpu.b128 %q1, [%d0]; mov.b128 {%d4, %d5}, %q1;",
    )
    assert whole == {(0, 0), (1, 1)}


def test_a_barrier_orders_the_stores_of_a_warp_before_the_release_of_another():
    last = "setp.eq.u32 %p4, %r2, 63; @%p4 st.release.gpu.u64 [%d0+64], %d10;"
    for barrier, weak in (("bar.sync 0;", False), ("", True)):
        one = f"@%p1 st.relaxed.gpu.u64 [%d0], %d10; {barrier} {last}"
        assert ((1, 0) in outcomes(one, _LOADS.format("acquire", ""))) == weak


@pytest.mark.parametrize(
    ("before", "after", "weak"),
    [("fence.acq_rel.cta;", _FENCE, True), ("fence.sc.cta;", _FENCE, True), ("bar.sync 0;", _FENCE, True)],
)
def test_a_fence_of_the_block_lets_another_block_see_stores_pass_each_other(before, after, weak):
    assert ((1, 0) in passed(before=before, after=after)) == weak


def test_a_fence_of_the_block_and_a_release_of_the_gpu_order_together():
    last = "setp.eq.u32 %p4, %r2, 63; @%p4 st.release.gpu.u64 [%d0+64], %d10;"
    one = f"@%p1 st.relaxed.gpu.u64 [%d0], %d10; fence.acq_rel.cta; bar.sync 0; {last}"
    assert (1, 0) not in outcomes(one, _LOADS.format("acquire", ""))


def test_a_load_passes_a_release_and_the_release_passes_no_store():
    side = "@%p1 st.release.gpu.u64 [%d0+{0}], %d10; @%p1 ld.acquire.gpu.u64 %d{2}, [%d0+{1}];"
    one = side.format(0, 64, 4) + "@%p1 st.release.gpu.u64 [%d0+128], %d4; @%p1 st.release.gpu.u64 [%d0+192], %d10;"
    other = side.format(64, 0, 5) + "bar.sync 0; $again: @%p1 ld.acquire.gpu.u64 %d6, [%d0+192];"
    other += "setp.ne.u64 %p3, %d6, 1; and.pred %p3, %p3, %p1; @%p3 bra $again; @%p1 ld.relaxed.gpu.u64 %d4, [%d0+128];"
    assert (0, 0) in outcomes(one, other, 120)
    assert (1, 0) not in passed("release", "acquire")


_TWO_WARPS = """
  @%p1 st.relaxed.gpu.u64 [%d0], %d10;
  bar.sync 0;
  mov.u64 %d11, 2;
  setp.eq.u32 %p4, %r2, 63;
  @%p4 st.relaxed.gpu.u64 [%d0], %d11;
"""


@pytest.mark.parametrize("ordered", [True, False])
def test_late_stores_of_two_warps_to_one_place_arrive_in_the_order_of_their_barrier(monkeypatch, ordered):
    """Both stores are late, and a load makes the second one visible; the first one must not overwrite it."""
    monkeypatch.setattr(weak_memory, "_OFTEN", 0.95)
    monkeypatch.setattr(weak_memory, "_OFTEN_BEHIND", 0.95)
    if not ordered:
        monkeypatch.setattr(weak_memory.WeakMemory, "add", lambda self, held: self.held.append(held))
    loads = "@%p1 ld.relaxed.gpu.u64 %d4, [%d0]; @%p1 ld.relaxed.gpu.u64 %d5, [%d0];" * 4
    last = {final for *_, final in outcomes(_TWO_WARPS, loads, 160, final=True)}
    assert (last == {2}) == ordered
