"""One connection to another rank: messages as frames over a socket that never blocks.

    frame       head (28 bytes), then the data of an EAGER or DATA frame
    EAGER       a whole message: of a collective, or of at most `EAGER_BYTES`
    READY       announces a longer message. Its data follows after the receive is posted, so it takes no extra memory.
    CLEAR       answers READY: the receive is posted. The sender sends the DATA frame with the same id.
    REFUSE      answers READY: the receive has another size or type, and the message is dropped.

    sender      READY(id, tag, type, bytes)                        DATA(id) data
    receiver                                 CLEAR(id)

Data is read straight into the receive's memory, or into a buffer if no receive is posted. A frame's head and short data
are read into a staging buffer, so several short messages take one system call.
"""

from __future__ import annotations

import select
import socket
import struct
from collections import deque
from collections.abc import Iterable
from select import POLLIN, POLLOUT

from tricomm.store.tcp.matching import Arrival, Matching, Transfer

EAGER_BYTES = 128 * 1024
STAGING_BYTES = 32 * 1024
_PIECE_BYTES = 256 * 1024  # of long data, in one write

_HEAD = struct.Struct("<HBxIIQQ")  # magic, kind, type, tag, bytes, id
_MAGIC = 0x7C03
_EAGER, _READY, _CLEAR, _REFUSE, _DATA = range(5)
_NOTHING = memoryview(bytearray())


