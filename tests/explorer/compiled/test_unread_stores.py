"""A flag that no rank reads is left over; data that is stored by strong vector accesses is not."""

import pytest
import torch
import triton
import triton.language as tl

import tricomm
from tricomm.explorer.compiled.thread_detector import ThreadDetector


@triton.jit
def store(peer, VECTOR: tl.constexpr):
    places = peer + tl.arange(0, 32) * 2
    text: tl.constexpr = (
        "st.relaxed.sys.global.v2.b32 [$1], {1, 1};" if VECTOR else "st.relaxed.sys.global.b32 [$1], 1;"
    )
    tl.inline_asm_elementwise(text, "=r,l", [places], dtype=tl.int32, is_pure=False, pack=1)


def sent(vector):
    def body(comm):
        memory = comm.symmetric((64,), torch.int32)
        comm.launch(store, 1, memory.peers[1 - comm.rank], VECTOR=vector, num_warps=1)

    return tricomm.check(body, 2, 4, compiled="sm_90")


def test_a_flag_that_no_rank_reads_is_left_over():
    report = sent(False)
    assert [finding.kind for finding in report.findings] == ["leftover"], report


def test_a_vector_is_data_that_may_stay_unread():
    report = sent(True)
    assert report.ok and report.steps, report


@pytest.mark.parametrize("vector", [False, True])
def test_without_the_look_at_the_end_nothing_is_left_over(monkeypatch, vector):
    monkeypatch.setattr(ThreadDetector, "leftovers", lambda *given: None)
    assert sent(vector).ok
