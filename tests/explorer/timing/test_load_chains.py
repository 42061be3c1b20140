"""Round trips to memory before the first push, barriers and bytes to peers: handwritten PTX, and a shipped kernel."""

import pytest

from tests.explorer.timing.timed_ptx import timed

_PUSH = "st.global.u64 [%a1+4104], %a3;"
_ONE, _TWO = "ld.global.u64 %a3, [%a0+8];", "ld.global.u64 %a3, [%a2];"


@pytest.mark.parametrize(
    ("body", "chain"),
    [
        ("mov.u64 %a3, 7;", (0, 0)),
        (_ONE, (1, 1)),
        ("ld.global.u64 %a2, [%a0+8];" + _TWO, (2, 2)),
        # An address that depends on the first load, or one that does not.
        ("ld.global.u64 %a2, [%a0+8]; ld.global.u64 %a4, [%a0+1024]; add.s64 %a3, %a2, %a4;", (1, 1)),
        # The same line of L1 again is no round trip.
        ("ld.global.u64 %a2, [%a0]; ld.global.u64 %a3, [%a2+16];", (1, 1)),
        ("ld.volatile.global.u64 %a2, [%a0]; ld.volatile.global.u64 %a3, [%a2+16];", (2, 2)),
        # A store or a branch that needs a load comes between: what follows waits for it in order.
        ("ld.global.u64 %a2, [%a0+8]; st.global.u64 [%a0+4096], %a2; ld.global.u64 %a3, [%a0+1024];", (1, 2)),
        ("ld.global.u64 %a2, [%a0+8]; setp.eq.s64 %p0, %a2, 0; @%p0 bra L; ld.global.u64 %a3, [%a0+1024]; L:", (1, 2)),
        ("ld.global.u64 %a2, [%a0+8]; setp.eq.s64 %p0, %a2, 0; @%p0 bra L; mov.u64 %a3, 7; L:", (0, 1)),
        # The guard of the push counts, and so does a value that comes back out of shared memory.
        (
            ".shared .align 8 .b8 s[64]; ld.global.u64 %a2, [%a0+8]; st.shared.u64 [s], %a2; bar.sync 0;"
            "ld.shared.u64 %a4, [s]; ld.global.u64 %a3, [%a4];",
            (2, 2),
        ),
        ("atom.global.add.u64 %a2, [%a0+4096], 8; add.s64 %a3, %a2, 1;", (1, 1)),
    ],
)
def test_dependent_loads_before_the_first_push_are_counted(body: str, chain: tuple[int, int]) -> None:
    assert timed(body + _PUSH + "ld.global.u64 %a2, [%a0+24]; ld.global.u64 %a2, [%a2];", 2).chain() == chain


def test_a_guard_of_the_push_counts() -> None:
    body = "ld.global.u64 %a2, [%a0+8]; setp.ne.s64 %p0, %a2, 0; mov.u64 %a3, 7; @%p0 " + _PUSH
    assert timed(body, 2).chain() == (1, 1)


def test_a_barrier_passes_on_the_waits_of_another_warp() -> None:
    slow = "ld.global.u64 %a2, [%a0+8]; ld.global.u64 %a2, [%a2]; st.global.u64 [%a0+4096], %a2;"
    body = f"""mov.u32 %r0, %tid.x; setp.lt.u32 %p0, %r0, 32; @%p0 bra S;
 {slow} bra E;
S: mov.u64 %a3, 7; bar.sync 0; {_PUSH} bra F;
E: bar.sync 0;
F:"""
    assert timed(body, 2, threads=64).chain() == (0, 2)


def test_without_a_push_there_is_no_chain() -> None:
    result = timed(_ONE)
    assert result.chain() is None and result.system_fences() == 0


def test_a_load_from_a_peer_counts_as_the_first_push() -> None:
    assert timed("ld.global.u64 %a2, [%a0+8]; ld.global.u64 %a3, [%a1];", 2).chain() == (0, 0)


def test_bytes_to_and_from_peers_and_fences_are_counted() -> None:
    result = timed(_PUSH + "ld.global.u64 %a2, [%a1]; fence.acq_rel.sys; fence.acq_rel.gpu;", 2)
    # Every thread of a warp stores and loads the same word.
    assert [(state.written, state.read, state.headers) for state in result.states] == [(256, 256, 0)] * 2
    assert result.system_fences() == 1
