"""Point to point on the CPU, with a head on every message that says what it is.

Gloo ends the receiver's process if a message is longer than the buffer, and says nothing if it is shorter. So a
message carries its length and type, and is received into address space of which only what arrives becomes memory;
what is expected is copied from there, and anything else is a `CollectiveMismatch` on the receiver. The message is used
up then, and the group goes on. TRICOMM_CHECK=0, on all ranks, sends bare messages.
"""

from __future__ import annotations

import mmap
import struct
import time
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import Work

from tricomm.c10d.dtype_emulation import as_bytes
from tricomm.c10d.gloo_transport import Transport
from tricomm.c10d.handles import bounded, told
from tricomm.errors import CollectiveMismatch, ResourceError, TricommError

LONGEST_EXCESS = 1 << 30  # bytes that a message may be too long and still be refused, and not end the process
_HEAD = struct.Struct("<8sQ24s")  # magic, elements, dtype
_MAGIC = b"TCPOINT\x01"
_UNTOUCHED = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000  # MAP_NORESERVE, which the module lacks


class Points:
    """One group's messages; `headed` says whether they tell what they are, `limit` is how long a wait may take."""

    def __init__(self, transport: Transport, headed: bool, limit: timedelta, group: str) -> None:
        self.transport, self.headed, self.limit, self.group = transport, headed, limit, group

    def send(self, x: torch.Tensor, dst: int, tag: int) -> Message:
        """Send contiguous `x`; with a head, it may be changed at once."""
        data = as_bytes(x.view(-1))
        if self.headed:
            head = bytearray(_HEAD.pack(_MAGIC, x.numel(), _name(x.dtype)))
            data = torch.cat([torch.frombuffer(head, dtype=torch.uint8), data])
        return Message(self, self.transport.send(data, dst, tag), x, dst, f"send to rank {dst}", tag)

    def recv(self, x: torch.Tensor, src: int | None, tag: int) -> Message:
        """Receive into contiguous `x`, from `src` or (None) from whoever comes first.

        Raises `ResourceError` if address space is refused.
        """
        data = self._room(x) if self.headed else as_bytes(x.view(-1))
        handle = self.transport.recv(data, src, tag)
        what = "recv from any rank" if src is None else f"recv from rank {src}"
        return Message(self, handle, x, src, what, tag, data if self.headed else None)

    def _room(self, x: torch.Tensor) -> torch.Tensor:
        nbytes = _HEAD.size + x.nbytes + LONGEST_EXCESS
        try:
            room = mmap.mmap(-1, nbytes, flags=_UNTOUCHED)
        except OSError as error:
            raise ResourceError(
                f"{self.group}: recv of {x.nbytes} bytes: {nbytes} bytes of address space are refused "
                f"({error.strerror}); raise the limit (ulimit -v), or set TRICOMM_CHECK=0 on all ranks"
            ) from error
        return torch.frombuffer(room, dtype=torch.uint8)


class Message(Work):
    """A message under way; of one that is received with a head, `wait` puts it where it belongs."""

    def __init__(
        self, points: Points, handle: Any, x: torch.Tensor, peer: int | None, what: str, tag: int,
        headed: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self._points, self._handle, self._x, self._peer, self._what, self._tag = points, handle, x, peer, what, tag
        self._headed = headed
        self._done = False
        self._error: BaseException | None = None

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Block until the message is there; `CollectiveMismatch` if it is not what the tensor takes.

        Raises `CollectiveTimeout` after `timeout` (none given: the group's), `PeerDied` and `PeerStalled`; the group is
        lost then.
        """
        if self._error is not None:
            raise self._error
        if not self._done:
            limit = timeout if bounded(timeout) else self._points.limit
            try:
                self._points.transport.wait(
                    self._handle, self._peer, time.monotonic() + limit.total_seconds(), self._words,
                    sent=self._what.startswith("send"),
                )  # fmt: skip
                self._done = True
                if self._headed is not None:
                    message, self._headed = self._headed, None
                    self._deliver(message)
            except TricommError as error:
                self._error = error
                told(error)
                raise
        return True

    def _words(self) -> str:
        x = self._x
        return f"{self._points.group}: {self._what} of {x.numel()} elements of {x.dtype} with tag {self._tag}"

    def _deliver(self, message: torch.Tensor) -> None:
        magic, count, name = _HEAD.unpack(message[: _HEAD.size].numpy().tobytes())
        x = self._x
        if (magic, count, name.rstrip(b"\0")) != (_MAGIC, x.numel(), _name(x.dtype)):
            sent = f"{count} elements of {name.rstrip(bytes(1)).decode(errors='replace')}"
            raise CollectiveMismatch(
                f"{self._points.group}: recv of {x.numel()} elements of {_name(x.dtype).decode()} with tag "
                f"{self._tag}: rank {self._source_rank()} sent "
                f"{sent if magic == _MAGIC else 'no message of this group'}; give recv a tensor of what is sent"
            )
        with torch.no_grad():
            as_bytes(x.view(-1)).copy_(message[_HEAD.size : _HEAD.size + x.nbytes])

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return self._done or bool(self._handle.is_completed())

    def is_success(self) -> bool:
        return self._done and self._error is None

    def exception(self) -> Any:
        return self._error

    def result(self) -> list[Any]:
        return [self._x]

    def _source_rank(self) -> int:
        return int(self._handle._source_rank())


def _name(dtype: torch.dtype) -> bytes:
    return str(dtype).removeprefix("torch.").encode()[:24]
