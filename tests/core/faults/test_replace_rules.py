"""The rules of replace, each of which is also taken away: addresses stay, and a new rank waits for the others' mark."""

from __future__ import annotations

import gc
import os
import random
import signal
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import TCPStore

import tricomm
from tests import ranks
from tests.core.bodies.common_bodies import OWN, SMALL, attempt, leftovers, more_than, right
from tests.core.bodies.replace_bodies import joined, places, use
from tests.core.faults.test_shrink import made, until_fault
from tests.store.store_ranks import free_port
from tricomm.core.recovery import Newcomer, Survivor
from tricomm.errors import CollectiveTimeout, InvalidArgument, ResourceError
from tricomm.store.control import ControlPage
from tricomm.store.shrink import Shrink


@pytest.mark.parametrize("without", ["", "the words' place", "the lender", "both, and the refusal"])
@ranks.each(2)
def test_without_its_rules_replace_moves_what_graphs_use(rank, world_size, tell, url, without):
    comm = made(url, rank, world_size)
    known = places(comm)
    if without in ("the words' place", "both, and the refusal"):
        ControlPage.take_place = lambda self, before: None
    if without in ("the lender", "both, and the refusal"):
        Survivor.lender = property(lambda self: None, lambda self, arena: None)
    if without.endswith("the refusal"):
        Survivor._refusal = lambda self, group: None
    kind, text, _ = attempt(lambda: comm.replace([]))
    if without == "the lender":
        assert kind == "ResourceError" and "cannot be where it was (bases)" in text, (kind, text)
    else:
        assert kind == "nothing", text
        right(comm)
        assert (places(comm) == known) is (without == ""), (places(comm), known)
    comm.close()


@pytest.mark.parametrize("waits", [True, False])
@ranks.each(3)
def test_without_waiting_a_new_rank_has_a_group_that_the_others_do_not_have(rank, world_size, tell, url, waits):
    comm = made(url, rank, world_size)
    if rank == 2:
        comm.close()
        if not waits:
            Newcomer.decide = lambda self: None
        got = []
        kind, text, _ = attempt(lambda: got.append(joined(url, 2, 3)))
        assert kind == ("PeerDied" if waits else "nothing") and len(got) == 1 - waits, (kind, text)
        assert not waits or "the other ranks have given up" in text and "the time is up" in text, text
        [made_alone.close() for made_alone in got]
        return
    until_fault(comm)

    def late(self):
        raise CollectiveTimeout("the time is up")

    Shrink.decide = late
    kind, text, _ = attempt(lambda: comm.replace(2))
    assert kind == "CollectiveTimeout" and "the time is up" in text, (kind, text)
    comm.close()


def test_a_device_on_which_captured_graphs_cannot_run_is_refused():
    def group(**changes: Any) -> Any:
        arena = {"bases": (1 << 20, 2 << 20), "multicast": 0, "control_address": 4096}
        arena |= {name: changes.pop(name) for name in list(changes) if name in arena}
        facts = {"device_class": "sm_90", "topology": None, "no_dependent_launch": "", "max_blocks": 64}
        return SimpleNamespace(arena=SimpleNamespace(**arena), **{**facts, **changes})

    def refusal(before: dict[str, Any], after: dict[str, Any]) -> Any:
        survivor = Survivor.__new__(Survivor)
        survivor._old = group(**before)
        return survivor._refusal(group(**after))

    assert refusal({}, {}) is None and refusal({"max_blocks": 8}, {}) is None
    assert refusal({}, {"multicast": 1 << 30}) is None, "graphs of the old group do not use it"
    for name, value in (("bases", (1 << 20, 3 << 20)), ("control_address", 8192)):
        error = refusal({}, {name: value})
        assert isinstance(error, ResourceError) and name in str(error)
    assert isinstance(refusal({"multicast": 1 << 30}, {}), ResourceError)
    links = SimpleNamespace(canonical="NVLink 4")
    for changed in ({"device_class": "cuda"}, {"max_blocks": 32}, {"topology": links}, {"no_dependent_launch": "old"}):
        error = refusal({}, changed)
        assert isinstance(error, InvalidArgument) and "take the device of the lost rank" in str(error), changed


