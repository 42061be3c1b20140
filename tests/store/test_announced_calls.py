"""The calls that a page announces: two words each, which name a descriptor that is written once a plan."""

import random

import pytest

from tricomm.store import page as pages
from tricomm.store.page import NBYTES, RING, Descriptor, Page

FIRST = 6 * 4096 + 256  # place of the first descriptor


def descriptor(count: int) -> Descriptor:
    return Descriptor(0, 1, "all_reduce", "sum", "float32", "one_shot", "ll", count, -1, 8, "eager")


def fresh() -> tuple[memoryview, Page]:
    buffer = memoryview(bytearray(NBYTES))
    return buffer, Page(buffer, 0)


def wrong(page: Page, plans: int, calls: int) -> list[int]:
    """The calls by `plans` plans, in any order, that could not be read while they were among the last
    ones; the first plan is used in every third call, so its descriptor is an old one that is still in use."""
    announce, packed = page.announcer(), [descriptor(n).packed() for n in range(plans)]
    order, made, missing = random.Random(0), {}, []
    for sequence in range(1, calls + 1):
        made[sequence] = 0 if sequence % 3 == 0 else order.randrange(plans)
        announce(sequence, packed[made[sequence]])
        for late in range(max(1, sequence - RING + 1), sequence + 1):
            result = page.called(late)
            if result is None or (result.sequence, result.count) != (late, made[late]):
                missing.append(late)
    assert page.sequence() == calls
    return missing


@pytest.mark.parametrize("plans", [1, 64, 65, 500])
def test_the_last_calls_stay_readable_with_any_number_of_plans(plans):
    assert wrong(fresh()[1], plans, 1000) == []


def test_without_the_check_of_the_last_calls_a_descriptor_in_use_is_overwritten(monkeypatch):
    monkeypatch.setattr(pages._Places, "_named", lambda places, sequence: set())
    assert wrong(fresh()[1], 500, 1000) != []


def test_a_plans_descriptor_is_written_once():
    buffer, page = fresh()
    announce, packed = page.announcer(), descriptor(5).packed()
    announce(1, packed)
    before = bytes(buffer[FIRST : FIRST + 256])
    assert page.last() == Descriptor(1, *list(vars(descriptor(5)).values())[1:])
    buffer[FIRST + 20] ^= 1
    announce(2, packed)
    assert page.last() is None, "the second call has not written the descriptor again"
    buffer[FIRST : FIRST + 256] = before
    assert page.last().sequence == 2 and page.called(1).sequence == 1


def test_a_descriptor_of_another_number_is_not_taken_for_the_calls():
    """As a slow reader may see it: the word of an old call, with a descriptor that has been replaced."""
    buffer, page = fresh()
    announce = page.announcer()
    announce(1, descriptor(5).packed())
    old = bytes(buffer[2 * 4096 + 8 : 2 * 4096 + 16])
    for sequence in range(2, 200):
        announce(sequence, descriptor(sequence).packed())
    buffer[2 * 4096 + 8 : 2 * 4096 + 16] = old
    assert page.called(1) is None


def test_sequence_numbers_and_numbers_of_descriptors_that_are_large(monkeypatch):
    _, page = fresh()
    monkeypatch.setattr(pages, "_BITS", 7)  # a number's lower bits soon wrap around
    monkeypatch.setattr(pages, "_LOWER", 127)
    announce = page.announcer()
    for sequence in ((1 << 31) - 2, 1 << 31, (1 << 40) + 7):
        for step in range(100):
            announce(sequence + step, descriptor(step).packed())
            assert page.sequence() == sequence + step == page.last().sequence and page.last().count == step
