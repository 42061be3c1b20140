"""The shipped kernels under many schedules: clean, with and without faults; and the bounded search sees them all."""

from __future__ import annotations

import pytest

import tricomm
from tricomm.explorer import shipped
from tricomm.kernels import registry

KERNELS = pytest.mark.parametrize("kernel", registry.KERNELS, ids=lambda k: k.name)
FALSE_ALARMS = 2000


def clean(kernel, world_size=3, **more) -> tricomm.Report:
    sizes = more.pop("sizes", shipped.SIZES)
    blocks = more.pop("blocks", shipped.BLOCKS)
    report = tricomm.check(shipped.body(kernel, sizes), world_size, options=shipped.options(world_size, blocks), **more)
    assert report.ok, str(report)
    assert report.complete
    return report


@KERNELS
def test_random_schedules_from_every_edge_of_the_epoch(kernel):
    assert clean(kernel, schedules=12).steps > 1000


@KERNELS
def test_priorities(kernel):
    clean(kernel, 2, schedules=6, strategy="pct", seed=7)


@KERNELS
def test_every_schedule_with_one_preemption(kernel):
    """Two ranks, one block, two calls. `make soak` has two preemptions."""
    report = clean(kernel, 2, schedules=None, strategy="exhaustive", preemptions=1, sizes=(3, 3), blocks=1)
    assert 20 < report.ran < 1000


@KERNELS
def test_a_rank_that_stops_or_dies_at_any_step(kernel):
    clean(kernel, 2, schedules=8, faults=("stop", "drop"))


@pytest.mark.parametrize("kernel", [k for k in registry.KERNELS if k.collective != "barrier"], ids=lambda k: k.name)
def test_messages_of_several_chunks(kernel):
    """About two and a half mailboxes in one launch: the rotation within a launch."""
    chunk = 1024 if kernel.algorithm == "two_shot" else 512
    words = chunk // (1 if kernel.protocol == "simple" else 2) * 5 // 2
    memory = tricomm.Options(arena_bytes=64 * 1024, blocks=1, tile=256)
    size = words // 2 if kernel.algorithm == "two_shot" else words
    report = tricomm.check(shipped.body(kernel, (size,)), 2, schedules=2, options=memory)
    assert report.ok, str(report)


@pytest.mark.soak
@KERNELS
def test_no_false_alarm(kernel):
    clean(kernel, 2, schedules=FALSE_ALARMS // 2)
    clean(kernel, 2, schedules=FALSE_ALARMS // 2, strategy="pct", blocks=1)


@pytest.mark.soak
@KERNELS
def test_every_schedule_with_two_preemptions(kernel):
    clean(kernel, 2, schedules=None, strategy="exhaustive", preemptions=2, sizes=(3, 3), blocks=1)
