"""Memory that processes of one user share, and that does not outlive them: sealed memfds, passed between processes.

Segments have no name in a file system, so none can be guessed, and none is left when the whole job is killed. Memory is
allocated when the segment is made, so a lack of memory is an error here and never a SIGBUS later. The seals keep every
process from shrinking it afterwards, and other processes from writing to a segment that only its maker may write.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import resource
import stat
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from tricomm.errors import GroupAborted, InvalidArgument, ResourceError
from tricomm.store import process

MAX_NBYTES = 1 << 46

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
_SEAL_FUTURE_WRITE = 0x10  # Linux 5.1; the fcntl module does not know it yet
_MFD_NOEXEC_SEAL = 0x8  # Linux 6.3; the os module does not know it yet
_MADV_POPULATE_WRITE = 23  # Linux 5.14; the mmap module does not know it yet
_MAP_FAILED = ctypes.c_void_p(-1).value
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.mremap.restype = ctypes.c_void_p
_libc.mremap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p]
_MREMAP_MAYMOVE, _MREMAP_FIXED = 1, 2


class Segment:
    """Shared memory mapped here. The mapping ends with `close`, or with the last view of `buffer` if that is later."""

    def __init__(self, nbytes: int) -> None:
        """Opens nothing: see `create` and `attach`."""
        self._fds: list[int] = []  # at most one; popped and closed on one line, so that no interrupt leaks it
        self.nbytes = nbytes
        self.address = 0
        self._buffer: memoryview | None = None

    @classmethod
    def create(cls, name: str, nbytes: int, shared: bool = True) -> Segment:
        """Zeroed memory of `nbytes` bytes; `name` shows up in /proc/<pid>/maps and nowhere else. If it is not `shared`,
        others can only read it.

        Raises `InvalidArgument` for a bad size, `ResourceError` if memory or a descriptor is refused.
        """
        _check_size(nbytes)
        with cls(nbytes)._being_made() as segment:
            # An interrupt may happen at any line, so a descriptor has an owner before the next line.
            segment._fds.append(memfd(name))
            os.fchmod(segment.fd, 0o600)
            _refuse_if_short(nbytes)
            os.posix_fallocate(segment.fd, 0, nbytes)
            segment._map(segment.fd, readonly=False)
            _seal(segment.fd, shared)
        return segment

    @classmethod
    def attach(cls, descriptors: list[int], nbytes: int, readonly: bool, sealed: bool = True) -> Segment:
        """Map the segment of the last of `descriptors`, which is removed from the list and closed.

        Raises `ResourceError` if its size or owner is wrong, or its seals are missing: its owner could then shrink it,
        and touching it would be fatal. Only the user's own memory may lack seals (`sealed=False`).
        """
        with cls(nbytes)._being_made() as segment:
            segment._fds.append(descriptors.pop())
            _check_size(nbytes)
            _check_attached(segment.fd, nbytes, sealed)
            segment._map(segment.fd, readonly)
            segment.close_fd()
        return segment

    @contextmanager
    def _being_made(self) -> Iterator[Segment]:
        """A context manager that closes the segment if making it fails."""
        try:
            yield self
        except BaseException as error:
            self.close()
            if isinstance(error, OSError):
                raise _refused(error, self.nbytes) from error
            raise

    def __del__(self) -> None:
        if hasattr(self, "_fds"):
            self.close_fd()

    def _map(self, fd: int, readonly: bool) -> None:
        # Not mmap.mmap: that keeps another descriptor, and cannot be closed while a view exists.
        protection = mmap.PROT_READ if readonly else mmap.PROT_READ | mmap.PROT_WRITE
        address, owned = None, None
        try:
            address = _libc.mmap(None, self.nbytes, protection, mmap.MAP_SHARED, fd, 0)
            if address is None or address == _MAP_FAILED:
                address = None
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
            memory = (ctypes.c_char * self.nbytes).from_address(address)
            # Every view refers to `memory`, so the pages are unmapped with the last view, and not before.
            owned = weakref.finalize(memory, _libc.munmap, address, self.nbytes)
            owned.atexit = False
            view = memoryview(memory).cast("B")
            self.address, self._buffer = address, view.toreadonly() if readonly else view
        except BaseException:
            if owned is None and address is not None:
                _libc.munmap(address, self.nbytes)
            raise

    @property
    def buffer(self) -> memoryview:
        """The memory as bytes. Views of it stay valid after `close`. Raises `GroupAborted` after `close`."""
        if self._buffer is None:
            raise GroupAborted("this shared segment is closed")
        return self._buffer

    @property
    def fd(self) -> int:
        """The descriptor to pass to others; -1 for an attached segment and after `close_fd` or `close`."""
        return self._fds[0] if self._fds else -1

    def give_back(self) -> None:
        """Return the memory to the system, for all processes that have it mapped; the mappings stay and read as zeros.
        Raises `ResourceError` if that is refused."""
        self._advise(mmap.MADV_REMOVE, "shared memory cannot be given back (pages locked by mlock?)")

    def take_again(self) -> None:
        """Allocate zeroed memory after `give_back`, at once as in `create`. Raises `ResourceError` if it is refused."""
        self.give_back()  # drops data that was written meanwhile
        try:
            _refuse_if_short(self.nbytes)
        except OSError as error:
            raise _refused(error, self.nbytes) from error
        self._advise(_MADV_POPULATE_WRITE, "shared memory refused", errno.EINVAL)  # older kernels: on first access

    def _advise(self, advice: int, what: str, allowed: int = 0) -> None:
        if _libc.madvise(self.address, self.nbytes, advice) and ctypes.get_errno() != allowed:
            number = ctypes.get_errno()
            raise ResourceError(f"{what}: madvise: {os.strerror(number)}; {self.nbytes} bytes at {self.address:#x}")

    def close_fd(self) -> None:
        """Close the descriptor, so that no further process can attach; those that have attached keep their mapping."""
        while self._fds:
            os.close(self._fds.pop())

    def close(self) -> None:
        """Idempotent. In a forked child it releases only the child's copy."""
        self.close_fd()
        self._buffer = None


