"""Hostile bytes in the store are refused with a named error."""

from __future__ import annotations

import dataclasses
import hashlib
import pickle
import random
import struct
from pathlib import Path

import pytest

from tricomm.errors import RendezvousError
from tricomm.store import records
from tricomm.store.records import Capabilities, Delivery, ExchangeMessage, MessageHeader, RankRecord, StoreRecord, parse

BOOT, NAME = bytes(range(16)), bytes(range(50, 58))
RANK = RankRecord(4242, 987654, 1 << 32, 7 << 32, BOOT, 1000, 20480, 0xFEDCBA9876543210, 1, NAME, "host.example")
RECORD = StoreRecord(1, 4, bytes(range(100, 116)), RANK)
CAPABILITIES = Capabilities(4242, 987654, 4026531836, bytes(range(16)), 0b1011, 1000)
BODIES = [RANK, ExchangeMessage(7, "split", b"[0, 2]"), CAPABILITIES, Delivery(3, "handshake")]
TOKENS = [None, b"secret"]


@pytest.mark.parametrize("token", TOKENS)
@pytest.mark.parametrize("body", BODIES, ids=lambda body: type(body).__name__)
def test_a_record_round_trips(body, token):
    record = dataclasses.replace(RECORD, body=body)
    assert parse(record.pack(token), type(body), 1, token) == record


def test_the_size_of_a_record_does_not_depend_on_its_values():
    long = dataclasses.replace(RECORD, body=Delivery(1, "ä" * 9999))
    short = dataclasses.replace(RECORD, body=Delivery(1, ""))
    assert len(long.pack(None)) == len(short.pack(b"token"))
    assert parse(long.pack(None), Delivery, None, None).body.what == "ä" * 32


def mutate(data: bytes, rng: random.Random) -> bytes:
    changed = bytearray(data)
    how = rng.randrange(6)
    if how == 0:
        changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    elif how == 1:
        for _ in range(rng.randrange(1, 20)):
            changed[rng.randrange(len(changed))] = rng.randrange(256)
    elif how == 2:
        del changed[rng.randrange(len(changed)) :]
    elif how == 3:
        changed += rng.randbytes(rng.randrange(1, 300))
    elif how == 4:
        at, size = rng.randrange(len(changed)), rng.choice([1, 2, 4, 8])
        value = rng.choice([0, 1, 2**31 - 1, 2**31, 2**63, 2**64 - 1]) % (1 << 8 * size)
        changed[at : at + size] = value.to_bytes(size, "little")
    else:
        cut = rng.randrange(len(changed))
        changed = changed[cut:] + changed[:cut]
    return bytes(changed)


def fuzz(mutations: int, token: bytes | None, seed: int, body: RankRecord | Capabilities = RANK) -> None:
    rng = random.Random(seed)
    valid = dataclasses.replace(RECORD, body=body).pack(token)
    refused = 0
    for _ in range(mutations):
        data = mutate(valid, rng)
        if data == valid:
            continue
        with pytest.raises(RendezvousError, match="rank 1's record: bad "):
            parse(data, type(body), 1, token)
        refused += 1
    assert refused > mutations * 0.9


@pytest.mark.parametrize("token", TOKENS)
@pytest.mark.parametrize("body", [RANK, CAPABILITIES], ids=["rank", "capabilities"])
def test_no_mutation_is_accepted(token, body):
    fuzz(10_000, token, seed=1, body=body)


@pytest.mark.soak
@pytest.mark.parametrize("token", TOKENS)
def test_no_mutation_is_accepted_soak(token):
    fuzz(100_000, token, seed=2)


@pytest.mark.parametrize("sealed,reading", [(None, b"secret"), (b"secret", None), (b"secret", b"Secret")])
def test_tokens_that_differ(sealed, reading):
    with pytest.raises(RendezvousError, match="rank 1's record: bad MAC.*TRICOMM_TOKEN"):
        parse(RECORD.pack(sealed), RankRecord, 1, reading)


def test_forged_without_the_token():
    data = bytearray(RECORD.pack(b"secret"))
    data[-32:] = hashlib.sha256(data[:-32]).digest()
    with pytest.raises(RendezvousError, match="bad MAC"):
        parse(bytes(data), RankRecord, 1, b"secret")


