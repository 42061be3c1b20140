"""Point to point on the CPU, with a header on every message: its length and type.

Gloo ends the receiver's process if a message is longer than the buffer, and says nothing if it is shorter. So a message
is received into a larger address range, in which only the bytes that arrive take memory. If the header is as expected,
the data is copied from there. Anything else is a `CollectiveMismatch` on the receiver: the message is consumed, and the
group goes on. TRICOMM_CHECK=0, on all ranks, sends messages without headers.
"""

from __future__ import annotations

import mmap
import struct
import time
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import Work

from tricomm.c10d.call_futures import told
from tricomm.c10d.dtype_emulation import as_bytes
from tricomm.c10d.gloo_transport import Transport
from tricomm.c10d.work_handles import limit_seconds
from tricomm.errors import CollectiveMismatch, CollectiveTimeout, ResourceError
from tricomm.threads import HelperTask

LONGEST_EXCESS = 1 << 30  # bytes by which a message may be too long before it ends the process instead of being refused
_HEAD = struct.Struct("<8sQ24s")  # magic, elements, dtype
_MAGIC = b"TCPOINT\x01"
_UNTOUCHED = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000  # MAP_NORESERVE, which the module lacks


class CheckedPointToPoint:
    """One group's messages; `headed`: with headers; `limit` is how long a wait may take."""

    def __init__(self, transport: Transport, headed: bool, limit: timedelta, group: str) -> None:
        self.transport, self.headed, self.limit, self.group = transport, headed, limit, group

    def send(self, x: torch.Tensor, dst: int, tag: int) -> MessageWork:
        """Send contiguous `x`, which may be changed at once if messages have headers."""
        data = as_bytes(x.view(-1))
        if self.headed:
            head = bytearray(_HEAD.pack(_MAGIC, x.numel(), _name(x.dtype)))
            data = torch.cat([torch.frombuffer(head, dtype=torch.uint8), data])
        return MessageWork(self, self.transport.send(data, dst, tag), x, dst, f"send to rank {dst}", tag)

    def recv(self, x: torch.Tensor, src: int | None, tag: int) -> MessageWork:
        """Receive into contiguous `x`, from `src` or (None) from the first rank that sends.

        Raises `ResourceError` if address space is refused.
        """
        data = self._receive_range(x) if self.headed else as_bytes(x.view(-1))
        handle = self.transport.recv(data, src, tag)
        what = "recv from any rank" if src is None else f"recv from rank {src}"
        return MessageWork(self, handle, x, src, what, tag, data if self.headed else None)

    def _receive_range(self, x: torch.Tensor) -> torch.Tensor:
        nbytes = _HEAD.size + x.nbytes + LONGEST_EXCESS
        try:
            room = mmap.mmap(-1, nbytes, flags=_UNTOUCHED)
        except OSError as error:
            raise ResourceError(
                f"{self.group}: recv of {x.nbytes} bytes: {nbytes} bytes of address space are refused "
                f"({error.strerror}); raise the limit (ulimit -v), or set TRICOMM_CHECK=0 on all ranks"
            ) from error
        return torch.frombuffer(room, dtype=torch.uint8)


class MessageWork(Work):
    """A message in flight. `wait` copies one that is received with a header into its tensor; so does a thread once
    `is_completed` has been asked."""

    def __init__(
        self, points: CheckedPointToPoint, handle: Any, x: torch.Tensor, peer: int | None, what: str, tag: int,
        headed: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self._points, self._handle, self._x, self._peer, self._what, self._tag = points, handle, x, peer, what, tag
        self._headed = headed
        self._done = False
        self._task: HelperTask | None = None
        self._error: BaseException | None = None

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Block until the message is there; raises `CollectiveMismatch` if the tensor is of another size or type.

        Raises `CollectiveTimeout` after `timeout` (default: the group's), `PeerDied` or `PeerStalled`; the group is
        then lost.
        """
        seconds = limit_seconds(timeout) or self._points.limit.total_seconds()
        if self._task is None:
            self._finish(seconds)
        else:
            self._points.transport.interruptible(lambda: self._join(seconds))
        if self._error is not None:
            told(self._error)
            raise self._error
        return True

    def _finish(self, seconds: float) -> None:
        if self._done or self._error is not None:
            return
        sent, end = self._what.startswith("send"), time.monotonic() + seconds
        try:
            self._points.transport.wait(self._handle, self._peer, end, self._words, sent)
            if self._headed is not None:
                message, self._headed = self._headed, None
                self._deliver(message)
            self._done = True
        except Exception as error:
            self._error = error

    def _join(self, seconds: float) -> None:
        """Wait for the thread that finishes the message."""
        if self._task is not None and not self._task.wait(seconds):
            raise CollectiveTimeout(f"{self._words()}: timeout after {seconds:g} s of wait()")

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
        with torch.inference_mode(x.is_inference()):
            as_bytes(x.data.view(-1)).copy_(message[_HEAD.size : _HEAD.size + x.nbytes])

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        if self._task is None and not self._done and self._error is None:
            self._task = HelperTask(lambda: self._finish(self._points.limit.total_seconds()))
        return self._done or self._error is not None

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
