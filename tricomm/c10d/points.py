"""Point to point over Gloo, with a head on every message that says what it is.

Gloo ends the receiver's process where a message is longer than the buffer, and says nothing where it is shorter. So a
message carries its length and type, and is received into address space of which only what arrives becomes memory;
what is expected is copied from there, and anything else is a `CollectiveMismatch` on the receiver. The message is used
up then, and the group goes on. TRICOMM_CHECK=0, on all ranks, sends bare messages.
"""

from __future__ import annotations

import mmap
import struct
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import Work

from tricomm.c10d.carriers import as_bytes
from tricomm.c10d.works import bounded
from tricomm.errors import CollectiveMismatch, ResourceError

LONGEST_EXCESS = 1 << 30  # bytes that a message may be too long and still be refused, and not end the process
_HEAD = struct.Struct("<8sQ24s")  # magic, elements, dtype
_MAGIC = b"TCPOINT\x01"
_UNTOUCHED = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000  # MAP_NORESERVE, which the module lacks


def send(gloo: Any, x: torch.Tensor, dst: int, tag: int) -> Any:
    """Send contiguous `x` with its head; `x` may be changed at once."""
    head = bytearray(_HEAD.pack(_MAGIC, x.numel(), _name(x.dtype)))
    message = torch.cat([torch.frombuffer(head, dtype=torch.uint8), as_bytes(x.view(-1))])
    return gloo.send([message], dst, tag)


def recv(gloo: Any, x: torch.Tensor, src: int | None, tag: int, group: str) -> Received:
    """Receive into contiguous `x`, from `src` or (None) from whoever comes first.

    Raises `ResourceError` where address space is refused.
    """
    nbytes = _HEAD.size + x.nbytes + LONGEST_EXCESS
    try:
        room = mmap.mmap(-1, nbytes, flags=_UNTOUCHED)
    except OSError as error:
        raise ResourceError(
            f"{group}: recv of {x.nbytes} bytes: {nbytes} bytes of address space are refused ({error.strerror}); raise "
            "the limit (ulimit -v), or set TRICOMM_CHECK=0 on all ranks"
        ) from error
    message = torch.frombuffer(room, dtype=torch.uint8)
    work = gloo.recv_anysource([message], tag) if src is None else gloo.recv([message], src, tag)
    return Received(work, message, x, tag, group)


class Received(Work):
    """A message under way; `wait` puts it where it belongs."""

    def __init__(self, work: Any, message: torch.Tensor, x: torch.Tensor, tag: int, group: str) -> None:
        super().__init__()
        self._work, self._x, self._tag, self._group = work, x, tag, group
        self._message: torch.Tensor | None = message
        self._error: BaseException | None = None

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Block until the message is there; `CollectiveMismatch` where it is not what `x` takes."""
        if self._error is not None:
            raise self._error
        if self._message is not None:
            self._work.wait(timeout) if bounded(timeout) else self._work.wait()
            message, self._message = self._message, None
            try:
                self._deliver(message)
            except CollectiveMismatch as error:
                self._error = error
                raise
        return True

    def _deliver(self, message: torch.Tensor) -> None:
        magic, count, name = _HEAD.unpack(message[: _HEAD.size].numpy().tobytes())
        x = self._x
        if (magic, count, name.rstrip(b"\0")) != (_MAGIC, x.numel(), _name(x.dtype)):
            sent = f"{count} elements of {name.rstrip(bytes(1)).decode(errors='replace')}"
            raise CollectiveMismatch(
                f"{self._group}: recv of {x.numel()} elements of {_name(x.dtype).decode()} with tag {self._tag}: rank "
                f"{self._source_rank()} sent {sent if magic == _MAGIC else 'no message of this group'}; give recv a "
                "tensor of what is sent"
            )
        as_bytes(x.view(-1)).copy_(message[_HEAD.size : _HEAD.size + x.nbytes])

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return self._message is None or bool(self._work.is_completed())

    def is_success(self) -> bool:
        return self._message is None and self._error is None

    def exception(self) -> Any:
        return self._error

    def result(self) -> list[Any]:
        return [self._x]

    def _source_rank(self) -> int:
        return int(self._work._source_rank())


def _name(dtype: torch.dtype) -> bytes:
    return str(dtype).removeprefix("torch.").encode()[:24]
