"""The exchange of capabilities in a c10d group: without the token, a process that writes to the store has no effect."""

from __future__ import annotations

import dataclasses
import hashlib
import re
import struct
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
from torch.distributed import HashStore, Store

from tricomm.c10d import capabilities
from tricomm.errors import GroupAborted, InvalidArgument, PeerDied, RendezvousError, TricommError
from tricomm.options import Options
from tricomm.store import process, records
from tricomm.store.departures import NOBODY, Departure, Ending
from tricomm.store.generation import Generation
from tricomm.store.records import StoreRecord
from tricomm.store.tcp import waits

KEY = "tricomm/capabilities/rank/1"
TOKEN = b"secret"


class Attacked(Store):
    """A store in which an attacker replaces the record of rank 1 by `forge(record)`."""

    def __init__(self, forge: Callable[[bytes], bytes]) -> None:
        super().__init__()
        self._store, self._forge = HashStore(), forge

    def set(self, key: str, value: bytes) -> None:
        value = bytes(value)
        self._store.set(key, self._forge(value) if key == KEY and value else value)

    def get(self, key: str) -> bytes:
        return self._store.get(key)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return self._store.multi_get(keys)

    def check(self, keys: list[str]) -> bool:
        return self._store.check(keys)


def outcomes(store, world_size: int = 3, timeout: float = 2.0):
    """Run `exchange_capabilities` on every rank; return each one's result or error."""

    def run(rank: int):
        try:
            return capabilities.exchange_capabilities(store, rank, world_size, timeout)
        except TricommError as error:
            return error

    with ThreadPoolExecutor(world_size) as pool:
        return list(pool.map(run, range(world_size)))


def without_checks(data: bytes) -> bytes:
    """Rank 1's record with TRICOMM_CHECK=0 and TRICOMM_CPU=kernels, sealed as one can without the token."""
    size = struct.calcsize("<8sHHIiiI16s")
    changed = bytearray(data[: -records.SEAL_BYTES])
    at = size + struct.calcsize("<QQQ16s")
    (switches,) = struct.unpack_from("<Q", changed, at)
    struct.pack_into("<Q", changed, at, switches & ~capabilities._CHECK | capabilities._CPU_KERNELS)
    return bytes(changed) + hashlib.sha256(changed).digest()


@pytest.fixture
def token(monkeypatch):
    monkeypatch.setenv("TRICOMM_TOKEN", TOKEN.decode())


def test_honest_ranks_agree_with_and_without_a_token(monkeypatch):
    for secret in ("", TOKEN.decode()):
        monkeypatch.setenv("TRICOMM_TOKEN", secret)
        store = HashStore()
        for _ in range(2):
            results = outcomes(store)
            assert results[0] == results[1] == results[2] and results[0].check and results[0].nodes == 1
            assert [member.node for member in results[0].members] == [process.node_id()] * 3


@pytest.mark.parametrize("value", ["0", "off", "False", "no"])
def test_the_comparison_of_calls_can_be_turned_off(value, monkeypatch):
    monkeypatch.setenv("TRICOMM_CHECK", value)
    assert [one.check for one in outcomes(HashStore())] == [False] * 3


@pytest.mark.parametrize("value", ["1", "on", ""])
def test_the_comparison_of_calls_is_on_otherwise(value, monkeypatch):
    monkeypatch.setenv("TRICOMM_CHECK", value)
    assert [one.check for one in outcomes(HashStore())] == [True] * 3


def test_an_invalid_setting_of_the_comparison_is_named(monkeypatch):
    monkeypatch.setenv("TRICOMM_CHECK", "never")
    assert all("TRICOMM_CHECK='never'" in str(error) for error in outcomes(HashStore()))


def test_a_rank_with_invalid_settings_is_named_at_once():
    store = HashStore()

    def run(rank: int):
        def settings() -> Options:
            if rank == 1:
                raise InvalidArgument("TRICOMM_BATCH_INVARIANT='x' is neither on nor off")
            return Options()

        try:
            return capabilities.exchange_capabilities(store, rank, 3, 30.0, settings)
        except TricommError as error:
            return error

    began = time.monotonic()
    with ThreadPoolExecutor(3) as pool:
        others = list(pool.map(run, range(3)))
    assert isinstance(others.pop(1), InvalidArgument) and time.monotonic() - began < 10
    for error in others:
        assert isinstance(error, RendezvousError) and "TRICOMM_BATCH_INVARIANT='x'" in str(error)


