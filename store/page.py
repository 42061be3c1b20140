"""One rank's page of the control segment: its layout, and the reason why a reader never sees half a record.

    page 0   identity (written once, before any rank attaches); state, heartbeat (one word each); fault; this rank's
             part in a shrink: a word and a record (`tricomm.store.shrink`)
    page 1   512 words shared between this rank and its kernels; peers read them
    page 2   one word for each of the last 8 calls (sequence number, number of its descriptor), and then the last call's
             word again
    page 3   exchange slot of even steps;  page 4: of odd steps
    page 5   ring of the last 8 descriptors of messages, by the message's number
    page 6+  descriptors of calls, by their number: all calls of a plan share one, so that a call writes two words

One rank writes, the others map it read-only. Words are aligned and 8 bytes wide, so one store or load never tears.
Longer data are records with a length, a CRC-32 and the number for which they were written, so a reader needs no memory
ordering: it copies again until its copy is whole and has the number that it wants.
"""

from __future__ import annotations

import enum
import struct
import time
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import astuple, dataclass, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from tricomm.errors import ResourceError
from tricomm.store.records import ExchangeMessage

PAGE_BYTES = 4096
NBYTES = 10 * PAGE_BYTES
MESSAGE_BYTES = 1024  # preceded by a byte that says whether the message is an error
SHRINK_BYTES = 1500
RING = 8
WORDS = 512

_MAGIC = b"TRICTRL\x05"
_IDENTITY = struct.Struct("<8sii16sQQ")
_FAULT = struct.Struct("<32siq")
_DESCRIPTOR = struct.Struct("<Q24s72s16s32s16sqqq16sq")  # the number is last, because the rest is the same in all calls
_NUMBERED = struct.Struct(f"<II{_DESCRIPTOR.size - 8}sq")  # a frame and a descriptor
_MESSAGE = struct.Struct("<Q64s")
_FRAME = struct.Struct("<II")  # length, CRC
_NUMBER = struct.Struct("<q")
_STATE, _HEARTBEAT, _FAULTED, _STEP = 16, 17, 18, 19  # word numbers in page 0
_FAULT_AT, _FAULT_TEXT = 256, 2048
_SHRINK_AT = 2560
_DEVICE_AT, _RING_AT, _SLOTS_AT, _MESSAGES_AT, _PLACES_AT = (n * PAGE_BYTES for n in (1, 2, 3, 5, 6))
_RING = _RING_AT // 8  # word number
_ENTRY = PAGE_BYTES // RING
_PLACE = 256
_PLACES = (NBYTES - _PLACES_AT) // _PLACE  # a power of two, so that a number's lower bits tell its place
# A call's word: its sequence number, and below it the lower bits of the number of its descriptor.
_BITS = 20
_LOWER = (1 << _BITS) - 1
_TRIES = 1000


class RankState(enum.IntEnum):
    """The state of a rank."""

    CONNECTING = 1
    READY = 2
    CLOSED = 3
    ABORTED = 4


@dataclass(frozen=True, slots=True, eq=False)
class PackedDescriptor:
    """The bytes of a descriptor without its sequence number, and their checksum."""

    text: bytes
    crc: int

    def unpacked(self) -> Descriptor:
        """The descriptor, with 0 as its sequence number."""
        return _descriptor(self.text + bytes(8))


@dataclass(frozen=True)
class Descriptor:
    """One call of a collective, as its rank made it."""

    sequence: int
    fingerprint: int
    collective: str
    op: str
    dtype: str
    algorithm: str
    protocol: str
    count: int
    root: int
    grid: int
    mode: str

    def packed(self) -> PackedDescriptor:
        """Its bytes in a page, without the sequence number, which are the same for every call of a plan."""
        sequence, *rest = astuple(self)
        fields = [field.encode() if isinstance(field, str) else field for field in rest]
        text = _DESCRIPTOR.pack(*fields, sequence)[:-8]
        return PackedDescriptor(text, zlib.crc32(struct.pack("<I", _DESCRIPTOR.size) + text))

    def text(self) -> str:
        """The call in words. A message has its peer as root and its tag as operation."""
        if self.collective in ("send", "recv"):
            peer = f"rank {self.root}" if self.root >= 0 else "any rank"
            way = f"to {peer}" if self.collective == "send" else f"from {peer}"
            return f"{self.collective} {way} ({self.op}, dtype={self.dtype}, count={self.count}) [{self.protocol}]"
        root = f", root={self.root}" if self.root >= 0 else ""
        how = f"{self.algorithm}/{self.protocol}, grid {self.grid}, {self.mode}"
        what = f"{self.collective}(op={self.op}, dtype={self.dtype}, count={self.count}{root})"
        return f"{what} [{how}] at sequence {self.sequence}"


@dataclass(frozen=True)
class Fault:
    """Why a rank aborted the group: `kind` is the name of an error class, `culprit` the rank at fault."""

    kind: str
    culprit: int
    sequence: int
    text: str


