"""Who a process is, so that a recycled pid, another host or another PID namespace is never taken for a peer."""

from __future__ import annotations

import hashlib
import os
import socket
import uuid
from pathlib import Path

_STATE_FIELD, _START_FIELD = 3, 22  # of /proc/<pid>/stat, counted from 1 as in proc(5)
_FIRST_FIELD_AFTER_NAME = 3


def start_time(pid: int) -> int | None:
    """When process `pid` started, in clock ticks since boot; None where it has ended (a zombie has) or is unknown."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    # The name in field 2 may hold spaces and brackets: count from behind its last bracket.
    fields = stat.rpartition(b")")[2].split()
    if len(fields) <= _START_FIELD - _FIRST_FIELD_AFTER_NAME:  # cut short: the process is just going
        return None
    if fields[_STATE_FIELD - _FIRST_FIELD_AFTER_NAME] in (b"Z", b"X"):
        return None
    return int(fields[_START_FIELD - _FIRST_FIELD_AFTER_NAME])


def alive(pid: int, started: int) -> bool:
    """True while the process `pid` that started at `started` runs (or is stopped); False for a later one."""
    return start_time(pid) == started


def boot_id() -> bytes:
    """16 bytes that tell this boot of this host from every other."""
    try:
        return uuid.UUID(Path("/proc/sys/kernel/random/boot_id").read_text().strip()).bytes
    except (OSError, ValueError):  # a sandbox without it: the host's name is the next best
        return hashlib.sha256(socket.gethostname().encode()).digest()[:16]


def pid_namespace() -> int:
    """Number of the PID namespace, or 0 where the system does not say."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0
