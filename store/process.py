"""The identity of a process, so that a process with a recycled pid, on another host or in another namespace is never
taken for a peer."""

from __future__ import annotations

import functools
import hashlib
import os
import resource
import select
import socket
import uuid
import weakref
from pathlib import Path

from tricomm import env
from tricomm.errors import ResourceError
from tricomm.store.records import Capabilities, RankRecord

_STATE_FIELD, _CPU_FIELDS, _START_FIELD = 3, (14, 15), 22  # of /proc/<pid>/stat, counted from 1 as in proc(5)
_FIRST_FIELD_AFTER_NAME = 3
ENDED, STOPPED = "ended", "stopped"
_MANY = 1 << 40

_forks = 0


def _child() -> None:
    global _forks
    _forks += 1


os.register_at_fork(after_in_child=_child)


def forks() -> int:
    """The number of forks since this module was imported. It distinguishes a child from its parent, and is faster than
    `os.getpid()`, which is a system call."""
    return _forks


def read(path: str) -> bytes:
    """The content of a short file of /proc or /sys. Raises `OSError`."""
    held: list[int] = []
    try:
        held.append(os.open(path, os.O_RDONLY | os.O_CLOEXEC))  # on one line: closed even after an interrupt
        return os.read(held[0], 1 << 16)
    finally:
        while held:
            os.close(held.pop())


def start_time(pid: int) -> int | None:
    """When process `pid` started, in clock ticks since boot; None if it has ended (a zombie has) or is unknown."""
    try:
        stat = read(f"/proc/{pid}/stat")
    except OSError:
        return None
    return _parse_start(stat)


def state(pid: int, started: int) -> str | None:
    """The state of process `pid` that started at `started`: `ENDED`, `STOPPED` (by a signal or a debugger), or None if
    it runs or its state is unknown. A later process with the same pid is not taken for it.

    `ENDED` only if /proc confirms it: an error here, such as a lack of descriptors, says nothing about a peer.
    """
    try:
        stat = read(f"/proc/{pid}/stat")
    except (FileNotFoundError, ProcessLookupError):
        return ENDED
    except OSError:
        return None
    if _parse_start(stat) != started:
        return ENDED
    return STOPPED if stat.rpartition(b")")[2].split()[0] in (b"T", b"t") else None


def _parse_start(stat: bytes) -> int | None:
    # The name in field 2 may contain spaces and brackets: count from after its last bracket.
    fields = stat.rpartition(b")")[2].split()
    if fields[_STATE_FIELD - _FIRST_FIELD_AFTER_NAME] in (b"Z", b"X"):
        return None
    return int(fields[_START_FIELD - _FIRST_FIELD_AFTER_NAME])


def state_of(one: Capabilities | RankRecord) -> str | None:
    """`state` of a process of this PID namespace; None for any other."""
    return state(one.pid, one.start_time) if (one.node, one.pid_namespace) == (node_id(), pid_namespace()) else None


class Watched:
    """A process that is watched through a pidfd, so that a later process with its pid is never taken for it.

    If there is no pidfd (no descriptor left, an old kernel), its entry in /proc is read each time. The pidfd is closed
    with the last reference.
    """

    def __init__(self, pid: int, started: int, pidfd: list[int] | None = None, near: bool = True) -> None:
        """`pidfd`: a list whose descriptor, if it has one, is removed and kept. `near`: the process is in this PID
        namespace."""
        self._pid, self._started, self._near = pid, started, near
        self._ended = False
        self._fds: list[int] = []
        if pidfd:
            self._fds.append(pidfd.pop())
            return
        try:
            self._fds.append(os.pidfd_open(pid))  # on one line, so that it has an owner even after an interrupt
        except ProcessLookupError:
            self._ended = True
        except OSError:
            return
        self._ended = self._ended or state(pid, started) == ENDED

    def __del__(self) -> None:
        for fd in self._fds:
            os.close(fd)

    def alive(self) -> bool:
        """True while the process runs or is stopped, or if its state is unknown; False once it has ended."""
        if not self._ended:
            self._ended = self._readable() if self._fds else state(self._pid, self._started) == ENDED
        return not self._ended

    def stopped(self) -> bool:
        """True if the process is known to be stopped; nothing is known of another PID namespace."""
        return self._near and state(self._pid, self._started) == STOPPED

    def cpu_ticks(self) -> int:
        """Clock ticks for which the process has run on a CPU; 0 if that is unknown, as in another PID namespace."""
        try:
            fields = read(f"/proc/{self._pid}/stat").rpartition(b")")[2].split() if self._near else []
        except OSError:
            return 0
        return sum(int(fields[field - _FIRST_FIELD_AFTER_NAME]) for field in _CPU_FIELDS if fields)

    def _readable(self) -> bool:
        poll = select.poll()  # not shared, because two threads cannot use one at the same time
        poll.register(self._fds[0], select.POLLIN)
        return bool(poll.poll(0))


