"""Addresses of TCP connections that a library makes without saying which they are: how ranks exchange and find them."""

from __future__ import annotations

import os
import socket
import stat
import struct
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import Store

from tricomm.errors import RendezvousError

Address = tuple[str, int]  # host and port, as numbers
_ADDRESS = struct.Struct("<46sH")
_NONE = ("", 0)


@dataclass(frozen=True)
class TcpSocket:
    """A descriptor and the number of its socket; `there` is None if it is not connected."""

    fd: int
    inode: int
    here: Address
    there: Address | None


def tcp_sockets() -> list[TcpSocket]:
    """The TCP sockets of this process."""
    found = (_tcp_socket(int(fd)) for fd in os.listdir("/proc/self/fd"))
    return [one for one in found if one is not None]


def _listener_in(data: bytes) -> Address | None:
    """The address of this process's listening socket whose `sockaddr` occurs in `data`; None if there is none."""
    for one in tcp_sockets():
        if one.there is None and one.here[1] and _sockaddr(one.here) in data:
            return one.here
    return None


def pack(address: Address | None) -> bytes:
    host, port = address or _NONE
    return _ADDRESS.pack(host.encode(), port)


def unpack(data: bytes) -> Address | None:
    """The reverse of `pack`. Raises `RendezvousError` if `data` is too short."""
    if len(data) < _ADDRESS.size:
        raise RendezvousError(f"an address of {len(data)} bytes, expected {_ADDRESS.size}")
    host, port = _ADDRESS.unpack_from(data)
    return (host.rstrip(b"\0").decode(errors="replace"), port) if port else None


class AddressBook(Store):
    """The store that the constructor of a `ProcessGroupGloo` sees: it sets this rank's entry, and waits here for the
    entries of other ranks, for `seconds` at most.

    asked    the constructor needs the other entries
    filled   it may look for them; without them it then fails
    """

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.asked, self.filled = threading.Event(), threading.Event()
        self._entries: dict[str, bytes] = {}
        self._seconds = seconds

    def page(self) -> tuple[Address | None, bytes]:
        """The address at which this rank's Gloo listens, and what the other ranks `read`."""
        ((key, value),) = self._entries.items()
        address = _listener_in(value)
        return address, pack(address) + key.encode() + b"\n" + value

    def read(self, pages: Sequence[bytes]) -> list[Address | None]:
        """Take the entries of all ranks; returns the addresses at which their Gloo listens."""
        for page in pages:
            key, _, value = page[_ADDRESS.size :].partition(b"\n")
            self._entries[key.decode(errors="replace")] = value
        return [unpack(page) for page in pages]

    # For the constructor

    def set(self, key: str, value: Any) -> None:
        self._entries[key] = bytes(value)

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._entries[key]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        if not self.check(keys):
            self.asked.set()
            self.filled.wait(self._seconds)
            if not self.check(keys):
                raise RuntimeError("the addresses of the other ranks did not come")

    def check(self, keys: list[str]) -> bool:
        return all(key in self._entries for key in keys)

    def has_extended_api(self) -> bool:
        return False


def inode(fd: int) -> int | None:
    """The number of the socket that `fd` is; None if it is closed or no socket."""
    try:
        seen = os.fstat(fd)
    except OSError:
        return None
    return seen.st_ino if stat.S_ISSOCK(seen.st_mode) else None


def shut_down(fd: int, number: int) -> None:
    """Shut down the socket `number` if `fd` still refers to it; then reads and writes return on both sides."""
    # Through a duplicate: `fd` may name another file by the time of the call, but a duplicate's file cannot change.
    try:
        copy = os.dup(fd)
    except OSError:  # `fd` is closed (the inode shows that), or no descriptor is left
        copy = fd
    try:
        if inode(copy) == number:
            held = socket.socket(fileno=copy)
            try:
                held.shutdown(socket.SHUT_RDWR)
            except OSError:  # the other side was first
                pass
            finally:
                held.detach()
    finally:
        if copy != fd:
            os.close(copy)


def _tcp_socket(fd: int) -> TcpSocket | None:
    number = inode(fd)
    if number is None:
        return None
    try:
        with socket.socket(fileno=os.dup(fd)) as copy:
            if (
                inode(copy.fileno()) != number
                or copy.family not in (socket.AF_INET, socket.AF_INET6)
                or copy.type != socket.SOCK_STREAM
            ):
                return None
            here, there = copy.getsockname()[:2], None
            try:
                there = copy.getpeername()[:2]
            except OSError:
                pass
            return TcpSocket(fd, number, here, there)
    except OSError:
        return None


def _sockaddr(address: Address) -> bytes:
    host, port = address
    if ":" in host:
        packed = socket.inet_pton(socket.AF_INET6, host.partition("%")[0])
        return struct.pack("=H", socket.AF_INET6) + struct.pack("!HI", port, 0) + packed
    return struct.pack("=H", socket.AF_INET) + struct.pack("!H", port) + socket.inet_aton(host)
