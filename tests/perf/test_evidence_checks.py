"""The kit's checks where a call is not one tensor in and one out: symmetric handles, rows of unequal length."""

from __future__ import annotations

import pytest
import torch

import tricomm
from tricomm.kernels import registry
from tricomm.perf.evidence import calling, checks, uneven


def test_rows_of_unequal_length_are_checked_and_what_is_wrong_there_is_found(monkeypatch):
    kernel = registry.find("all_to_all_v", "one_shot", "ll")

    def body(comm):
        right = uneven.wrong(comm, kernel, torch.int16, True)
        with monkeypatch.context() as patch:
            patch.setattr(comm, "all_to_all_v", lambda x, *splits, out, **how: out)
            return right, uneven.wrong(comm, kernel, torch.int16, True)

    assert {n for rows in uneven.lengths(3, 0) for n in rows} == {0, 1, 2, 3}
    for right, spoilt in tricomm.simulate(body, 3, options=checks.FEW_OPTIONS):
        assert not right and len(spoilt) == 2 and "of 37 elements: " in spoilt[1], spoilt


@pytest.mark.parametrize("kernel", registry.ZERO_COPY, ids=lambda kernel: kernel.name)
def test_handles_are_passed_and_what_is_wrong_with_them_is_found(kernel, monkeypatch):
    handles, spoiled = [], set()
    right = calling.call

    def made(comm, name, number, x, y, *more):
        result = right(comm, name, number, x, y, *more)
        handles.append(isinstance(x, tricomm.Symmetric))
        if comm.rank in spoiled:
            result.view(torch.uint8)[:1] ^= 1
        return result

    monkeypatch.setattr(calling, "call", made)

    def body(comm):
        wanted = checks.calls(kernel, comm.world_size, "int32", True)
        whole = checks.wrong(comm, kernel, torch.int32, wanted)
        spoiled.add(comm.rank)
        return whole, checks.wrong(comm, kernel, torch.int32, wanted), len(wanted)

    for whole, spoilt, calls in tricomm.simulate(body, 2, options=checks.FEW_OPTIONS):
        assert not whole and len(spoilt) == calls and all("1 elements are wrong" in text for text in spoilt)
    assert all(handles)