class Page:
    """Reads one control segment of `NBYTES` bytes that is mapped at `address`; a rank also writes its own."""

    def __init__(self, buffer: memoryview, address: int) -> None:
        self.device_address = address + _DEVICE_AT
        self._buffer = buffer
        self._words = buffer.cast("q")
        self._places: _Places | None = None

    def identify(self, rank: int, world_size: int, nonce: bytes, pid: int, start_time: int) -> None:
        self._buffer[: _IDENTITY.size] = _IDENTITY.pack(_MAGIC, rank, world_size, nonce, pid, start_time)

    def check(self, rank: int, world_size: int, nonce: bytes, pid: int, start_time: int) -> None:
        """Raises `ResourceError` if the page is not the one that `rank` announced."""
        want = _IDENTITY.pack(_MAGIC, rank, world_size, nonce, pid, start_time)
        if bytes(self._buffer[: _IDENTITY.size]) != want:
            raise ResourceError(f"the segment behind rank {rank}'s record (pid {pid}) is not its control page")

    @property
    def state(self) -> RankState:
        return RankState(self._words[_STATE])

    @state.setter
    def state(self, state: RankState) -> None:
        self._words[_STATE] = state

    @property
    def heartbeat(self) -> int:
        """CLOCK_MONOTONIC of the last beat, in nanoseconds, 0 before it; the same clock for all processes of a
        machine."""
        return self._words[_HEARTBEAT]

    def beat(self) -> None:
        self._words[_HEARTBEAT] = time.monotonic_ns()

    def sequence(self) -> int:
        """Number of the latest call; 0 before the first."""
        return self._words[_RING + RING] >> _BITS

    def device_words(self) -> NDArray[np.int64]:
        return np.frombuffer(self._buffer, np.int64, WORDS, _DEVICE_AT)

    def announcer(self) -> Callable[[int, PackedDescriptor], None]:
        """A function announce(sequence, packed), which publishes call number `sequence` with its `Descriptor.packed`.
        For one thread at a time. It is optimised, because every collective calls it."""
        words, ring, latest = self._words, _RING, _RING + RING
        self._places = places = self._places or _Places(self._buffer)
        numbers, place = places.numbers, places.place

        def announce(sequence: int, packed: PackedDescriptor) -> None:
            try:
                number = numbers[packed]
            except KeyError:
                number = place(sequence, packed)
            words[ring + sequence % RING] = word = sequence << _BITS | number
            words[latest] = word

        return announce

    def announce_message(self, message: Descriptor) -> None:
        """Publish the rank's message number `message.sequence`, sent or received; the last 8 stay readable."""
        _write(self._buffer, _MESSAGES_AT + message.sequence % RING * _ENTRY, message.sequence, message.packed())

    def messages(self) -> list[Descriptor]:
        """The rank's last messages, in order."""
        messages = [self._descriptor(_MESSAGES_AT + n * _ENTRY) for n in range(RING)]
        return sorted((m for m in messages if m is not None), key=lambda m: m.sequence)

    def called(self, sequence: int) -> Descriptor | None:
        """Call number `sequence`; None if there was none, or if it is no longer among the last calls."""
        word = self._words[_RING + sequence % RING]
        number = word & _LOWER
        call = self._descriptor(_PLACES_AT + number % _PLACES * _PLACE) if word >> _BITS == sequence else None
        # With another number its place has been reused, so the call is no longer among the last ones.
        return replace(call, sequence=sequence) if call is not None and call.sequence == number else None

    def _descriptor(self, at: int) -> Descriptor | None:
        data = self._take(at, _DESCRIPTOR.size)
        if data is None or len(data) != _DESCRIPTOR.size:
            return None
        return _descriptor(data)

    def last(self) -> Descriptor | None:
        """The latest call; None if there was none."""
        for _ in range(_TRIES):  # its rank may make further calls, and overwrite the descriptor that is read
            sequence = self.sequence()
            call = self.called(sequence)
            if call is not None or sequence == self.sequence():
                return call
        return None

    def put_fault(self, fault: Fault) -> bool:
        """Publish a fault; False if there is one already, which is not replaced."""
        if self._words[_FAULTED]:
            return False
        head = _FAULT.pack(fault.kind.encode()[:32], fault.culprit, fault.sequence)
        self._put(_FAULT_AT, head + fault.text.encode(errors="replace")[:_FAULT_TEXT])
        self._words[_FAULTED] = 1
        return True

    def fault(self) -> Fault | None:
        if not self._words[_FAULTED]:
            return None
        data = self._take(_FAULT_AT, _FAULT.size + _FAULT_TEXT)
        if data is None or len(data) < _FAULT.size:
            return None
        kind, culprit, sequence = _FAULT.unpack_from(data)
        return Fault(_text(kind), culprit, sequence, data[_FAULT.size :].decode(errors="ignore"))

    @property
    def step(self) -> int:
        """The number of this rank's call of shrink and its phase; 0 before the first call."""
        return self._words[_STEP]

    @step.setter
    def step(self, step: int) -> None:
        self._words[_STEP] = step

    def put_shrink(self, record: bytes) -> None:
        """Publish the record of this rank's call of shrink, at most `SHRINK_BYTES`."""
        self._put(_SHRINK_AT, record)

    def shrink(self) -> bytes | None:
        """The record of `put_shrink`; None if there is none, or if it is being written."""
        return self._take(_SHRINK_AT, SHRINK_BYTES, tries=1)

    def post(self, message: ExchangeMessage) -> None:
        head = _MESSAGE.pack(message.step, message.what.encode()[:64])
        self._put(_slot_at(message.step), head + message.payload)

    def posted(self, step: int) -> ExchangeMessage | None:
        """The message in the slot of `step`, of that step or a newer one; None if there is none yet."""
        if self._words[(_slot_at(step) + _FRAME.size) // 8] < step:  # an older message, or one half written
            return None
        data = self._take(_slot_at(step), _MESSAGE.size + 1 + MESSAGE_BYTES, tries=1)
        if data is None or len(data) < _MESSAGE.size:
            return None
        number, what = _MESSAGE.unpack_from(data)
        return ExchangeMessage(number, _text(what), data[_MESSAGE.size :])

    def _put(self, at: int, payload: bytes) -> None:
        length = struct.pack("<I", len(payload))
        frame = _FRAME.pack(len(payload), zlib.crc32(length + payload))
        self._buffer[at : at + _FRAME.size + len(payload)] = frame + payload

    def _take(self, at: int, most: int, tries: int = _TRIES) -> bytes | None:
        """The whole record at `at`; None if there is none, or if it changed during every try."""
        for _ in range(tries):
            length, crc = _FRAME.unpack(bytes(self._buffer[at : at + _FRAME.size]))
            if length <= most:
                payload = bytes(self._buffer[at + _FRAME.size : at + _FRAME.size + length])
                if crc == zlib.crc32(struct.pack("<I", length) + payload):
                    return payload
            if length == 0 and crc == 0:
                return None
        return None


class Slots(Protocol):
    """The slots in which the ranks of a group post their messages of an exchange. Two slots per rank are enough: a peer
    posts step s + 2 only after it has read every rank's message of step s + 1, and a rank posts that only after it has
    left step s."""

    pauses: tuple[float, float]  # between reads: the first and the longest, in seconds

    def post(self, message: ExchangeMessage) -> None:
        """Post this rank's message in the slot of its step."""

    def posted(self, ranks: Sequence[int], step: int) -> Iterable[tuple[int, ExchangeMessage]]:
        """The messages in these ranks' slots of `step`; a message may be of that step, or an older or a newer one."""


class PageSlots:
    """The slots of ranks that share memory, in their pages. `page` gives the page of a rank."""

    pauses = 5e-5, 2e-3

    def __init__(self, page: Callable[[int], Page], rank: int) -> None:
        self._page, self._rank = page, rank

    def post(self, message: ExchangeMessage) -> None:
        self._page(self._rank).post(message)

    def posted(self, ranks: Sequence[int], step: int) -> Iterable[tuple[int, ExchangeMessage]]:
        return [(rank, message) for rank in ranks if (message := self._page(rank).posted(step)) is not None]


class _Places:
    """The places of calls' descriptors in the page. `numbers`: for each descriptor that has a place, the lower bits of
    its number."""

    def __init__(self, buffer: memoryview) -> None:
        self.numbers: dict[PackedDescriptor, int] = {}
        self._buffer, self._words = buffer, buffer.cast("q")
        self._placed: list[PackedDescriptor | None] = [None] * _PLACES
        self._turn = -1

    def place(self, sequence: int, packed: PackedDescriptor) -> int:
        """Write the descriptor of call `sequence`; returns the lower bits of its number. It replaces the oldest one to
        which none of the last calls refers."""
        named = self._named(sequence)
        self._turn += 1
        while self._turn % _PLACES in named:
            self._turn += 1
        at, number = self._turn % _PLACES, self._turn & _LOWER
        before, self._placed[at] = self._placed[at], packed
        if before is not None:
            self.numbers.pop(before, None)
        _write(self._buffer, _PLACES_AT + at * _PLACE, number, packed)
        self.numbers[packed] = number
        return number

    def _named(self, sequence: int) -> set[int]:
        """The places of the last calls' descriptors, without the call whose word call `sequence` overwrites."""
        others = (self._words[_RING + n] for n in range(RING) if n != sequence % RING)
        return {(word & _LOWER) % _PLACES for word in others}


def _write(buffer: memoryview, at: int, number: int, packed: PackedDescriptor) -> None:
    crc = zlib.crc32(_NUMBER.pack(number), packed.crc)
    _NUMBERED.pack_into(buffer, at, _DESCRIPTOR.size, crc, packed.text, number)


def _slot_at(step: int) -> int:
    return _SLOTS_AT + step % 2 * PAGE_BYTES


def _descriptor(data: bytes) -> Descriptor:
    fields: list[Any] = [_text(f) if isinstance(f, bytes) else f for f in _DESCRIPTOR.unpack(data)]
    return Descriptor(fields.pop(), *fields)


def _text(field: bytes) -> str:
    return field.split(b"\0", 1)[0].decode(errors="ignore")
