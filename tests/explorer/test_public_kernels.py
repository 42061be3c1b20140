"""Kernels as public Triton code has them: the right ones are passed, and each mistake is named where it is."""

from __future__ import annotations

from pathlib import Path

import pytest

import tricomm
from tests.explorer import public
from tests.marks import some

pytestmark = pytest.mark.usefixtures("unshrunk")
_OURS = str(Path(tricomm.__file__).parent)


@pytest.mark.parametrize("family", public.FAMILIES)
@pytest.mark.parametrize(
    ("world_size", "schedules", "strategy", "seed"),
    some([(2, 10, "random", 0), (2, 5, "pct", 1), (3, 4, "random", 2)], 3),
)
def test_a_right_kernel_is_passed(family, world_size, schedules, strategy, seed):
    report = tricomm.check(public.body(family), world_size, schedules, strategy, seed=seed)
    assert report.ok, report
    assert report.ran == schedules and report.complete


@pytest.mark.parametrize(
    ("family", "mistake"),
    some(((name, mistake) for name, family in public.FAMILIES.items() for mistake in family.mistakes), 8),
    ids=lambda value: value if isinstance(value, str) else value.name.replace(" ", "-"),
)
def test_a_mistake_is_named_where_it_is(family, mistake):
    report = tricomm.check(public.body(family, mistake.name), mistake.world_size, 40)
    assert not report.ok, "passed"
    finding = report.findings[0]
    assert finding.kind in mistake.kinds.split(), report
    results = [public.marked(where) for where in finding.where]
    assert results and len(results) == len(finding.ranks), report
    if finding.kind in ("race", "scope"):
        assert sorted(results) in [sorted(pair.split(", ")) for pair in mistake.pairs], (results, report)
        assert (len(set(finding.ranks)) == 2) == (family != "grid_sum"), report
    else:
        # In a deadlock others may wait in `comm.barrier()`.
        allowed = {mark for pair in mistake.pairs for mark in pair.split(", ")} | set(mistake.lone)
        named = [mark for mark in results if not (finding.kind == "deadlock" and mark.startswith(_OURS))]
        assert named and set(named) <= allowed, (results, report)
