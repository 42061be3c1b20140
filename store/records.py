"""Fixed-size binary records that cross the Store or a socket, and the one function that validates them.

    magic 8 | version 2 | kind 2 | payload bytes 4 | rank 4 | world size 4 | seal kind 4 | nonce 16
    payload (a fixed size for each kind)
    seal 32: SHA-256 of all before it, or HMAC-SHA256 under TRICOMM_TOKEN

Other processes may write anything there, so nothing is used before `parse` has checked all of it.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from dataclasses import dataclass, replace
from typing import ClassVar, Generic, Protocol, Self, TypeVar

from tricomm.errors import RendezvousError

MAX_WORLD_SIZE = 1 << 16
NONCE_BYTES = 16
NAME_BYTES = 8
SEAL_BYTES = 32

_MAGIC = b"TRICOMM\x00"
_VERSION = 4
_HEADER = struct.Struct(f"<8sHHIiiI{NONCE_BYTES}s")
_MAX_PID = 1 << 22  # the kernel's own limit, PID_MAX_LIMIT
_MAX_START = 1 << 62
_MAX_SEGMENT = 1 << 30
_PLAIN, _KEYED = 1, 2


class Body(Protocol):
    """The payload of one kind of record."""

    KIND: ClassVar[int]
    LAYOUT: ClassVar[struct.Struct]

    def pack(self) -> bytes: ...

    @classmethod
    def unpack(cls, payload: bytes, whose: str) -> Self:
        """Raises `RendezvousError`, naming `whose` record it is, for values that are impossible."""


B = TypeVar("B", bound=Body)
B_co = TypeVar("B_co", bound=Body, covariant=True)


@dataclass(frozen=True)
class RankRecord:
    """One rank of a handshake: its process, its node, the size of its control segment, and the name of the
    socket at which it receives the others' descriptors. `pid` and `uid` are those in its namespaces."""

    KIND: ClassVar[int] = 1
    LAYOUT: ClassVar[struct.Struct] = struct.Struct(f"<QQQQ16sIQQI{NAME_BYTES}s64s")

    pid: int
    start_time: int
    pid_namespace: int
    user_namespace: int
    node: bytes
    uid: int
    nbytes: int
    layout_hash: int
    state: int
    socket: bytes
    hostname: str

    def pack(self) -> bytes:
        host = self.hostname.encode(errors="replace")[:64]
        process = (self.pid, self.start_time, self.pid_namespace, self.user_namespace, self.node, self.uid)
        return self.LAYOUT.pack(*process, self.nbytes, self.layout_hash, self.state, self.socket, host)

    @classmethod
    def unpack(cls, payload: bytes, whose: str) -> RankRecord:
        fields = cls.LAYOUT.unpack(payload)
        record = replace(cls(*fields), hostname=text_of(fields[-1]))
        _check_range(whose, "pid", record.pid, 1, _MAX_PID)
        _check_range(whose, "start time", record.start_time, 1, _MAX_START)
        _check_range(whose, "segment size", record.nbytes, 1, _MAX_SEGMENT)
        return record


@dataclass(frozen=True)
class ExchangeMessage:
    """A rank's message in step `step` of the exchanges, whose purpose is `what`; `payload` has at most 1025 bytes."""

    KIND: ClassVar[int] = 3
    LAYOUT: ClassVar[struct.Struct] = struct.Struct("<Q64sI1025s")

    step: int
    what: str
    payload: bytes

    def pack(self) -> bytes:
        return self.LAYOUT.pack(self.step, self.what.encode()[:64], len(self.payload), self.payload)

    @classmethod
    def unpack(cls, payload: bytes, whose: str) -> ExchangeMessage:
        step, what, length, text = cls.LAYOUT.unpack(payload)
        if length > len(text):
            raise RendezvousError(f"{whose}: bad length: it claims {length} of at most {len(text)} bytes")
        return cls(step, text_of(what), text[:length])

    def purpose(self) -> str:
        """`what`, cut to the length that a message holds."""
        return self.what.encode()[:64].decode(errors="ignore")


@dataclass(frozen=True)
class Capabilities:
    """A rank of a c10d group: its process and its node, the features that its environment allows (bits of `switches`),
    and the number of descriptors that it may still open."""

    KIND: ClassVar[int] = 4
    LAYOUT: ClassVar[struct.Struct] = struct.Struct("<QQQ16sQQ")

    pid: int
    start_time: int
    pid_namespace: int
    node: bytes
    switches: int
    descriptors: int

    def pack(self) -> bytes:
        process = (self.pid, self.start_time, self.pid_namespace, self.node)
        return self.LAYOUT.pack(*process, self.switches, self.descriptors)

    @classmethod
    def unpack(cls, payload: bytes, whose: str) -> Capabilities:
        pid, started, namespace, node, switches, descriptors = cls.LAYOUT.unpack(payload)
        _check_range(whose, "pid", pid, 1, _MAX_PID)
        _check_range(whose, "start time", started, 0, _MAX_START)
        return cls(pid, started, namespace, node, switches, descriptors)


@dataclass(frozen=True)
class Delivery:
    """Accompanies descriptors to rank `to`; `what` is their purpose."""

    KIND: ClassVar[int] = 5
    LAYOUT: ClassVar[struct.Struct] = struct.Struct("<i64s")

    to: int
    what: str

    def pack(self) -> bytes:
        return self.LAYOUT.pack(self.to, self.what.encode()[:64])

    @classmethod
    def unpack(cls, payload: bytes, whose: str) -> Delivery:
        to, what = cls.LAYOUT.unpack(payload)
        return cls(to, text_of(what))