def over_another_store(rank, world_size, tell, url, first, second):
    comm = tricomm.init(f"tcp://127.0.0.1:{first}", rank, world_size, "cpu", options=tricomm.Options(**SMALL))
    ranks.together(url, rank, range(world_size))
    tell(os.getpid())
    until_fault(comm)
    refused = attempt(lambda: comm.replace(0))
    ranks.together(url, 10 + rank, [11, 12])
    comm.replace(0, store=TCPStore("127.0.0.1", second, is_master=rank == 1, wait_for_workers=False))
    use(comm, 4)
    comm.replace([])  # over the new one
    use(comm, 4)
    ranks.together(url, 20 + rank, [20, 21, 22])
    comm.close()
    return refused


def new_over_it(rank, world_size, tell, url, second):
    store = TCPStore("127.0.0.1", second, is_master=False, wait_for_workers=False)
    comm = tricomm.join(store, 0, 3, "cpu", options=tricomm.Options(**SMALL))
    use(comm, 4)
    comm.replace([])
    use(comm, 4)
    ranks.together(url, 20, [20, 21, 22])
    comm.close()


def test_a_store_that_ended_with_its_host_is_named_and_another_one_serves(url):
    first, second = free_port(), free_port()
    with ranks.start(3, over_another_store, url, first, second) as started:
        os.kill(started.messages()[0], signal.SIGKILL)
        with ranks.start(1, new_over_it, url, second) as new:
            outcomes = started.results([1, 2])
            assert new.results()[0].error is None
    for rank in (1, 2):
        kind, text, seconds = outcomes[rank].value
        assert kind == "RendezvousError" and "hosted the store has ended: pass one that is alive" in text, (kind, text)
        assert seconds < 1 + ranks.BUSY


@ranks.each(2)
def test_another_thread_closes_the_communicator_during_replace(rank, world_size, tell, url):
    before = leftovers()
    comm = made(url, rank, world_size)
    delay = random.Random(str(rank)).uniform(0, 0.03)
    for moment in (0.2, delay, delay, delay):  # while it waits for the other rank, and later
        if rank == 0:
            closer = threading.Timer(moment, comm.close)
            closer.start()
            kind, text, seconds = attempt(lambda comm=comm: comm.replace([], timeout=20))
            closer.join()
            del closer
        else:
            time.sleep(0.4 if moment == 0.2 else 0)
            kind, text, seconds = attempt(lambda comm=comm: comm.replace([], timeout=20))
        assert kind in ("nothing", "GroupAborted", "RendezvousError", "PeerDied"), (kind, text)
        assert seconds < 2 + ranks.BUSY
        assert attempt(lambda comm=comm: right(comm))[0] in ("GroupAborted", "PeerDied")
        comm.close()
        comm = tricomm.init(url, rank, world_size, "cpu", options=tricomm.Options(**SMALL))
        right(comm)
    comm.close()
    del comm
    gc.collect()
    assert more_than(before, *OWN) == {}


@ranks.each(3)
def test_a_new_rank_with_a_number_that_runs_disturbs_nobody_and_is_told(rank, world_size, tell, url):
    comm = made(url, rank, world_size)
    if rank == 2:
        comm.close()
        kind, text, _ = attempt(lambda: joined(url, 1, 3, 2 * ranks.BUSY))
        assert kind == "RendezvousError" and "did not call replace for rank 1; they" in text and "rank(s) [2]" in text
        ranks.together(url, 12, range(10, 13))
        comm = joined(url, 2, 3)
    else:
        until_fault(comm)
        kind, text, _ = attempt(lambda: comm.replace(2, timeout=3 * ranks.BUSY))
        assert kind == "RendezvousError" and "rank(s) [2] did not come" in text, (kind, text)
        ranks.together(url, 10 + rank, range(10, 13))
        comm.replace(2)
    use(comm, 4)
    comm.close()


@ranks.each(3)
def test_recoveries_leave_no_more_keys_in_the_store(rank, world_size, tell, url):
    comm = made(url, rank, world_size)
    counts = []
    for turn in range(6):
        if turn % 2 == 0:
            comm.replace([])
        elif rank == 2:
            comm.close()
            comm = joined(url, 2, 3)
        else:
            until_fault(comm)
            comm.replace()
        use(comm, 2)
        comm.barrier()
        if turn == 2:
            comm = comm.shrink([])
        counts.append(comm._store.num_keys())
        ranks.together(url, 10 * turn + 10 + rank, range(10 * turn + 10, 10 * turn + 13))
    comm.close()
    assert counts[-1] <= counts[1], counts
