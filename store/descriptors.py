"""Passes file descriptors between ranks, in datagrams over Unix sockets (SCM_RIGHTS).

    rank 0: mkdir 0700 <base>/tricomm-<random>, bind s ──── name, by the Store or the control page ────▶ all ranks
    rank 1: its credentials, checked by the kernel; a sealed record; its descriptors ──── one datagram ────▶ rank 0

A datagram arrives whole or not at all, and there is no connection that a silent process could occupy. No other user
can enter the directory. A message is accepted if the kernel confirms that this user sent it, if its record has the
group's nonce (and HMAC, with TRICOMM_TOKEN), and if it carries the number of descriptors that the group's ranks send.
Any other message is counted and dropped, and its descriptors are closed.

A rank removes its directory after the exchange; if it was killed, the other ranks do. If all were killed, or none knew
the name yet, the next process that makes a socket in the same base removes the directory, because no process holds its
lock.
"""

from __future__ import annotations

import array
import errno
import fcntl
import hmac
import itertools
import os
import re
import resource
import secrets
import select
import socket
import stat
import struct
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Any

from tricomm import env
from tricomm.deadline import Deadline, poll
from tricomm.errors import InvalidArgument, RendezvousError, ResourceError
from tricomm.store import files, records
from tricomm.store.records import NAME_BYTES, Delivery, StoreRecord

VARIABLE = "TRICOMM_SOCKET_DIR"
_BASES = ("/dev/shm", "/tmp")
_PREFIX, _SOCKET = "tricomm-", "s"
_NAME = re.compile(f"{_PREFIX}[0-9a-f]{{{2 * NAME_BYTES}}}")
_SUN_PATH_BYTES = 107  # of struct sockaddr_un, without the last zero
_MESSAGE_BYTES = 512
_MOST_DESCRIPTORS = 8
_CREDENTIALS = struct.Struct("3i")  # struct ucred: pid, uid, gid
_ROOM = socket.CMSG_SPACE(_CREDENTIALS.size) + socket.CMSG_SPACE(_MOST_DESCRIPTORS * 4)
_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS, _LOOK_SECONDS = 5e-4, 0.02, 0.05
_AT_ONCE = 64  # messages that are read before the clock is checked again
_TRIES = 8


@dataclass(frozen=True)
class Sender:
    """The sender in the messages of one exchange. Never printed, because the nonce is a secret."""

    rank: int
    world_size: int
    nonce: bytes
    what: str

    def record(self, to: int) -> StoreRecord[Delivery]:
        return StoreRecord(self.rank, self.world_size, self.nonce, Delivery(to, self.what))

    def __repr__(self) -> str:
        return f"Sender(rank={self.rank}, world_size={self.world_size}, what={self.what!r})"


