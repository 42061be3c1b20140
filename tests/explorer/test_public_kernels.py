"""Kernels like those in public Triton code: right ones pass, and each mistake is reported at its line."""

from pathlib import Path

import pytest

import tricomm
from tests.explorer import public
from tests.marks import most, some

pytestmark = pytest.mark.usefixtures("unshrunk")
_OURS = str(Path(tricomm.__file__).parent)


@pytest.mark.parametrize("family", public.FAMILIES)
@pytest.mark.parametrize(
    ("world_size", "schedules", "strategy", "compiled"),
    [(2, 10, "random", None), *some([(2, 3, "random", "sm_90"), (2, 5, "pct", None), (3, 4, "random", None)], 3)],
)
def test_a_right_kernel_is_passed(family, world_size, schedules, strategy, compiled):
    report = tricomm.check(public.body(family), world_size, schedules, strategy, seed=1, compiled=compiled)
    assert report.ok, report
    assert report.ran == schedules and report.complete


MISTAKES = [(name, mistake) for name, family in public.FAMILIES.items() for mistake in family.mistakes]


def _name(value):
    return getattr(value, "name", value).replace(" ", "-")


# Triton 3.9 compiles in the block barrier that is missing next to a scalar atomic.
@pytest.mark.parametrize(
    ("family", "mistake"), some([pair for pair in MISTAKES if "no barrier" not in pair[1].name], 12, most), ids=_name
)
def test_a_mistake_is_reported_in_a_compiled_kernel(family, mistake):
    report = tricomm.check(public.body(family, mistake.name), mistake.world_size, 40, compiled="sm_90")
    assert not report.ok, "passed"
    assert report.findings[0].kind in mistake.kinds.split(), report


@pytest.mark.parametrize(("family", "mistake"), some(MISTAKES, 8), ids=_name)
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
        # In a deadlock other ranks may wait in `comm.barrier()`.
        allowed = {mark for pair in mistake.pairs for mark in pair.split(", ")} | set(mistake.lone)
        named = [mark for mark in results if not (finding.kind == "deadlock" and mark.startswith(_OURS))]
        assert named and set(named) <= allowed, (results, report)