_watched: weakref.WeakValueDictionary[tuple[int, int, int], Watched] = weakref.WeakValueDictionary()


def watch(pid: int, started: int, namespace: int | None = None, pidfd: list[int] | None = None) -> Watched:
    """The process, watched through one pidfd for all callers.

    `pid` is its number in the PID namespace `namespace` (None: this one). `pidfd`, a list of at most one, becomes
    empty if the descriptor in it is the one that is needed.
    """
    here = pid_namespace()
    key = (here if namespace is None else namespace, pid, started)
    watched = _watched.get(key)
    return watched if watched is not None else _watched.setdefault(key, Watched(pid, started, pidfd, key[0] == here))


def ended() -> int:
    """The number of watched processes that have ended."""
    return sum(not watched.alive() for watched in list(_watched.values()))


def descriptors_left() -> int:
    """The number of descriptors that this process may still open: its soft limit minus the open ones. Raises
    `ResourceError` without /proc."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return _MANY
    try:
        return max(0, soft - len(os.listdir("/proc/self/fd")) + 1)
    except FileNotFoundError as error:
        raise ResourceError("/proc/self/fd cannot be read: mount /proc in this container") from error
    except OSError:  # not even one for the list
        return 0


@functools.cache
def boot_id() -> bytes:
    """16 bytes that tell this boot of this host from every other. Raises `ResourceError` if they cannot be read now."""
    path = "/proc/sys/kernel/random/boot_id"
    try:
        return uuid.UUID(Path(path).read_text().strip()).bytes
    except (FileNotFoundError, PermissionError, ValueError):  # a sandbox without it: use the host's name
        return hashlib.sha256(socket.gethostname().encode()).digest()[:16]
    except OSError as error:  # not the host's name, because other ranks have read the boot id
        raise ResourceError(f"{path} cannot be read: {error.strerror}") from error


def node_id() -> bytes:
    """16 bytes that are equal exactly for the processes of one node: from TRICOMM_NODE_ID, else the boot id."""
    name = env.text("TRICOMM_NODE_ID")
    return boot_id() if name is None else hashlib.sha256(os.fsencode(name)).digest()[:16]


def pid_namespace() -> int:
    """Number of the PID namespace, or 0 if it is unknown."""
    return _namespace("pid")


def user_namespace() -> int:
    """Number of the user namespace, or 0 if it is unknown."""
    return _namespace("user")


def _namespace(kind: str) -> int:
    try:
        return os.stat(f"/proc/self/ns/{kind}").st_ino
    except OSError:
        return 0


def outside_user(uid: int) -> bool:
    """True if this user namespace does not map `uid`: it may then stand for any user outside of the namespace."""
    try:
        spans = [tuple(map(int, line.split())) for line in read("/proc/self/uid_map").splitlines()]
    except (OSError, ValueError):
        return False
    return not any(first <= uid < first + count for first, _, count in spans)


def is_pidfd(fd: int) -> bool:
    """True if the descriptor `fd` of this process refers to a process."""
    return b"\nPid:" in read(f"/proc/self/fdinfo/{fd}")