class DescriptorSocket:
    """The socket at which this rank receives descriptors of other ranks, from `bind` until `close`.

    The other ranks need only its `name`. `peers` are the names of their sockets that are known. `refused` counts the
    rejected messages by reason.
    """

    def __init__(self) -> None:
        """Opens nothing: see `bind`."""
        self.name = bytes(NAME_BYTES)
        self.peers: list[bytes] = []
        self.refused: Counter[str] = Counter()
        self._base = self._folder = ""
        self._sockets: list[socket.socket] = []  # at most one, as in `_locks`
        self._locks: list[int] = []

    def bind(self) -> None:
        """Make the directory and the socket in it. Raises `ResourceError` if the system refuses it, `InvalidArgument`
        for a bad TRICOMM_SOCKET_DIR."""
        self._base = base()
        try:
            _remove_orphans(self._base, os.getpid())
            if not any(self._claim() for _ in range(_TRIES)):
                raise ResourceError(f"{self._base}: other processes remove what this one makes there")
            self._sockets.append(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC))
            self._sockets[0].setblocking(False)
            self._sockets[0].setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
            self._sockets[0].bind(_path(self._base, self.name))
        except OSError as error:
            raise ResourceError(
                f"no socket in {self._base} ({error.strerror}): the ranks pass memory through one; {VARIABLE} names "
                "another directory"
            ) from error

    def _claim(self) -> bool:
        """Make a directory and lock it; False if another process has taken it for an orphan."""
        self._remove()
        self.name = secrets.token_bytes(NAME_BYTES)
        self._folder = os.path.dirname(_path(self._base, self.name))
        os.mkdir(self._folder, 0o700)
        with suppress(FileNotFoundError, BlockingIOError):
            self._locks.append(os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
            fcntl.flock(self._locks[0], fcntl.LOCK_EX | fcntl.LOCK_NB)
            return os.path.samestat(os.stat(self._folder), os.fstat(self._locks[0]))
        return False

    def close(self) -> None:
        """Remove the directory and close the socket. Idempotent."""
        self._remove()
        while self._sockets:
            self._sockets.pop().close()

    def abandon(self) -> None:
        """Instead of `close` after a failure: also removes the sockets of killed ranks."""
        self.close()
        for name in self.peers:
            if died(name):
                _remove(os.path.dirname(_path(self._base, name)))

    def _remove(self) -> None:
        # Remove the name before closing the socket: a name without a socket means that its process has died.
        if self._folder:
            _remove(self._folder)
            self._folder = ""
        while self._locks:
            os.close(self._locks.pop())

    def exchange(
        self,
        sender: Sender,
        names: Sequence[bytes],
        mine: Sequence[int],
        take: Callable[[int, list[int]], None],
        deadline: Deadline,
        look: Callable[[], None],
    ) -> None:
        """Send the descriptors `mine` to all other ranks, whose sockets have `names`; receive the same number of each.

        `take(rank, descriptors)` is called once for each other rank; descriptors that it leaves in the list are closed.
        `look` is called periodically, and raises if waiting is useless. Raises `Unreachable` if a rank's socket is
        gone, `ResourceError` if a call is refused, `RendezvousError` that names the late ranks when `deadline` has
        passed, and the errors of `take` and `look`.
        """
        everyone = [rank for rank in range(sender.world_size) if rank != sender.rank]
        if not everyone:
            return
        self.peers = [names[rank] for rank in everyone]
        token = env.token()
        unsent = {rank: sender.record(rank).pack(token) for rank in everyone}
        waiting = set(everyone)
        next_look = time.monotonic() + _LOOK_SECONDS

        def received(rank: int, held: list[int]) -> bool:
            if rank not in waiting:
                return False
            waiting.discard(rank)
            take(rank, held)
            return True

        def complete() -> bool:
            nonlocal next_look
            for rank in list(unsent):
                if self._send(rank, names[rank], unsent[rank], mine, look):
                    del unsent[rank]
            for _ in range(_AT_ONCE):
                if not self._receive(sender, len(mine), token, received):
                    break
            if (unsent or waiting) and time.monotonic() >= next_look:
                look()
                next_look = time.monotonic() + _LOOK_SECONDS
            return not (unsent or waiting)

        clock = _UntilReadable(self._sockets[0])
        if not poll(complete, deadline.left, _PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS, clock=clock):
            late = sorted(waiting | set(unsent))
            raise RendezvousError(
                f"{sender.what}: timeout after {deadline.waited:.1f} s: no descriptors from or to rank(s) {late}"
            )

    def _send(self, rank: int, name: bytes, data: bytes, mine: Sequence[int], look: Callable[[], None]) -> bool:
        """False if there is no room for a message at the moment."""
        # The effective user: by default the kernel reports the real one.
        me = _CREDENTIALS.pack(os.getpid(), os.geteuid(), os.getegid())
        extra: list[tuple[int, int, Any]] = [
            (socket.SOL_SOCKET, socket.SCM_CREDENTIALS, me),
            (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", mine)),
        ]
        path = _path(self._base, name)
        try:
            _check_folder(os.path.dirname(path), rank)
            self._sockets[0].sendmsg([data], extra, socket.MSG_DONTWAIT, path)
        except BlockingIOError:
            return False
        except (FileNotFoundError, ConnectionRefusedError) as error:
            look()
            raise Unreachable(
                f"rank {rank}'s socket is not in {self._base}: it has given up, or it is in another container: then "
                f"{VARIABLE} must name a directory that all ranks share"
            ) from error
        except OSError as error:
            raise ResourceError(
                f"rank {rank}'s socket in {self._base} refuses descriptors: {error.strerror}"
            ) from error
        return True

    def _receive(
        self, sender: Sender, count: int, token: bytes | None, received: Callable[[int, list[int]], bool]
    ) -> bool:
        """Read a message and hand its descriptors to `received`; False if there is no message."""
        held, found = OwnedDescriptors(), True
        try:
            data, extra, flags = _read(self._sockets[0], held)
            rank = _authentic(data, extra, sender, token)
            if flags & socket.MSG_CTRUNC and len(held) < count:
                raise ResourceError(
                    f"rank {rank}'s descriptors were cut: the limit is "
                    f"{resource.getrlimit(resource.RLIMIT_NOFILE)[0]} open files; raise it (ulimit -n)"
                )
            if flags & socket.MSG_CTRUNC or len(held) != count:
                raise _Refused("descriptors")
            if not received(rank, held):
                raise _Refused("again")
        except BlockingIOError:
            found = False  # not `return`: an interrupt in `finally` would keep the error's frames (CPython 3.11)
        except OSError as error:
            raise ResourceError(f"no descriptors can be received: {error.strerror}") from error
        except _Refused as refusal:
            self.refused[str(refusal)] += 1
        finally:
            while held:
                os.close(held.pop())
        return found


class OwnedDescriptors(list[int]):
    """A list that closes the descriptors left in it when it is freed, because an interrupt may happen at any line."""

    def __del__(self) -> None:
        while self:
            os.close(self.pop())


class Unreachable(ResourceError):
    """A rank's socket is gone."""


class _Refused(Exception):
    """A message is rejected, with the reason."""


def base() -> str:
    """The parent of all sockets' directories: TRICOMM_SOCKET_DIR, else /dev/shm or /tmp.

    Raises `InvalidArgument` for one that other users could change or whose path is too long, `ResourceError` if none
    can be written.
    """
    chosen = env.text(VARIABLE)
    if chosen is None:
        usable = (path for path in _BASES if os.path.isdir(path) and os.access(path, os.W_OK | os.X_OK))
        chosen = next(usable, None)
        if chosen is None:
            raise ResourceError(f"none of {', '.join(_BASES)} can be written; {VARIABLE} names another directory")
    length = len(os.fsencode(_path(chosen, bytes(NAME_BYTES))))
    if length > _SUN_PATH_BYTES:
        most = _SUN_PATH_BYTES - (length - len(os.fsencode(chosen)))
        raise InvalidArgument(f"{VARIABLE}={chosen!r} is too long for a socket's path: at most {most} bytes")
    if not os.path.isabs(chosen):
        raise InvalidArgument(f"{VARIABLE}={chosen!r}: the absolute path of a directory is needed")
    try:
        files.check_directory(chosen)
    except OSError as error:
        raise InvalidArgument(f"{VARIABLE}={chosen!r}: {error.strerror}") from error
    return chosen


def died(name: bytes) -> bool:
    """True if the process whose socket has this name was killed: the name exists, and no socket is bound to it."""
    # Without `except`: after an interrupt in one, CPython 3.11 may never free the frames of the error.
    with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as probe:
        return probe.connect_ex(_path(base(), name)) == errno.ECONNREFUSED
    return False  # unknown


def _authentic(data: bytes, extra: list[tuple[int, int, bytes]], sender: Sender, token: bytes | None) -> int:
    """The rank that sent a message; raises `_Refused` if no rank of this group did."""
    if not _of_this_user(extra):
        raise _Refused("user")
    try:
        record = records.parse(data, Delivery, None, token)
    except RendezvousError as error:
        raise _Refused("record") from error
    if not _same(record.nonce, sender.nonce):
        raise _Refused("nonce")
    body = record.body
    if (record.world_size, body.to, body.what) != (sender.world_size, sender.rank, sender.what):
        raise _Refused("address")
    return record.rank


_same = hmac.compare_digest


def _of_this_user(extra: list[tuple[int, int, bytes]]) -> bool:
    """Whether this user sent the message, according to the kernel, which translates uids from other user namespaces."""
    told = [_CREDENTIALS.unpack(content) for _, kind, content in extra if kind == socket.SCM_CREDENTIALS]
    return [uid for _, uid, _ in told] == [os.geteuid()]


def _read(source: socket.socket, held: list[int]) -> tuple[bytes, list[tuple[int, int, bytes]], int]:
    """Read the next message; its descriptors are added to `held`. Raises `BlockingIOError` if there is none."""
    messages = _Messages()  # owns a message at once: no interrupt can come inside `extend`
    messages.extend(map(source.recvmsg, (_MESSAGE_BYTES,), (_ROOM,), (socket.MSG_CMSG_CLOEXEC,)))
    data, extra, flags, _ = messages[0]
    messages.hand_over(held)
    return data, extra, flags


class _Messages(list[tuple[bytes, list[tuple[int, int, bytes]], int, object]]):
    """A list for the result of `recvmsg`; it closes descriptors that are not handed over when it is freed."""

    def hand_over(self, held: list[int]) -> None:
        """Add all descriptors to `held`, which owns them from then on, in one step."""
        contents = (c for message in self for *kind, c in message[1] if kind == [socket.SOL_SOCKET, socket.SCM_RIGHTS])
        received = [fd for content in contents for fd in array.array("i", content[: len(content) // 4 * 4])]
        held.extend(itertools.chain(received, iter(self.clear, None)))

    def __del__(self) -> None:
        if self:
            self.hand_over(OwnedDescriptors())


class _UntilReadable:
    """A clock whose pauses end when the socket has a message."""

    def __init__(self, source: socket.socket) -> None:
        self._poll = select.poll()
        self._poll.register(source, select.POLLIN)

    def monotonic(self) -> float:
        return time.monotonic()

    def sleep(self, seconds: float, /) -> None:
        self._poll.poll(max(1.0, 1e3 * seconds))


def _path(parent: str, name: bytes) -> str:
    return f"{parent.rstrip('/')}/{_PREFIX}{name.hex()}/{_SOCKET}"


def _check_folder(folder: str, rank: int) -> None:
    status = os.lstat(folder)
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
        whose = f"uid {status.st_uid}, mode {stat.S_IMODE(status.st_mode):o}"
        raise ResourceError(
            f"rank {rank}'s directory of sockets is not of uid {os.geteuid()} alone ({whose}): all ranks must run as "
            "the same user"
        )


def _remove(folder: str) -> None:
    for remove, path in ((os.unlink, f"{folder}/{_SOCKET}"), (os.rmdir, folder)):
        with suppress(OSError):  # gone, or not empty: NFS keeps a file for an open socket
            remove(path)


@cache
def _remove_orphans(parent: str, pid: int) -> None:
    """Remove this user's directories whose processes were killed; once per process, because it scans `parent`."""
    with os.scandir(parent) as entries:
        folders = [entry.path for entry in entries if _NAME.fullmatch(entry.name)]
    for folder in folders:
        held = OwnedDescriptors()
        try:
            held.append(os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC))
            if os.fstat(held[0]).st_uid == os.geteuid():
                fcntl.flock(held[0], fcntl.LOCK_EX | fcntl.LOCK_NB)
                _remove(folder)
        except OSError:
            pass  # in use, or gone meanwhile
        finally:
            while held:
                os.close(held.pop())