def test_a_forged_record_without_the_token_is_refused(token):
    results = outcomes(Attacked(without_checks))
    for rank in (0, 2):
        assert isinstance(results[rank], RendezvousError) and "rank 1's record: bad MAC" in str(results[rank])


def test_without_the_check_of_the_seal_a_forged_record_is_accepted(token, monkeypatch):
    """Takes the seal away: the other ranks lose their checks. They still notice that they read different records."""
    monkeypatch.setattr(records, "_check_seal", lambda *record: None)
    monkeypatch.setattr(Generation, "_unconfirmed", lambda one: [] if one._digest else one._others)
    results = outcomes(Attacked(without_checks))
    assert [one.check for one in results] == [False, True, False]


def test_a_forged_failure_is_ignored(monkeypatch):
    def forged() -> HashStore:
        store, nonce = HashStore(), b"f" * records.NONCE_BYTES
        left = Departure(Ending.TOLD_ALL, 1, 2, 1, nonce, (NOBODY, nonce), "PeerDied", "forged")
        store.set("tricomm/capabilities/left/1", left.seal(records.MessageHeader(1, 2, 1, "left"), None))
        store.set("tricomm/capabilities/leaving", nonce)
        return store

    with pytest.raises(PeerDied, match="aborted by rank 1 of 2 .*forged"):
        capabilities.exchange_capabilities(forged(), 0, 2, 5.0)
    monkeypatch.setenv("TRICOMM_TOKEN", TOKEN.decode())
    assert all(result.check for result in outcomes(forged(), 2))


def old_record(switches: int) -> bytes:
    """A record of rank 1 that the token's holders once wrote, for another group."""
    body = dataclasses.replace(capabilities._own_capabilities(Options()), switches=switches)
    return StoreRecord(1, 3, b"o" * 16, body).pack(TOKEN)


def test_an_old_record_of_another_group_is_refused(token):
    missing = r"rank\(s\) \[(0, )?1(, 2)?\] did not come"  # the other honest rank may have aborted first
    words = [missing, "says that it is rank 1, and so does this one", missing]
    for error, word in zip(outcomes(Attacked(lambda data: old_record(0))), words, strict=True):
        assert isinstance(error, RendezvousError) and re.search(word, str(error))


def test_without_the_confirmation_an_old_record_is_accepted(token, monkeypatch):
    monkeypatch.setattr(Generation, "_unconfirmed", lambda one: [] if one._digest else one._others)
    first, _, last = outcomes(Attacked(lambda data: old_record(0)))
    assert [first.check, last.check] == [False, False]


def test_a_forged_reason_to_abort_a_group_is_ignored(token, monkeypatch):
    """Ranks on the Gloo route write their reason to abort a group into the store."""
    store = HashStore()
    transports = [
        SimpleNamespace(store=store, rank=rank, world_size=3, others=[1, 2], generation="now") for rank in range(3)
    ]
    reasons = waits._PublishedReasons(transports[0])
    waits.publish_reason(transports[1], PeerDied("rank 7 has ended"))
    results = reasons.read()
    assert [(rank, type(error), str(error)) for rank, error in results.items()] == [(1, PeerDied, "rank 7 has ended")]
    old = SimpleNamespace(**{**vars(transports[1]), "generation": "before"})
    waits.publish_reason(old, PeerDied("rank 0 has ended"))  # with the token, for another group
    assert waits._PublishedReasons(transports[0]).read() == {}
    waits.publish_reason(transports[2], PeerDied("rank 7 has ended"))  # a forged value does not hide the real reason
    assert list(waits._PublishedReasons(transports[0]).read()) == [2]
    store.delete_key("2")
    monkeypatch.delenv("TRICOMM_TOKEN")
    waits.publish_reason(transports[1], GroupAborted("forged"))  # the writer has no token
    assert waits._PublishedReasons(transports[0]).read()  # nor has the reader, so it accepts the same bytes
    monkeypatch.setenv("TRICOMM_TOKEN", TOKEN.decode())
    assert waits._PublishedReasons(transports[0]).read() == {}
    monkeypatch.setattr(records, "_check_seal", lambda *record: None)
    assert waits._PublishedReasons(transports[0]).read()
