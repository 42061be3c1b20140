"""Point to point on the CPU: a message must have the size and the type that its receive expects.

If it does not, the receiver drops the message and raises `CollectiveMismatch`; the group stays usable.
"""

from __future__ import annotations

import time
import zlib
from datetime import timedelta
from typing import Any

import torch

from tricomm.c10d.call_recording import GroupRecorders
from tricomm.c10d.dtype_emulation import memory
from tricomm.c10d.work_handles import Handle, limit_seconds
from tricomm.errors import CollectiveMismatch, InvalidArgument
from tricomm.metrics.flight_document import Entry
from tricomm.store.tcp.matching import ANY, FIRST_OWN_TAG, Transfer
from tricomm.store.tcp.transport import Transport
from tricomm.store.tcp.waits import told

_DTYPES = {zlib.crc32(str(v).encode()): v for v in vars(torch).values() if isinstance(v, torch.dtype)}
_CODES = {dtype: code for code, dtype in _DTYPES.items()}


class CpuMessages:
    """One group's messages. `limit` is the timeout of a wait; `recorders` records messages for the flight recorder."""

    def __init__(self, transport: Transport, limit: timedelta, group: str, recorders: GroupRecorders) -> None:
        self.transport, self.limit, self.group, self.recorders = transport, limit, group, recorders

    def send(self, x: torch.Tensor, dst: int, tag: int) -> MessageWork:
        """Send contiguous `x`, which must not be changed until the handle's `wait` has returned."""
        message = Transfer(dst, _user_tag(tag), (memory(x),), _CODES[x.dtype])
        message.keep = x
        self.transport.send(message)
        return MessageWork(self, message, x, f"send to rank {dst}")

    def recv(self, x: torch.Tensor, src: int | None, tag: int) -> MessageWork:
        """Receive into contiguous `x`, from `src`, or with None from the first rank that sends."""
        message = Transfer(ANY if src is None else src, _user_tag(tag), (memory(x),), _CODES[x.dtype])
        message.keep = x
        self.transport.recv(message)
        return MessageWork(self, message, x, "recv from any rank" if src is None else f"recv from rank {src}")


class MessageWork(Handle):
    """A message in flight."""

    def __init__(self, points: CpuMessages, message: Transfer, x: torch.Tensor, what: str) -> None:
        super().__init__([x])
        self._points, self._message, self._x, self._what = points, message, x, what
        self._error: BaseException | None = None
        self.entry: Entry | None = None  # of the flight recorder

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Block until the message is sent or has arrived.

        Raises `CollectiveMismatch` if the tensor is of another size or type. Raises `CollectiveTimeout` after `timeout`
        (default: the group's), `PeerDied` or `PeerStalled`; the group is then lost.
        """
        if self._error is None and not self.is_success():
            seconds = limit_seconds(timeout) or self._points.limit.total_seconds()
            try:
                self._points.transport.wait(self._message, time.monotonic() + seconds, self._words)
            except Exception as error:
                self._error = error
        cause = self.exception()
        if cause is not None:
            self._points.recorders.of("cpu").name_in(cause)
            told(cause)
            raise cause
        if self.entry is not None:
            self._points.recorders.arrived(self.entry, self._message.rank, self._message.tag)
        return True

    def is_completed(self) -> bool:
        return self._message.done or self._error is not None

    def exception(self) -> Any:
        if self._error is None and self._message.misfit is not None:
            self._error = self._mismatch(*self._message.misfit)
        return self._error or self._message.error

    def _words(self) -> str:
        x = self._x
        return f"{self._points.group}: {self._what} of {x.numel()} elements of {x.dtype} with tag {self._message.tag}"

    def _mismatch(self, nbytes: int, code: int) -> CollectiveMismatch:
        x, sent, received = self._x, _DTYPES.get(code), self._message
        what = f"{nbytes} bytes of an unknown type"
        if sent is not None:
            what = f"{nbytes // sent.itemsize} elements of {_name(sent)}"
        return CollectiveMismatch(
            f"{self._points.group}: recv of {x.numel()} elements of {_name(x.dtype)} with tag {received.tag}: "
            f"rank {received.rank} sent {what}; give recv a tensor of what is sent"
        )

    def _source_rank(self) -> int:
        return self._message.rank


def _user_tag(tag: int) -> int:
    """`tag` of a user's message. Raises `InvalidArgument` if it is not in the range."""
    if not 0 <= tag < FIRST_OWN_TAG:
        raise InvalidArgument(f"tag={tag}: a tag from 0 to 2**30 - 1 is needed; those above are tricomm's own")
    return tag


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
