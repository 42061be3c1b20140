"""Fixed-size binary records that cross the Store, and the one function that decides whether to believe them.

    magic 8 | version 2 | kind 2 | payload bytes 4 | generation 8 | rank 4 | world size 4 | seal kind 4 | nonce 16
    payload (a fixed size for each kind)
    seal 32: SHA-256 of all before it, or HMAC-SHA256 under TRICOMM_TOKEN

Whoever can write to the Store can write anything: nothing is used before `parse` has looked at all of it.
"""

from __future__ import annotations

import enum
import hashlib
import hmac
import struct
from collections.abc import Callable
from dataclasses import dataclass, replace

from tricomm.errors import RendezvousError

MAX_WORLD_SIZE = 1 << 16
MAX_GENERATION = 1 << 62
NONCE_BYTES = 16
SEAL_BYTES = 32

_MAGIC = b"TRICOMM\x00"
_VERSION = 1
_HEADER = struct.Struct(f"<8sHHIQiiI{NONCE_BYTES}s")
_HELLO = struct.Struct("<QQQ16sIIQQI64s")
_FAILURE = struct.Struct("<Q32s512s")
_SAID = struct.Struct("<Q64sI1024s")
_CAPABILITIES = struct.Struct("<QQQ16sQQ")
_MAX_PID = 1 << 22  # the kernel's own limit, PID_MAX_LIMIT
_MAX_START = 1 << 62
_MAX_FD = 1 << 30
_MAX_SEGMENT = 1 << 30
_PLAIN, _KEYED = 1, 2


class Kind(enum.IntEnum):
    """What a record says."""

    HELLO = 1
    FAILURE = 2
    SAID = 3
    CAPABILITIES = 4


_PAYLOADS = {Kind.HELLO: _HELLO, Kind.FAILURE: _FAILURE, Kind.SAID: _SAID, Kind.CAPABILITIES: _CAPABILITIES}


@dataclass(frozen=True)
class Hello:
    """A rank introduces itself: its process, its host, and the segment in which it will speak from now on."""

    pid: int
    start_time: int
    pid_namespace: int
    boot_id: bytes
    uid: int
    fd: int
    nbytes: int
    layout_hash: int
    state: int
    hostname: str

    def pack(self) -> bytes:
        host = self.hostname.encode(errors="replace")[:64]
        where = (self.pid, self.start_time, self.pid_namespace, self.boot_id, self.uid, self.fd, self.nbytes)
        return _HELLO.pack(*where, self.layout_hash, self.state, host)


@dataclass(frozen=True)
class Failure:
    """A rank gives the meeting up: `kind` is the name of an error class, `text` says why."""

    pid: int
    kind: str
    text: str

    def pack(self) -> bytes:
        return _FAILURE.pack(self.pid, self.kind.encode()[:32], self.text.encode(errors="replace")[:512])


@dataclass(frozen=True)
class Said:
    """What a rank that shares no memory says in step `step` of the exchanges; `payload` has at most 1024 bytes."""

    step: int
    what: str
    payload: bytes

    def pack(self) -> bytes:
        return _SAID.pack(self.step, self.what.encode()[:64], len(self.payload), self.payload)


@dataclass(frozen=True)
class Capabilities:
    """A rank of a c10d group: its process and its node, what its environment allows (bits of `switches`), and how many
    more descriptors it may open."""

    pid: int
    start_time: int
    pid_namespace: int
    node: bytes
    switches: int
    descriptors: int

    def pack(self) -> bytes:
        where = (self.pid, self.start_time, self.pid_namespace, self.node)
        return _CAPABILITIES.pack(*where, self.switches, self.descriptors)


Body = Hello | Failure | Said | Capabilities


@dataclass(frozen=True)
class Record:
    """One record: who says it, in which group and generation, and what. Never printed: the nonce is a secret."""

    rank: int
    world_size: int
    generation: int
    nonce: bytes
    body: Body

    def pack(self, token: bytes | None) -> bytes:
        kind = kind_of(self.body)
        payload = self.body.pack()
        seal_kind = _PLAIN if token is None else _KEYED
        head = (_MAGIC, _VERSION, kind, len(payload), self.generation, self.rank, self.world_size, seal_kind)
        data = _HEADER.pack(*head, self.nonce) + payload
        return data + _seal(data, token)

    def __repr__(self) -> str:
        return f"Record(rank={self.rank}, world_size={self.world_size}, generation={self.generation})"


_KINDS: dict[type[Body], Kind] = {
    Hello: Kind.HELLO, Failure: Kind.FAILURE, Said: Kind.SAID, Capabilities: Kind.CAPABILITIES,
}  # fmt: skip


def kind_of(body: Body) -> Kind:
    """The kind of record that carries `body`."""
    return _KINDS[type(body)]


def said_of(record: Record) -> Said:
    """What a record parsed as SAID carries."""
    assert isinstance(record.body, Said), "parse gives the kind that it was asked for"
    return record.body