@dataclass(frozen=True)
class StoreRecord(Generic[B_co]):
    """A body with its sender and the nonce of the sender or its group. Never printed, because the nonce is a secret."""

    rank: int
    world_size: int
    nonce: bytes
    body: B_co

    def pack(self, token: bytes | None) -> bytes:
        payload = self.body.pack()
        seal_kind = _PLAIN if token is None else _KEYED
        head = (_MAGIC, _VERSION, self.body.KIND, len(payload), self.rank, self.world_size, seal_kind)
        data = _HEADER.pack(*head, self.nonce) + payload
        return data + _seal(data, token)

    def __repr__(self) -> str:
        return f"StoreRecord(rank={self.rank}, world_size={self.world_size})"


def parse(data: bytes, kind: type[B], rank: int | None, token: bytes | None) -> StoreRecord[B]:
    """The record of `rank` (None: of any rank), with a body of class `kind`; pure.

    Raises `RendezvousError` that names the rank and what is wrong with its record. Never allocates, indexes or unpacks
    by a value of the record before its length and its seal are right.
    """
    whose = "record" if rank is None else f"rank {rank}'s record"
    _check_envelope(data, whose, kind)
    _, _, _, _, sender, world_size, seal_kind, nonce = _HEADER.unpack_from(data)
    _check_seal(data, whose, seal_kind, token)
    if rank is not None and sender != rank:
        raise RendezvousError(f"{whose}: bad rank: it says that it is rank {sender}'s")
    if rank is not None and not (1 <= world_size <= MAX_WORLD_SIZE and 0 <= sender < world_size):
        raise RendezvousError(f"{whose}: bad world size: rank {sender} of {world_size} is not possible")
    body = kind.unpack(data[_HEADER.size : -SEAL_BYTES], whose)
    return StoreRecord(sender, world_size, nonce, body)


@dataclass(frozen=True)
class MessageHeader:
    """Sender and purpose of a message of any length, which is written to the Store after a record with its digest."""

    rank: int
    world_size: int
    step: int
    what: str

    def seal(self, data: bytes, token: bytes | None) -> bytes:
        digest = ExchangeMessage(self.step, self.what, hashlib.sha256(data).digest())
        return StoreRecord(self.rank, self.world_size, bytes(NONCE_BYTES), digest).pack(token) + data

    def open(self, sealed: bytes, token: bytes | None) -> bytes:
        """The data in `sealed`. Pure; raises as `parse` does, and if it has another header than this one."""
        size = _HEADER.size + ExchangeMessage.LAYOUT.size + SEAL_BYTES
        record, data = parse(sealed[:size], ExchangeMessage, self.rank, token), sealed[size:]
        theirs, whose = record.body, f"rank {self.rank}'s message"
        if (record.world_size, theirs.step, theirs.what) != (self.world_size, self.step, self.what):
            raise RendezvousError(f"{whose}: it is {theirs.what!r} {theirs.step}, not {self.what!r} {self.step}")
        if not hmac.compare_digest(theirs.payload, hashlib.sha256(data).digest()):
            raise RendezvousError(f"{whose}: bad checksum: it was changed")
        return data


def _check_envelope(data: bytes, whose: str, kind: type[Body]) -> None:
    if not isinstance(data, bytes) or len(data) < _HEADER.size:
        size = len(data) if isinstance(data, bytes) else type(data).__name__
        raise RendezvousError(f"{whose}: bad length: {size} bytes are too few for a record")
    magic, version, theirs, length, *_ = _HEADER.unpack_from(data)
    if magic != _MAGIC:
        raise RendezvousError(f"{whose}: bad magic: these are not tricomm's bytes; does something else use this store?")
    if version != _VERSION:
        raise RendezvousError(f"{whose}: bad version {version}, expected {_VERSION}: install one tricomm everywhere")
    if theirs != kind.KIND:
        raise RendezvousError(f"{whose}: bad kind {theirs}, expected {kind.KIND}")
    want = _HEADER.size + kind.LAYOUT.size + SEAL_BYTES
    if length != kind.LAYOUT.size or len(data) != want:
        raise RendezvousError(f"{whose}: bad length: {len(data)} bytes that claim {length} of payload, expected {want}")


def _check_seal(data: bytes, whose: str, seal_kind: int, token: bytes | None) -> None:
    if seal_kind not in (_PLAIN, _KEYED):
        raise RendezvousError(f"{whose}: bad seal kind {seal_kind}")
    if (seal_kind == _KEYED) != (token is not None):
        has = "is sealed with a token, and this rank has none" if token is None else "is not sealed with a token"
        raise RendezvousError(f"{whose}: bad MAC: it {has}; set the same TRICOMM_TOKEN on every rank")
    if not hmac.compare_digest(data[-SEAL_BYTES:], _seal(data[:-SEAL_BYTES], token)):
        what = "checksum: it was changed" if token is None else "MAC: another TRICOMM_TOKEN, or it was changed"
        raise RendezvousError(f"{whose}: bad {what}")


def _seal(data: bytes, token: bytes | None) -> bytes:
    return hashlib.sha256(data).digest() if token is None else hmac.digest(token, data, "sha256")


def _check_range(whose: str, name: str, value: int, least: int, most: int) -> None:
    if not least <= value <= most:
        raise RendezvousError(f"{whose}: bad {name}: {value} is not in {least}..{most}")


def text_of(data: bytes) -> str:
    """Text of a zero-padded field, without characters that are cut, and with `?` for those that are not printable."""
    text = data.split(b"\0", 1)[0].decode(errors="ignore")
    return text if text.isprintable() else "".join(c if c.isprintable() else "?" for c in text)
