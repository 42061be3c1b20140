"""Mistakes in public kernels, compiled: each is reported, or the compiler has mended it, in a way that is known."""

from __future__ import annotations

from functools import partial

import pytest
import triton

import tricomm
from tests.explorer import public
from tests.explorer.compiled.ptx_mutants import changed
from tests.marks import most, some
from tricomm.explorer.ptx.text.parser import parse

# How Triton 3.9 mends a missing `tl.debug_barrier`. Earlier versions do not do what BARRIER says in most families.
BARRIER = "a block barrier before each scalar atomic"
BROADCAST = "what one thread has polled reaches the others through shared memory, behind a block barrier"
ONE_THREAD = "one thread stores the scalar and executes the atomic"
MENDED = {
    ("push_gather", "no barrier before the flag"): BARRIER,
    ("push_gather", "no barrier after the poll"): BROADCAST,
    ("queue", "no barrier before the head"): BARRIER,
    ("queue", "no barrier before the credit"): BARRIER,
    ("grid_sum", "no barrier before the arrival"): ONE_THREAD,
    ("grid_sum", "no barrier after the arrival"): BROADCAST,
    ("grid_sum", "no barrier before the unlock"): ONE_THREAD,
}
MISTAKES = {(name, m.name): m for name, family in public.FAMILIES.items() for m in family.mistakes}
pytestmark = pytest.mark.usefixtures("unshrunk")


def _name(value: object) -> str:
    return str(value).replace(" ", "-")


@pytest.mark.parametrize(("family", "name"), some([key for key in MISTAKES if key not in MENDED], 12, most), ids=_name)
def test_a_mistake_in_a_public_kernel_is_named_where_it_is(family, name):
    mistake = MISTAKES[family, name]
    report = tricomm.check(public.body(family, name), mistake.world_size, 40, compiled="sm_90")
    assert not report.ok, "passed"
    assert report.findings[0].kind in mistake.kinds.split(), report


@pytest.mark.parametrize(("family", "name"), some(MENDED, 11), ids=_name)
def test_a_missing_barrier_is_reported_or_mended_by_the_compiler(family, name):
    """Where a barrier of the compiler's mends it, it is reported without this barrier."""
    mended = not _pairs_found(family, name)
    assert mended or triton.__version__ < "3.9"
    if mended and MENDED[family, name] is BARRIER:
        with changed(f"{family} {name}", partial(_without_barriers_before_atomics, family), family):
            assert _pairs_found(family, name)


def _pairs_found(family: str, name: str) -> set[str]:
    """Those of the mistake's pairs of lines that a finding names."""
    mistake = MISTAKES[family, name]
    report = tricomm.check(public.body(family, name), mistake.world_size, 12, compiled="sm_90")
    named = {", ".join(sorted(map(public.marked, f.where))) for f in report.findings}
    return named & {", ".join(sorted(pair.split(", "))) for pair in mistake.pairs}


def _without_barriers_before_atomics(kernel: str, text: str) -> str:
    rows, code = text.splitlines(), parse(text, kernel).instructions
    stops = ("atom", "red", "ld", "st", "bar", "bra")
    for at, instruction in enumerate(code):
        following = next((i.opcode for i in code[at + 1 :] if i.opcode in stops), None)
        if instruction.opcode == "bar" and following in ("atom", "red"):
            rows[instruction.line - 1] = "\t//"
    return "\n".join(rows) + "\n"
