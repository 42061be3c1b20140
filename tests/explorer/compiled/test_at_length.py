"""The soak of compiled kernels: every one, for every architecture, under 200 schedules; and mistakes that it finds."""

import pytest

from tests.explorer.compiled import at_length, ptx_mutants
from tests.explorer.compiled.test_ptx_mutants import FORBIDDEN, WIDE
from tests.explorer.mutation import Edit, loaded
from tests.marks import compiles, some
from tests.passed_record import PassedRecord
from tricomm.kernels.collectives import registry


@pytest.mark.soak
@pytest.mark.parametrize("architecture", ["sm_90", "sm_80", "sm_100"])
@pytest.mark.parametrize("kernel", at_length.KERNELS, ids=lambda kernel: kernel.name)
def test_a_shipped_kernel_is_passed_at_length(kernel, architecture, request):
    """`make soak` runs this under every Triton, with one record for all."""
    if not compiles(kernel, int(architecture.removeprefix("sm_"))):
        pytest.skip("refused by name")
    record = PassedRecord(
        request.config.cache.mkdir("explored") / "at_length.jsonl", at_length.__file__, ptx_mutants.__file__
    )
    for case in at_length.cases(kernel):
        at_length.passes(case, architecture, record)


def test_lanes_that_hold_several_words_of_a_tile_are_ordered(unshrunk):
    """A warp's reductions have no barrier. A reduce in place loads its own words, and stores the sum where they were,
    by other lanes."""

    def report():
        return at_length.cases(registry.find("reduce", "one_shot", "ll"))[0].check("sm_90", 1, "random")

    assert report().ok
    barrier = "(SPEC.CODED > 1)):\n        tl.debug_barrier()"
    with loaded([Edit("kernels/device/arrival.py", barrier, barrier.replace("tl.debug_barrier()", "pass"))]):
        assert {f.kind for f in report().findings} == {"race"}


def test_lanes_that_hold_several_words_of_a_tile_clear_a_slot_before_others_fill_it(unshrunk):
    """Triton loads a payload's tile by 16 bytes a thread, and stores the zeros of a clearing by a word a thread."""
    case = at_length.cases(registry.find("send", "one_shot", "ll"))[0]
    barrier = "        tl.debug_barrier()  # another thread stores the payload there\n"
    assert case.check("sm_90", 1, "random").ok
    with loaded([Edit("kernels/device/message_queues.py", barrier, "")]):
        (finding,) = case.check("sm_90", 1, "random").findings
    assert "the zero of a clearing may still land on an LL word" in finding.text


def test_a_relaxed_header_after_a_clearing_is_noticed_before_an_old_word_is_read(unshrunk):
    case = at_length.cases(registry.find("send", "one_shot", "ll"))[0]
    with loaded([Edit("kernels/collectives/send.py", "call, tag, cleared, SPEC)", "call, tag, False, SPEC)")]):
        (finding,) = case.check("sm_90", 1, "random").findings
    assert finding.kind == "race" and "a cleared LL word may still be read" in finding.text


@pytest.mark.exhaustive
@pytest.mark.skipif(not WIDE, reason="this Triton has no wide words")
def test_a_parked_warp_is_no_deadlock_for_one_that_read_a_newer_value():
    """A round of the loop has more loads than the number of times that a parked warp is woken."""
    report = at_length.cases(registry.find("all_reduce", "two_shot", "ll128"))[1].check("sm_90", 4, "pct")
    assert report.ok, report


# The case has one warp, whose reductions have no barrier and whose epoch words need none.
_GROUPS = [group for group in FORBIDDEN if group.function not in ("wait_sequence", "finish")]


@pytest.mark.parametrize(
    "group", some(_GROUPS, lambda number, group: group.holds == "v2.b64"), ids=lambda group: group.name
)
def test_forbidden_mutations_are_noticed_in_small_calls(group, unshrunk):
    """The last mutation of each group: the first ones change a rank's accesses to its own mailbox and are harmless."""
    kernel = registry.find(*group.key)
    case, name = at_length.cases(kernel)[0], kernel.function.__name__
    text = ptx_mutants.launched(lambda: case.check("sm_90", 1, "random"))[name][0]
    last = ptx_mutants.chosen(text, name, group.function, group.kinds, group.holds, group.innermost)[-1]
    with ptx_mutants.changed(last.name, lambda code: last.apply(code) if code == text else code, name):
        report = case.check("sm_90", group.schedules, "random")
    assert {f.kind for f in report.findings} & last.expected, last.name
