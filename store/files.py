"""Opens files safely in directories that other users may also write to.

Only a regular file of this user is opened (or of root, if a caller allows it): no link, no FIFO and no file of another
user. Files named on the command line are opened without these checks.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import IO

from tricomm.deadline import poll
from tricomm.errors import InvalidArgument
from tricomm.store import process

_PAUSE_SECONDS = 0.02


def check_directory(path: str | Path) -> None:
    """Raise `OSError` unless `path` is a directory in which no user but this one and root can replace files.

    The sticky bit is enough: with it only the owner of a file can replace it, and each file is checked when it is
    opened.
    """
    for status in (os.lstat(path), found := os.stat(path)):  # of a link, both the link and its target
        owned = status.st_uid in (0, os.geteuid()) or process.outside_user(status.st_uid)
        shared = stat.S_ISDIR(status.st_mode) and status.st_mode & 0o022 and not status.st_mode & stat.S_ISVTX
        if not owned or shared:
            raise PermissionError(
                errno.EPERM,
                f"other users than uid {os.geteuid()} can change what is in it ({_whose(status)}): use a directory of "
                "your own (chmod go-w), or one with the sticky bit",
                str(path),
            )
    if not stat.S_ISDIR(found.st_mode):
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path))


def refuse_shared(path: Path, what: str) -> None:
    """Raises `InvalidArgument` if other users can replace files in the directory `path`, whose purpose is `what`. A
    directory that does not exist is accepted."""
    try:
        check_directory(path)
    except FileNotFoundError:
        pass  # it is made with the first file
    except OSError as error:
        raise InvalidArgument(f"{what} in {path}: {error.strerror}") from None


def make_directory(path: Path) -> None:
    """Make a directory for this user alone if there is none, and check it. Raises `OSError`."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    check_directory(path)


def opened(path: str | Path, mode: str = "rb", root: bool = False) -> IO[bytes]:
    """Open a file of this user, or with `root` also one of root. `mode` is a binary mode of `open`; a new file has
    mode 0600. Raises `OSError` for a file of another user, a link, or a file that is not regular.
    """
    return open(path, mode, opener=partial(_own, (0, os.geteuid()) if root else (os.geteuid(),)))


def _own(owners: tuple[int, ...], path: str, flags: int) -> int:
    held: list[int] = []
    try:
        # A FIFO or a terminal would wait for its other end.
        held.append(os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY, 0o600))
        status = os.fstat(held[0])
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, f"it is no regular file ({_whose(status)})", path)
        if status.st_uid not in owners:
            raise PermissionError(
                errno.EPERM, f"it belongs to another user than uid {os.geteuid()} ({_whose(status)})", path
            )
        return held.pop()
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(errno.ELOOP, "it is a symbolic link, which is not followed here", path) from None
        raise
    finally:
        while held:
            os.close(held.pop())


def _whose(status: os.stat_result) -> str:
    return f"uid {status.st_uid}, mode {stat.S_IMODE(status.st_mode):o}"


def read(path: str | Path, most: int, root: bool = False, shared: bool = True) -> bytes:
    """The content of a file that `opened` accepts. Raises `OSError` as it does, for more than `most` bytes, and unless
    `shared` for a file that its group or others can write."""
    with opened(path, root=root) as file:
        status = os.fstat(file.fileno())
        if not shared and status.st_mode & 0o022:
            raise PermissionError(errno.EPERM, f"other users can write it ({_whose(status)}): chmod go-w", str(path))
        content = file.read(most + 1)
    if len(content) > most:
        raise OSError(errno.EFBIG, f"it has more than {most} bytes", str(path))
    return content


def replace(path: str | Path, content: bytes) -> None:
    """Write a file atomically; it replaces any file or link of that name. Raises `OSError`, as for a device."""
    with suppress(FileNotFoundError):
        kind = os.lstat(path).st_mode
        if stat.S_ISCHR(kind) or stat.S_ISBLK(kind):
            raise OSError(errno.EINVAL, "a device is not replaced by a file", str(path))
    partial_file = f"{path}.{secrets.token_hex(8)}.part"  # no link of that name can be there
    try:
        with open(partial_file, "xb", opener=lambda name, flags: os.open(name, flags | os.O_NOFOLLOW, 0o644)) as file:
            file.write(content)
        os.replace(partial_file, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(partial_file)
        raise


@contextmanager
def locked(path: str | Path, seconds: float) -> Iterator[None]:
    """Hold the lock file `path`. Raises `OSError`; `TimeoutError` if another process holds it for `seconds`."""
    with opened(path, "ab") as file:
        if not poll(partial(_lock, file.fileno()), seconds, _PAUSE_SECONDS):
            raise TimeoutError(errno.ETIMEDOUT, f"another process has held it for {seconds:g} s", str(path))
        try:
            yield
        finally:  # the close alone would leave it to a child that was forked here and has the file open
            fcntl.flock(file.fileno(), fcntl.LOCK_UN)


def _lock(fd: int) -> bool:
    with suppress(BlockingIOError):
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    return False
