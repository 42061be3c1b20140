"""Ranks without shared memory, which exchange records through the store: limits, foreign records, tokens."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from torch.distributed import HashStore

from tricomm import errors
from tricomm.store import process
from tricomm.store.bounded_store import BoundedStore
from tricomm.store.control import RankState
from tricomm.store.records import ExchangeMessage, StoreRecord
from tricomm.store.store_control import _StoreSlots, open_store_control


def everywhere(world_size, body, store=None):
    """Run `body(rank, store)` on every rank; return each one's result or error."""
    store = store or HashStore()

    def run(rank):
        try:
            return body(rank, store)
        except errors.TricommError as error:
            return error

    with ThreadPoolExecutor(world_size) as pool:
        return list(pool.map(run, range(world_size)))


def test_exchanges_in_order_and_again_over_the_same_store():
    store = HashStore()

    def body(rank, store):
        control, nodes = open_store_control(store, rank, 3, 10.0, 5)
        said = [control.exchange(f"{step} {rank}".encode(), f"step {step}", 10.0) for step in range(3)]
        group = control.group
        control.close()
        return said, nodes, group, control.peers

    for _ in range(2):
        result = everywhere(3, body, store)
        want = [[f"{step} {rank}".encode() for rank in range(3)] for step in range(3)]
        assert all(said == want and len(set(nodes)) == 1 and peers == () for said, nodes, _, peers in result)
        assert len({group for _, _, group, _ in result}) == 1


def test_the_node_of_each_rank_is_known(monkeypatch):
    names = [b"a" * 16, b"b" * 16, b"a" * 16]
    given, mine = iter(names), threading.local()
    monkeypatch.setattr(
        process, "node_id", lambda: vars(mine).get("name") or vars(mine).setdefault("name", next(given))
    )
    for nodes in everywhere(3, lambda rank, store: open_store_control(store, rank, 3, 10.0, 5)[1]):
        assert sorted(nodes) == sorted(names)


def test_one_request_takes_the_messages_of_all_ranks(monkeypatch):
    """If all messages are in the store; messages that arrive one by one take a request each."""
    asked = []
    usual = BoundedStore._call

    def call(self, operation, key, action):
        asked.append(operation)
        return usual(self, operation, key, action)

    monkeypatch.setattr(BoundedStore, "_call", call)
    store = HashStore()
    slots = [_StoreSlots(BoundedStore(store), rank, 8, bytes(16)) for rank in range(8)]
    messages = [ExchangeMessage(1, "what", bytes([rank])) for rank in range(8)]
    for slot, message in zip(slots, messages, strict=True):
        slot.post(message)
    asked.clear()
    assert [message for _, message in slots[0].posted(range(8), 1)] == messages
    assert asked == ["check", "get"]


def test_other_options_are_named():
    for error in everywhere(2, lambda rank, store: open_store_control(store, rank, 2, 10.0, rank)):
        assert isinstance(error, errors.RendezvousError) and "has other options than rank" in str(error)


def test_forged_values_in_the_store_are_refused(monkeypatch):
    store = HashStore()
    store.set("tricomm/control/rank/1", b"nonsense")
    with pytest.raises(errors.RendezvousError, match="rank 1's record: bad length"):
        open_store_control(store, 0, 2, 5.0, 1)
    monkeypatch.setenv("TRICOMM_TOKEN", "secret")
    other = HashStore()
    with ThreadPoolExecutor(1) as pool:
        peer = pool.submit(open_store_control, other, 1, 2, 2.0, 1)
        while not other.check(["tricomm/control/rank/1"]):
            time.sleep(0.01)
        monkeypatch.setenv("TRICOMM_TOKEN", "another")
        with pytest.raises(errors.RendezvousError, match="bad MAC"):
            open_store_control(other, 0, 2, 5.0, 1)
        with pytest.raises(errors.RendezvousError, match="bad MAC"):
            peer.result()


def test_a_record_of_another_group_is_refused():
    """A record with another nonce than the group's belongs to another group."""

    def body(rank, store):
        control, _ = open_store_control(store, rank, 2, 10.0, 1)
        if rank:
            forged = StoreRecord(1, 2, b"x" * 16, ExchangeMessage(1, "split", b""))
            return store.set(f"tricomm/control/{control.nonce.hex()}/slot/1/1", forged.pack(None))
        return control.exchange(b"", "split", 10.0)

    outcomes = everywhere(2, body)
    assert isinstance(outcomes[0], errors.RendezvousError) and "in another group" in str(outcomes[0])


def test_nothing_is_known_of_the_others():
    def body(rank, store):
        control, _ = open_store_control(store, rank, 2, 10.0, 1)
        assert (
            control.alive(1 - rank)
            and control.page(1 - rank).state is RankState.READY
            and control.page(1 - rank).fault() is None
        )
        assert control.page(1 - rank).last() is None and control.page(1 - rank).called(1) is None
        control.close()

    assert everywhere(2, body) == [None, None]