def map_again(source: int, nbytes: int, address: int) -> None:
    """Map the shared memory at `source` a second time, at `address`, replacing the shared memory there in one step. The
    owner of each address unmaps it, as before. Raises `ResourceError` if the system refuses it."""
    flags = _MREMAP_MAYMOVE | _MREMAP_FIXED
    if _libc.mremap(source, 0, nbytes, flags, address) != address:  # old size 0: keep the mapping at `source`
        number = ctypes.get_errno()
        raise ResourceError(f"mremap: {os.strerror(number)}; {nbytes} bytes of shared memory at {address:#x}")


def available_memory() -> int:
    """Bytes that can still be allocated here, limited by the machine or a control group.

    Raises `ResourceError` without /proc, `OSError` if it cannot be read now."""
    free = MAX_NBYTES
    try:
        for line in process.read("/proc/meminfo").splitlines():
            if line.startswith(b"MemAvailable:"):
                free = int(line.split()[1]) * 1024
        places = [place for line in process.read("/proc/self/cgroup").splitlines() for place in _memory_groups(line)]
    except FileNotFoundError as error:
        raise ResourceError(f"{error.filename} cannot be read: mount /proc in this container") from error
    for folder, limit, used, reclaimable in places:
        with suppress(FileNotFoundError, NotADirectoryError, PermissionError, ValueError):  # not visible, or no limit
            left = int(process.read(f"{folder}/{limit}")) - int(process.read(f"{folder}/{used}"))
            kept = dict(line.split() for line in process.read(f"{folder}/memory.stat").splitlines())
            free = min(free, left + int(kept.get(reclaimable, 0)))
    return max(free, 0)


def _memory_groups(line: bytes) -> Iterator[tuple[str, str, str, bytes]]:
    """The control groups that limit the memory of this process, according to a line of /proc/self/cgroup: its group and
    the enclosing ones. For each the folder, and the names of its limit, of its use, and of the part that is cached
    files."""
    _, controllers, path = line.decode(errors="surrogateescape").split(":", 2)
    if controllers == "":
        names = "/sys/fs/cgroup", "memory.max", "memory.current", b"inactive_file"
    elif "memory" in controllers.split(","):
        names = "/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", b"total_inactive_file"
    else:
        return
    parts = [part for part in path.split("/") if part not in ("", "..")]  # "..": outside of this cgroup namespace
    for depth in range(len(parts), -1, -1):
        yield "/".join([names[0], *parts[:depth]]), *names[1:]


def memfd(name: str) -> int:
    """A new memfd that takes seals, without memory yet."""
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    try:
        return os.memfd_create(name, flags | _MFD_NOEXEC_SEAL)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return os.memfd_create(name, flags)


def _check_size(nbytes: int) -> None:
    if not 1 <= nbytes <= MAX_NBYTES:
        raise InvalidArgument(f"a shared segment of {nbytes} bytes; allowed are 1 to {MAX_NBYTES}")


def _seal(fd: int, shared: bool) -> None:
    seals = _SEALS | fcntl.F_SEAL_SEAL
    try:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals if shared else seals | _SEAL_FUTURE_WRITE)
    except OSError as error:
        if shared or error.errno != errno.EINVAL:
            raise
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)


def _check_attached(fd: int, nbytes: int, must_be_sealed: bool) -> None:
    status = os.fstat(fd)
    try:
        sealed = not must_be_sealed or fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS == _SEALS
    except OSError as error:
        raise ResourceError(f"what was passed is not shared memory ({error.strerror})") from error
    if not stat.S_ISREG(status.st_mode) or status.st_size != nbytes:
        raise ResourceError(f"the segment has {status.st_size} bytes, expected {nbytes}: it was replaced")
    if status.st_uid != os.geteuid():
        raise ResourceError(
            f"the segment belongs to uid {status.st_uid}, this process runs as {os.geteuid()}: use one user"
        )
    if not sealed:
        raise ResourceError("the segment is not sealed: its owner could shrink it under us")


def _refuse_if_short(nbytes: int) -> None:
    # A memfd has no limit, so without this check the out-of-memory killer would act.
    if nbytes > available_memory():
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))


def _refused(error: OSError, nbytes: int) -> ResourceError:
    remedy = {
        errno.EMFILE: f"the limit is {resource.getrlimit(resource.RLIMIT_NOFILE)[0]} open files; raise it (ulimit -n), "
        "or close files",
        errno.ENFILE: "the machine's table of open files is full",
        errno.EFBIG: "raise the limit of file size (ulimit -f)",
    }.get(error.errno or 0, "ask for a smaller arena, or allow more memory (docker: --memory, --shm-size; ulimit -v)")
    # Reading the free memory opens files, which may fail for lack of descriptors.
    free = "unknown" if error.errno in (errno.EMFILE, errno.ENFILE) else available_memory()
    needed = f"{nbytes} bytes needed, {free} bytes free"
    return ResourceError(f"shared memory refused ({error.strerror}): {needed}; {remedy}")