def test_a_valid_record_in_the_wrong_place():
    with pytest.raises(RendezvousError, match="rank 2's record: bad rank: it says that it is rank 1's"):
        parse(RECORD.pack(b"t"), RankRecord, 2, b"t")


def test_a_rank_record_is_no_delivery():
    with pytest.raises(RendezvousError, match="record: bad kind"):
        parse(RECORD.pack(None), Delivery, None, None)


def sealed(head: dict[str, int], **body: int) -> bytes:
    """A record with a valid seal and impossible values."""
    values = {"rank": 1, "world": 4, "version": 4, "length": 144} | head
    values_of_rank = dataclasses.asdict(RANK) | body
    payload = struct.pack("<QQQQ16sIQQI8s64s", *list(values_of_rank.values())[:-1], b"host")
    numbers = (values["version"], 1, values["length"], values["rank"], values["world"], 1)
    data = struct.pack("<8sHHIiiI16s", b"TRICOMM\0", *numbers, bytes(16)) + payload
    return data + hashlib.sha256(data).digest()


def test_the_forger_can_forge():
    assert parse(sealed({}), RankRecord, 1, None).body.socket == NAME


@pytest.mark.parametrize(
    "data,words",
    [
        (sealed({"world": 10**9}), "bad world size: rank 1 of 1000000000"),
        (sealed({"world": 0}), "bad world size"),
        (sealed({"world": -1}), "bad world size"),
        (sealed({"world": 1}), "bad world size: rank 1 of 1"),
        (sealed({"rank": -1}), "bad rank"),
        (sealed({"rank": 2**31 - 1}), "bad rank"),
        (sealed({"version": 1}), "bad version 1, expected 4"),
        (sealed({"length": 2**32 - 1}), "bad length"),
        (sealed({"length": 0}), "bad length"),
        (sealed({}, pid=0), "bad pid: 0"),
        (sealed({}, pid=2**63), f"bad pid: {2**63}"),
        (sealed({}, start_time=2**64 - 1), "bad start time"),
        (sealed({}, nbytes=2**63), f"bad segment size: {2**63}"),
        (sealed({}, nbytes=0), "bad segment size: 0"),
        (b"", "bad length: 0 bytes"),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n" * 9, "bad magic"),
    ],
    ids=range(16),
)
def test_boundary_values(data, words):
    with pytest.raises(RendezvousError, match=f"rank 1's record: {words}"):
        parse(data, RankRecord, 1, None)


@pytest.mark.parametrize(
    "body,words",
    [(dict(pid=0), "bad pid: 0"), (dict(pid=2**22 + 1), "bad pid"), (dict(start_time=2**64 - 1), "bad start time")],
)
def test_boundary_values_of_capabilities(body, words):
    record = dataclasses.replace(RECORD, body=dataclasses.replace(CAPABILITIES, **body))
    with pytest.raises(RendezvousError, match=f"rank 1's record: {words}"):
        parse(record.pack(None), Capabilities, 1, None)


HEADER = MessageHeader(1, 4, 7, "task")


@pytest.mark.parametrize("token", TOKENS)
@pytest.mark.parametrize("text", [b"", b"{}" * 5000])
def test_a_long_message(text, token):
    data = HEADER.seal(text, token)
    assert HEADER.open(data, token) == text
    for bad in (data + b"x", data[:-1], bytes([data[0] ^ 1]) + data[1:]):
        with pytest.raises(RendezvousError, match="rank 1's (message|record): bad"):
            HEADER.open(bad, token)
    if token is None:
        return
    with pytest.raises(RendezvousError, match="bad MAC"):
        HEADER.open(HEADER.seal(text, None), token)
    with pytest.raises(RendezvousError, match="it is 'task' 7, not 'task' 8"):
        dataclasses.replace(HEADER, step=8).open(data, token)


class Canary:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_a_pickle_is_treated_as_bytes(tmp_path):
    canary = tmp_path / "canary"
    data = pickle.dumps(Canary(canary)).ljust(len(RECORD.pack(None)), b"\0")
    with pytest.raises(RendezvousError, match="rank 0's record: bad magic"):
        parse(data, RankRecord, 0, None)
    assert not canary.exists()
    pickle.loads(data)
    assert canary.exists()  # it would without the check


def test_secrets_are_not_printed():
    assert RECORD.nonce.hex() not in repr(RECORD) and repr(RECORD.nonce) not in repr(RECORD)
    assert records.SEAL_BYTES == 32
