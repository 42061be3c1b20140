"""The system refuses a call in a replace: all ranks get an error, and can call replace again."""

from __future__ import annotations

import gc
import threading

import pytest

from tests import ranks
from tests.core.bodies.common_bodies import OWN, attempt, leftovers, more_than, right
from tests.core.bodies.replace_bodies import places
from tests.core.faults.test_shrink import made
from tests.store.test_shrink import Refusing
from tricomm.store.control import ControlPage


def refused(rank, world_size, tell, url, refusing_rank):
    """Refuse each call of the system in turn on one rank, and then none; the outcomes, and the calls' names."""
    comm = made(url, rank, world_size)
    known, outcomes = places(comm), []
    threading.current_thread().name = f"rank {rank}"
    with pytest.MonkeyPatch.context() as patch:
        writes = ControlPage.set_state
        refusing = Refusing(patch, refusing_rank)
        patch.setattr(ControlPage, "set_state", writes)  # a store to memory
        refusing.nth = -1
        comm.replace([])
        before = leftovers()
        for nth in range(90):
            refusing.nth, refusing.calls = nth, 0
            kind, text, seconds = attempt(lambda: comm.replace([], timeout=20))
            refusing.nth = -1
            if kind != "nothing":
                comm.replace([])
            right(comm, nth)
            assert places(comm) == known
            outcomes.append((kind, comm.group, seconds))
        names = set(refusing.names)
    gc.collect()
    left = more_than(before, *OWN)
    comm.close()
    return outcomes, names, left


@pytest.mark.parametrize("rank", [0, 1])
def test_each_refusal_of_the_system_is_an_error_of_all_ranks(rank, url):
    (mine, names, left), (theirs, _, left_there) = sorted(
        ranks.run(2, refused, url, rank, timeout=400), key=lambda told: not told[1]
    )
    assert {"memfd_create", "posix_fallocate", "_map", "bind", "_send", "_receive", "mkdir"} <= names
    for one, other in zip(mine, theirs, strict=True):
        # A call that fails before the ranks agree may be over, and repeated, when the other rank's one begins.
        assert one[1] == other[1] and (one[0] != "nothing" or other[0] == "nothing"), (one, other)
        assert max(one[2], other[2]) < 2 * ranks.BUSY, (one, other)
    assert any(kind == "ResourceError" for kind, _, _ in mine) and mine[-1][0] == "nothing"
    assert left.keys() | left_there.keys() <= {"maps"}, (left, left_there)