class Peer:
    """The connection to `rank`. The caller of every method holds the group's lock."""

    def __init__(self, rank: int, connection: socket.socket, matching: Matching, staging: memoryview) -> None:
        self.rank, self.socket, self.fd = rank, connection, connection.fileno()
        self.closed: Exception | None = None  # why no message will come or go any more
        self._refused: Exception | None = None  # why no message will go
        self.receives = 0  # from this rank, under way
        self._matching = matching
        self._staging = staging
        self._out: deque[tuple[list[memoryview], Transfer | None]] = deque()  # frames to be written
        self._announced: dict[int, Transfer] = {}  # by id: sends that wait for their receive
        self._cleared: dict[int, Transfer] = {}  # by id: receives that wait for a DATA frame
        self._next_id = 0
        # The frame that is being read: part of its head, or the memory for the rest of its data
        self._reading = False
        self._head = bytearray()
        self._into, self._skip = _NOTHING, 0
        self._message: Transfer | None = None
        self._arrival: Arrival | None = None

    @property
    def interest(self) -> int:
        """The events of its socket that this rank waits for."""
        if self.closed is not None:
            return 0
        out = POLLOUT if self._out else 0
        return POLLIN | out if self._wanted else out

    @property
    def _wanted(self) -> bool:
        """Whether a message of this rank is awaited. Otherwise its data stays in the socket, whose size bounds it."""
        return bool(self.receives or self._announced or self._matching.from_any)

    # Messages

    def send(self, message: Transfer, eager: bool) -> None:
        """Send `message`, as far as that is possible at once."""
        if self._refused is not None:
            message.finish(self._refused)
        elif eager or message.nbytes <= EAGER_BYTES:
            self._push(_EAGER, message, message.tag, message.dtype)
        else:
            self._next_id += 1
            self._announced[self._next_id] = message
            self._push(_READY, None, message.tag, message.dtype, message.nbytes, self._next_id)

    def expect(self, message: Transfer) -> None:
        """`message` is a receive from this rank that no message has met."""
        if self.closed is not None:
            self._matching.withdraw(self.rank)
            message.finish(self.closed)
        self.receives += 1

    def take(self, arrival: Arrival, message: Transfer) -> None:
        """Give `arrival`, a message of this rank, to the receive `message`."""
        message.rank = self.rank
        if arrival.complete:
            arrival.deliver(message)
        elif self.closed is not None:
            message.finish(self.closed)
        else:
            self.receives += 1
            if arrival.data is None:
                self._answer(message, arrival.dtype, arrival.nbytes, arrival.id)
            else:
                arrival.message = message

    # The socket

    def write(self) -> None:
        """Write frames until none is left or the socket takes no more.

        Long data is written in pieces, with a read between them: both sides then find the data in their caches.
        """
        while self._out:
            parts, message = self._out[0]
            long = len(parts[-1]) > _PIECE_BYTES
            try:
                written = self.socket.sendmsg([*parts[:-1], parts[-1][:_PIECE_BYTES]] if long else parts)
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                self._write_failed(error)
                return
            if long or written < sum(map(len, parts)):
                while written >= len(parts[0]):
                    written -= len(parts.pop(0))
                parts[0] = parts[0][written:]
                if not long:
                    return
                if self.receives and not self._reading:
                    self.read()
                continue
            self._out.popleft()
            if message is not None:
                message.finish()

    def read(self) -> None:
        """Read what has come."""
        self._reading = True  # a frame may be answered meanwhile
        try:
            while self.closed is None and self._read_once() and self._wanted:
                pass
        finally:
            self._reading = False

    def _read_once(self) -> bool:
        """Read once; whether there may be more."""
        direct = len(self._into) >= STAGING_BYTES
        room = self._into if direct else self._staging
        try:
            count = self.socket.recv_into(room)
        except (BlockingIOError, InterruptedError):
            return False
        except OSError as error:
            self.close(error)
            return False
        if count == 0:
            self.close(ConnectionResetError("the connection was closed by the peer"))
        elif direct:
            self._into = self._into[count:]
            if not (self._into or self._skip):
                self._frame_ended()
        else:
            self._parse(self._staging[:count])
        return count == len(room)

    def close(self, error: Exception) -> None:
        """No message comes or goes any more; what is under way fails with `error`."""
        if self.closed is not None:
            return
        self._write_failed(error)
        self.closed = error
        failed = self._matching.withdraw(self.rank)
        failed += self._cleared.values()
        being_read = self._message if self._arrival is None else self._arrival.message
        failed += [] if being_read is None else [being_read]
        self._cleared.clear()
        for message in failed:
            message.finish(error)

    def _write_failed(self, error: Exception) -> None:
        """No message is sent any more. Data that the peer sent before it closed the connection can still be read."""
        self._refused = self._refused or error
        failed = [message for _, message in self._out if message is not None] + [*self._announced.values()]
        self._out.clear()
        self._announced.clear()
        for message in failed:
            message.finish(error)

    # Frames

    def _push(
        self, kind: int, message: Transfer | None, tag: int = 0, dtype: int = 0, nbytes: int = 0, id: int = 0
    ) -> None:
        if self._refused is not None:
            if message is not None:
                message.finish(self._refused)
            return
        parts = () if message is None else message.parts
        head = memoryview(_HEAD.pack(_MAGIC, kind, dtype, tag, nbytes or sum(map(len, parts)), id))
        self._out.append(([head, *parts], message))
        if len(self._out) == 1:
            self.write()

    def _parse(self, data: memoryview) -> None:
        if not (self._head or self._into or self._skip) and len(data) >= _HEAD.size:
            self._begin(*_HEAD.unpack_from(data))
            data = data[_HEAD.size :]
        while data:
            if self._into:
                count = min(len(self._into), len(data))
                self._into[:count] = data[:count]
                self._into, data = self._into[count:], data[count:]
                if not (self._into or self._skip):
                    self._frame_ended()
            elif self._skip:
                count = min(self._skip, len(data))
                self._skip, data = self._skip - count, data[count:]
                if not self._skip:
                    self._frame_ended()
            else:
                missing = _HEAD.size - len(self._head)
                self._head += data[:missing]
                data = data[missing:]
                if len(self._head) == _HEAD.size:
                    head = _HEAD.unpack(self._head)
                    self._head.clear()
                    self._begin(*head)

    def _begin(self, magic: int, kind: int, dtype: int, tag: int, nbytes: int, id: int) -> None:
        if magic != _MAGIC or kind > _DATA:
            self.close(ConnectionAbortedError("the peer sent bytes that are no frame"))
        elif kind == _CLEAR:
            if id in self._announced:  # else writing has failed
                self._push(_DATA, self._announced.pop(id), id=id)
        elif kind == _REFUSE:
            if id in self._announced:
                self._announced.pop(id).finish()
        elif kind == _DATA:
            self._message = self._cleared.pop(id)
            self._into = self._message.parts[0]
        else:
            self._begin_message(kind, dtype, tag, nbytes, id)

    def _begin_message(self, kind: int, dtype: int, tag: int, nbytes: int, id: int) -> None:
        message = self._matching.arrive(self.rank, tag)
        if message is not None and message.any:
            self.receives += 1
        if kind == _READY:
            if message is None:
                self._matching.keep(self.rank, tag, dtype, nbytes, id, None)
            else:
                self._answer(message, dtype, nbytes, id)
            return
        if message is None:
            buffer = bytearray(nbytes)
            self._arrival = self._matching.keep(self.rank, tag, dtype, nbytes, id, buffer)
            self._into = memoryview(buffer)
        else:
            self._message = message
            self._into = message.room(nbytes, dtype) or _NOTHING
            self._skip = nbytes - len(self._into)
        if not nbytes:
            self._frame_ended()

    def _answer(self, message: Transfer, dtype: int, nbytes: int, id: int) -> None:
        """Answer the sender of a message that was announced."""
        if message.room(nbytes, dtype) is not None:
            self._cleared[id] = message
            self._push(_CLEAR, None, id=id)
        else:
            self._push(_REFUSE, None, id=id)
            self._finish(message)

    def _frame_ended(self) -> None:
        message, arrival = self._message, self._arrival
        self._message = self._arrival = None
        self._into = _NOTHING
        if message is not None:
            self._finish(message)
        elif arrival is not None:
            arrival.complete = True
            if arrival.message is not None:
                self.receives -= 1
                arrival.deliver(arrival.message)

    def _finish(self, message: Transfer) -> None:
        self.receives -= 1
        message.finish()


def poller_of(peers: Iterable[Peer], waker: int = -1) -> select.poll:
    """Waits for the sockets of `peers` that have messages in flight, and for the descriptor `waker`."""
    poller = select.poll()
    for peer in peers:
        events = peer.interest
        if events:
            poller.register(peer.fd, events)
    if waker >= 0:
        poller.register(waker, POLLIN)
    return poller
