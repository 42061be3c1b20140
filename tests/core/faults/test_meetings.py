"""New processes of a group find the attempts of its ranks, one process a rank."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from torch.distributed import HashStore

from tricomm.errors import RendezvousError
from tricomm.store.bounded_store import BoundedStore
from tricomm.store.meetings import Meetings


def comers(store):
    """Two processes come for rank 2 during one attempt: in how many each of them was, and its error."""
    began, went_on = threading.Barrier(2, timeout=20), threading.Event()

    def come(_):
        met = []

        def meet(place, seconds, look):
            met.append(place)
            while not went_on.wait(0.01):
                look()
            return place

        began.wait()
        try:
            Meetings(store).come(2, meet, 2.0)
        except RendezvousError as error:
            return len(met), str(error)
        return len(met), ""

    with ThreadPoolExecutor(2) as threads:
        both = [threads.submit(come, n) for n in range(2)]
        went_on.wait(0.5)
        went_on.set()
        return sorted((each.result() for each in both), key=lambda result: result[1])


def test_of_two_processes_for_one_place_one_meets_the_others():
    store = HashStore()
    Meetings(store).call(bytes(16), [1, 2], True, 10)
    (first, said), (second, text) = comers(store)
    assert (first, said, second) == (1, "", 0)
    assert "did not call replace again after another process had come for rank 2" in text, text


def test_the_second_process_takes_the_place_in_the_next_attempt():
    store, met = HashStore(), threading.Event()
    attempts = Meetings(store)
    attempts.call(bytes(16), [1, 2], True, 10)
    Meetings(store).come(2, lambda *given: None, 10)
    with ThreadPoolExecutor(1) as threads:
        second = threads.submit(Meetings(store).come, 2, lambda *given: met.set(), 20)
        assert not met.wait(0.5)
        attempts.end()
        assert not met.wait(0.5)
        attempts.call(bytes([1] * 16), [2], True, 10)
        second.result(20)
    assert met.is_set()


def test_processes_for_different_places_meet_in_one_attempt():
    store = HashStore()
    Meetings(store).call(bytes(16), [1, 2], True, 10)
    assert [Meetings(store).come(rank, lambda *given: "met", 5) for rank in (1, 2)] == ["met"] * 2


def test_without_a_count_two_processes_for_one_place_meet_the_others(monkeypatch):
    monkeypatch.setattr(BoundedStore, "add", lambda *given: 1)
    store = HashStore()
    Meetings(store).call(bytes(16), [1, 2], True, 10)
    assert comers(store) == [(1, "")] * 2


@pytest.mark.parametrize("seconds", [0.05, 0.5])
def test_a_process_that_finds_no_attempt_says_so(seconds):
    with pytest.raises(RendezvousError, match="did not call replace$"):
        Meetings(HashStore()).come(2, lambda *given: None, seconds)


def test_a_process_for_a_rank_that_runs_waits_and_is_told():
    store = HashStore()
    attempts = Meetings(store)
    attempts.call(bytes(16), [2, 3], True, 10)
    with pytest.raises(RendezvousError, match=r"did not call replace for rank 1; they .* new rank\(s\) \[2, 3\]"):
        Meetings(store).come(1, lambda *given: "met", 0.3)
    with ThreadPoolExecutor(1) as threads:
        early = threads.submit(Meetings(store).come, 1, lambda *given: "met", 20)
        attempts.end()
        attempts.call(bytes([1] * 16), [1], True, 10)
        assert early.result(20) == "met"


def attempted(store, number):
    """One attempt after another, of which each leaves keys: how many keys there are after each."""
    counts = []
    for n in range(number):
        attempts = Meetings(store)
        place = attempts.call(bytes([n] * 16), [2], True, 10)
        Meetings(store).come(2, lambda place, *given: place.set("left/2", "how"), 10)
        place.set("left/0", "how")
        assert place.get("left/2") == b"how"
        attempts.end()
        counts.append(store.num_keys())
    return counts


def test_keys_of_earlier_attempts_are_deleted():
    store = HashStore()
    store.set("tricomm/handshake/left/0", "another's")
    assert attempted(store, 4) == [5] * 4 and store.get("tricomm/handshake/left/0") == b"another's"


def test_a_late_end_deletes_no_key_of_the_next_attempt():
    store = HashStore()
    late, following = Meetings(store), Meetings(store)
    late.call(bytes(16), [2], True, 10)
    place = following.call(bytes([1] * 16), [2], True, 10)
    place.set("rank/0", "here")
    late.end()
    assert place.get("rank/0") == b"here" and Meetings(store).come(2, lambda *given: "met", 5) == "met"


def test_without_deletion_each_attempt_leaves_keys(monkeypatch):
    monkeypatch.setattr(BoundedStore, "delete_all", lambda *given: None)
    counts = attempted(HashStore(), 4)
    assert counts == sorted(set(counts)), counts