def parse(data: bytes, kind: Kind, generation: int, rank: int | None, token: bytes | None) -> Record:
    """The record of `rank` (None: of any rank) in `generation`; pure.

    Raises `RendezvousError` that names whose record is wrong and in which respect. Never allocates, indexes or
    unpacks by a value of the record before its length and its seal are right.
    """
    whose = "failure record" if rank is None else f"rank {rank}'s record"
    layout = _PAYLOADS[kind]
    _check_envelope(data, whose, kind, layout.size)
    _, _, _, _, found_generation, sender, world_size, seal_kind, nonce = _HEADER.unpack_from(data)
    _check_seal(data, whose, seal_kind, token)
    if found_generation != generation:
        raise RendezvousError(f"{whose}: bad generation: it is of meeting {found_generation}, not of {generation}")
    if rank is not None and sender != rank:
        raise RendezvousError(f"{whose}: bad rank: it says that it is rank {sender}'s")
    payload = data[_HEADER.size : _HEADER.size + layout.size]
    if kind is Kind.FAILURE:
        return Record(sender, world_size, generation, nonce, _failure(payload))
    if not 1 <= world_size <= MAX_WORLD_SIZE or not 0 <= sender < world_size:
        raise RendezvousError(f"{whose}: bad world size: rank {sender} of {world_size} is not possible")
    return Record(sender, world_size, generation, nonce, _READERS[kind](payload, whose))


def pack_long(record: Record, data: bytes, token: bytes | None) -> bytes:
    """A message of any length: `record`, which is a `Said` without a payload, with the digest of `data`, and `data`."""
    digest = hashlib.sha256(data).digest()
    return replace(record, body=replace(said_of(record), payload=digest)).pack(token) + data


def parse_long(data: bytes, expected: Record, token: bytes | None) -> bytes:
    """The message in what `pack_long` made of a record like `expected`; pure, and raises as `parse` does."""
    size = _HEADER.size + _SAID.size + SEAL_BYTES
    whose = f"rank {expected.rank}'s message"
    found = parse(data[:size], Kind.SAID, expected.generation, expected.rank, token)
    said, wanted = said_of(found), said_of(expected)
    if (found.world_size, said.step, said.what) != (expected.world_size, wanted.step, wanted.what):
        raise RendezvousError(f"{whose}: it is {said.what!r} {said.step}, not {wanted.what!r} {wanted.step}")
    if not hmac.compare_digest(said.payload, hashlib.sha256(data[size:]).digest()):
        raise RendezvousError(f"{whose}: bad checksum: it was changed")
    return data[size:]


def _check_envelope(data: bytes, whose: str, kind: Kind, payload_bytes: int) -> None:
    if not isinstance(data, bytes) or len(data) < _HEADER.size:
        size = len(data) if isinstance(data, bytes) else type(data).__name__
        raise RendezvousError(f"{whose}: bad length: {size} bytes are too few for a record")
    magic, version, found_kind, length, *_ = _HEADER.unpack_from(data)
    if magic != _MAGIC:
        raise RendezvousError(f"{whose}: bad magic: these are not tricomm's bytes; does something else use this store?")
    if version != _VERSION:
        raise RendezvousError(f"{whose}: bad version {version}, expected {_VERSION}: install one tricomm everywhere")
    if found_kind != kind:
        raise RendezvousError(f"{whose}: bad kind {found_kind}, expected {kind.value}")
    want = _HEADER.size + payload_bytes + SEAL_BYTES
    if length != payload_bytes or len(data) != want:
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


def _hello(payload: bytes, whose: str) -> Hello:
    pid, started, namespace, boot, uid, fd, nbytes, layout_hash, state, host = _HELLO.unpack(payload)
    _check_range(whose, "pid", pid, 1, _MAX_PID)
    _check_range(whose, "start time", started, 1, _MAX_START)
    _check_range(whose, "descriptor", fd, 0, _MAX_FD)
    _check_range(whose, "segment size", nbytes, 1, _MAX_SEGMENT)
    return Hello(pid, started, namespace, boot, uid, fd, nbytes, layout_hash, state, _text(host))


def _failure(payload: bytes) -> Failure:
    pid, kind, text = _FAILURE.unpack(payload)
    return Failure(pid, _text(kind), _text(text))


def _said(payload: bytes, whose: str) -> Said:
    step, what, length, text = _SAID.unpack(payload)
    if length > len(text):
        raise RendezvousError(f"{whose}: bad length: it claims {length} of at most {len(text)} bytes")
    return Said(step, _text(what), text[:length])


def _capabilities(payload: bytes, whose: str) -> Capabilities:
    pid, started, namespace, node, switches, descriptors = _CAPABILITIES.unpack(payload)
    _check_range(whose, "pid", pid, 1, _MAX_PID)
    _check_range(whose, "start time", started, 0, _MAX_START)
    return Capabilities(pid, started, namespace, node, switches, descriptors)


_READERS: dict[Kind, Callable[[bytes, str], Body]] = {
    Kind.HELLO: _hello, Kind.SAID: _said, Kind.CAPABILITIES: _capabilities,
}  # fmt: skip


def _check_range(whose: str, name: str, value: int, least: int, most: int) -> None:
    if not least <= value <= most:
        raise RendezvousError(f"{whose}: bad {name}: {value} is not in {least}..{most}")


def _text(data: bytes) -> str:
    """Text of a zero-padded field; what is cut or not printable does no harm."""
    text = data.split(b"\0", 1)[0].decode(errors="ignore")
    return "".join(c if c.isprintable() else "?" for c in text)
