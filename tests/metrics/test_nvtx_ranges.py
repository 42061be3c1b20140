"""NVTX ranges of calls, with a fake of the package; tests/engines/test_traces.py has the real one."""

from __future__ import annotations

import logging
import sys
from types import SimpleNamespace

import pytest
import torch
from torch._C._profiler import ActiveProfilerType
from torch.profiler import profile

from tests.core.bodies.common_bodies import alone
from tricomm.metrics import call_trace

pytestmark = pytest.mark.usefixtures("forgotten")
ONES = torch.ones(8)


@pytest.fixture
def nvtx(monkeypatch):
    """A fake of the package, which keeps the ranges of its domains; `open` is how many are open."""
    fake = SimpleNamespace(ranges=[], open=0)

    def push(attributes):
        fake.ranges.append(attributes)
        fake.open += 1

    def pop():
        fake.open -= 1

    def get_domain(name):
        return SimpleNamespace(
            get_event_attributes=lambda message, payload: (name, message, payload), push_range=push, pop_range=pop
        )

    monkeypatch.setitem(sys.modules, "nvtx", SimpleNamespace(get_domain=get_domain))
    return fake


def test_ranges_have_the_call_its_bytes_its_algorithm_and_its_number(nvtx, tmp_path, monkeypatch):
    monkeypatch.setenv("TRICOMM_NVTX", "1")
    with alone(tmp_path) as comm:
        comm.all_reduce(ONES.clone())
        comm.all_reduce(ONES.clone())
        comm.barrier()
        with pytest.raises(KeyError), comm._launcher.trace.shown(("send", "tag 1", torch.int64, 3, 0), dict, ONES, 0):
            assert nvtx.open == 1
            raise KeyError
    assert nvtx.ranges == [
        ("tricomm", "all_reduce 32 bytes one_shot/ll", 1),
        ("tricomm", "all_reduce 32 bytes one_shot/ll", 2),
        ("tricomm", "barrier 0 bytes one_shot/simple", 3),
        ("tricomm", "send 24 bytes", 0),
    ]
    assert nvtx.open == 0


def test_emit_nvtx_makes_ranges_and_another_profiler_does_not(nvtx, tmp_path, monkeypatch):
    with alone(tmp_path) as comm:
        comm.all_reduce(ONES.clone())
        with profile():
            comm.all_reduce(ONES.clone())
            assert nvtx.ranges == []
            monkeypatch.setattr(call_trace, "_profiler_type", lambda: ActiveProfilerType.NVTX)
            comm.all_reduce(ONES.clone())
    assert nvtx.ranges == [("tricomm", "all_reduce 32 bytes one_shot/ll", 3)]


@pytest.mark.parametrize(
    "value, said",
    [
        ("1", "calls have no NVTX ranges (import of nvtx halted; None in sys.modules); pip install 'tricomm[nvtx]'"),
        (
            "maybe",
            "TRICOMM_NVTX='maybe' is neither on (1, on, true, yes) nor off (0, false, no, off); it counts as off",
        ),
    ],
)
def test_a_missing_package_or_a_wrong_value_is_one_warning(value, said, tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("TRICOMM_NVTX", value)
    monkeypatch.setitem(sys.modules, "nvtx", None)
    with caplog.at_level(logging.WARNING):
        for place in ("a", "b"):
            (tmp_path / place).mkdir()
            with alone(tmp_path / place) as comm:
                assert torch.equal(comm.all_reduce(ONES.clone()), ONES)
    assert [record.message for record in caplog.records] == [said]
