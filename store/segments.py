"""Memory that processes of one user share, and that nothing outlives: sealed memfds, reached through /proc.

There is no name in a file system: nothing to guess, and nothing left behind when the whole job is killed. Space is
taken when the segment is made, so a full machine is an error here and never a SIGBUS later; the seals keep anybody
from shrinking it afterwards.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import stat
import weakref
from contextlib import ExitStack
from pathlib import Path

from tricomm.errors import GroupAborted, InvalidArgument, ResourceError
from tricomm.store import process

MAX_NBYTES = 1 << 46

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
_MFD_NOEXEC_SEAL = 0x8  # Linux 6.3; the os module does not know it yet
_MAP_FAILED = ctypes.c_void_p(-1).value
_REACH = (
    "the ranks must run as the same user and share a PID namespace (docker: --pid=host, or one container for all ranks)"
)
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


class Segment:
    """Shared memory mapped here. The mapping goes with `close`, or with the last view of `buffer` if that is later."""

    def __init__(self, fd: int, nbytes: int, buffer: memoryview, address: int) -> None:
        self.nbytes = nbytes
        self.address = address
        self._fd = fd
        self._buffer: memoryview | None = buffer

    @classmethod
    def create(cls, name: str, nbytes: int) -> Segment:
        """Zeroed memory of `nbytes` bytes; `name` shows up in /proc/<pid>/maps and nowhere else.

        Raises `InvalidArgument` for a bad size, `ResourceError` where memory or a descriptor is refused.
        """
        _check_size(nbytes)
        with ExitStack() as undo:
            try:
                fd = _memfd(name)
                undo.callback(os.close, fd)
                os.fchmod(fd, 0o600)
                _refuse_if_short(nbytes)
                os.posix_fallocate(fd, 0, nbytes)
                fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS | fcntl.F_SEAL_SEAL)
                buffer, address = _map(fd, nbytes, readonly=False)
            except OSError as error:
                raise _refused(error, nbytes) from error
            undo.pop_all()
        return cls(fd, nbytes, buffer, address)

    @classmethod
    def attach(cls, pid: int, start_time: int, fd: int, nbytes: int, readonly: bool) -> Segment:
        """Map the segment that process `pid` (started at `start_time`) holds as descriptor `fd`.

        Raises `ResourceError` where it cannot be reached or is not what the record said: another process by now,
        another size, owner, or no seals. Keeps no descriptor.
        """
        _check_size(nbytes)
        what = f"segment {fd} of pid {pid}"
        where = f"/proc/{'self' if pid == os.getpid() else pid}/fd/{fd}"
        with ExitStack() as undo:
            try:
                if not os.readlink(where).startswith("/memfd:"):
                    raise ResourceError(f"{what} is not shared memory: it was closed, or its number is reused")
                access = os.O_RDONLY if readonly else os.O_RDWR
                handle = os.open(where, access | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
                undo.callback(os.close, handle)
                _check_attached(handle, nbytes, what)
                # Looked at after the open: a pid recycled before or while we opened shows here.
                if not process.alive(pid, start_time):
                    raise ResourceError(f"{what}: that process has ended, or lives in another PID namespace; {_REACH}")
                buffer, address = _map(handle, nbytes, readonly)
            except OSError as error:
                if error.errno in (errno.ENOENT, errno.ESRCH, errno.EACCES, errno.EPERM):
                    raise ResourceError(f"{what} cannot be opened ({error.strerror}): {_REACH}") from error
                raise _refused(error, nbytes) from error
        return cls(-1, nbytes, buffer, address)

    @property
    def buffer(self) -> memoryview:
        """The memory as bytes. Views of it stay valid after `close`. Raises `GroupAborted` after `close`."""
        if self._buffer is None:
            raise GroupAborted("this shared segment is closed")
        return self._buffer

    @property
    def fd(self) -> int:
        """The descriptor that others attach by; -1 for an attached segment and after `close_fd` or `close`."""
        return self._fd

    def close_fd(self) -> None:
        """From now on nobody can attach any more; who has, keeps it."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def close(self) -> None:
        """Idempotent. In a forked child it lets go of the child's copy only."""
        self.close_fd()
        self._buffer = None


def available_memory() -> int:
    """Bytes that can still be allocated here: the machine's, or the container's where that is less."""
    free = MAX_NBYTES
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            free = int(line.split()[1]) * 1024
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        if limit != "max":
            free = min(free, int(limit) - int(Path("/sys/fs/cgroup/memory.current").read_text()))
    except OSError:
        pass  # no cgroup v2 here
    return max(free, 0)


def _memfd(name: str) -> int:
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    try:
        return os.memfd_create(name, flags | _MFD_NOEXEC_SEAL)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return os.memfd_create(name, flags)


def _map(fd: int, nbytes: int, readonly: bool) -> tuple[memoryview, int]:
    # Not mmap.mmap: that keeps a descriptor of its own, and cannot be closed while somebody holds a view.
    protection = mmap.PROT_READ if readonly else mmap.PROT_READ | mmap.PROT_WRITE
    address = _libc.mmap(None, nbytes, protection, mmap.MAP_SHARED, fd, 0)
    if address is None or address == _MAP_FAILED:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    memory = (ctypes.c_char * nbytes).from_address(address)
    # Every view holds on to `memory`, so the pages go when the last view has gone, and not before.
    weakref.finalize(memory, _libc.munmap, address, nbytes).atexit = False
    view = memoryview(memory).cast("B")
    return (view.toreadonly() if readonly else view), address


def _check_size(nbytes: int) -> None:
    if not 1 <= nbytes <= MAX_NBYTES:
        raise InvalidArgument(f"a shared segment of {nbytes} bytes; allowed are 1 to {MAX_NBYTES}")


def _check_attached(fd: int, nbytes: int, what: str) -> None:
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode) or found.st_size != nbytes:
        raise ResourceError(f"{what} has {found.st_size} bytes, expected {nbytes}: it was replaced")
    if found.st_uid != os.geteuid():
        raise ResourceError(f"{what} belongs to uid {found.st_uid}, this process runs as {os.geteuid()}; {_REACH}")
    if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
        raise ResourceError(f"{what} is not sealed: its owner could shrink it under us")


def _refuse_if_short(nbytes: int) -> None:
    # A memfd has no limit of its own: without this the out-of-memory killer would answer.
    if nbytes > available_memory():
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))


def _refused(error: OSError, nbytes: int) -> ResourceError:
    remedy = {
        errno.EMFILE: "raise the limit of open files (ulimit -n)",
        errno.ENFILE: "the machine's table of open files is full",
        errno.EFBIG: "raise the limit of file size (ulimit -f)",
    }.get(
        error.errno or 0,
        "ask for a smaller arena, or allow more memory (docker: --memory, --shm-size; ulimit -v)",
    )
    # Counting free memory opens files, which may be the very thing that is refused.
    free = "unknown" if error.errno in (errno.EMFILE, errno.ENFILE) else available_memory()
    needed = f"{nbytes} bytes needed, {free} bytes free"
    return ResourceError(f"shared memory refused ({error.strerror}): {needed}; {remedy}")
