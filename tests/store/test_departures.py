"""Records of processes that leave a set-up: the processes that stop with them, and forged records."""

from __future__ import annotations

import random

import pytest

from tricomm.errors import CollectiveTimeout, InvalidArgument, PeerDied, RendezvousError, ResourceError
from tricomm.store.departures import NOBODY, Departure, Ending, ending
from tricomm.store.records import MessageHeader

HEADER = MessageHeader(1, 3, 1, "left")
ME, OTHER = b"m" * 16, b"o" * 16


def left(end: Ending, *known: bytes) -> Departure:
    return Departure(end, 1, 3, 17, OTHER, known, "ResourceError", "no memory — at all")


@pytest.mark.parametrize(
    "error,strict,before,after",
    [
        (RendezvousError("late"), False, Ending.QUIET, Ending.TOLD),
        (CollectiveTimeout("late"), True, Ending.TOLD_ALL, Ending.TOLD),
        (PeerDied("rank 2"), False, Ending.TOLD, Ending.TOLD),
        (PeerDied("rank 2"), True, Ending.TOLD, Ending.TOLD),
        (InvalidArgument("x"), False, Ending.TOLD_ALL, Ending.TOLD),
        (ResourceError("x"), True, Ending.TOLD_ALL, Ending.TOLD),
        (KeyboardInterrupt(), False, Ending.TOLD_ALL, Ending.TOLD),
    ],
)
def test_the_table_of_endings(error, strict, before, after):
    assert ending(error, False, False, strict) is before and ending(error, False, True, strict) is after
    assert ending(error, True, False, strict) is ending(error, True, True, strict) is Ending.QUIET


@pytest.mark.parametrize("end", Ending)
def test_the_processes_that_stop(end):
    known = left(end, ME, OTHER, NOBODY)
    assert known.stops(0, ME, set()) == (end >= Ending.TOLD)
    assert not known.stops(0, b"n" * 16, set())  # a later process of a rank that it knew
    assert known.stops(2, ME, set()) == (end == Ending.TOLD_ALL)
    assert not known.stops(2, ME, {OTHER})  # it has read the reason before
    assert left(end).stops(5, ME, set()) == (end == Ending.TOLD_ALL)  # by a process that knew no rank


@pytest.mark.parametrize("token", [None, b"secret"])
def test_a_departure_round_trips_and_no_mutation_is_accepted(token):
    made, rng = left(Ending.TOLD, ME, OTHER, NOBODY), random.Random(1)
    data = made.seal(HEADER, token)
    assert Departure.open(data, HEADER, token) == made
    for _ in range(2000):
        at = rng.randrange(len(data))
        for bad in (data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :], data[:at]):
            with pytest.raises(RendezvousError):
                Departure.open(bad, HEADER, token)


@pytest.mark.parametrize("data", [b"", b"\2" * 10, bytes([9]) + bytes(1000)])
def test_an_invalid_departure_is_refused(data):
    with pytest.raises(RendezvousError, match="rank 1's message: bad length or ending"):
        Departure.open(HEADER.seal(data, None), HEADER, None)
