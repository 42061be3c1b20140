"""Opens the Store over which ranks connect: one of torch's, with our time limits, and never on a wildcard address.

`TCPStore("127.0.0.1", ...)` listens on every interface. So if this process hosts the store, it binds a socket to the
given address itself and passes it to torch.
"""

from __future__ import annotations

import os
import socket
import stat
import threading
from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta
from urllib.parse import SplitResult, parse_qsl, urlsplit

from torch._C._distributed_c10d import FileStore, PrefixStore, Store, TCPStore

from tricomm import env
from tricomm.deadline import Deadline, poll
from tricomm.errors import InvalidArgument, RendezvousError
from tricomm.store import files
from tricomm.store.bounded_store import BoundedThread, first_line
from tricomm.store.records import MAX_WORLD_SIZE

_LOOPBACK = "127.0.0.1"
_RETRY_SECONDS = 0.02
_GRACE_SECONDS = 0.25  # added to the limit of calls; name look-ups have no limit
_QUERY = ("rank", "world_size")
# A store that is hosted here lives until the process ends: a peer may already use it for the next group.
_hosted: dict[tuple[int, str, int], TCPStore] = {}  # the pid is part of the key, because a forked child has no server
_files: dict[tuple[int, str, int], FileStore] = {}
_hosting = threading.Lock()


def open_store(url: str, rank: int | None, world_size: int | None, timeout: float) -> tuple[Store, int, int]:
    """The store at `url`, this process's rank, and the number of ranks.

    `url` is "env://" (MASTER_ADDR, MASTER_PORT), "tcp://host:port" or "file:///path"; `rank` and `world_size` are
    taken from its query (?rank=0&world_size=2), from the arguments, or from RANK and WORLD_SIZE. Rank 0 hosts a
    TCPStore on the given address, and nowhere else, unless torchrun's agent hosts one already.

    Raises `InvalidArgument` that names the missing or wrong part, `RendezvousError` within `timeout` + 1 seconds if the
    store cannot be reached or hosted.
    """
    if not isinstance(url, str):
        raise InvalidArgument(f"url={url!r}: a string is needed")
    parts = urlsplit(url)
    if parts.scheme not in ("env", "tcp", "file"):
        raise InvalidArgument(f"url={url!r}: use env://, tcp://host:port or file:///path")
    query = _query(url, parts)
    rank = _number(url, "rank", query.get("rank"), rank, "RANK")
    world_size = _number(url, "world_size", query.get("world_size"), world_size, "WORLD_SIZE")
    check_rank(rank, world_size)
    if parts.scheme == "file":
        return _file_store(url, parts, world_size), rank, world_size
    host, port = _from_environment() if parts.scheme == "env" else _from_url(url, parts)
    agent = parts.scheme == "env" and env.agent_store()
    open_it = _join if rank != 0 or agent else _host
    store: Store = _bounded(host, port, timeout + _GRACE_SECONDS, lambda: open_it(host, port, world_size, timeout))
    if agent:  # torchrun keeps one store for all restarts, and torch distinguishes them by this prefix
        store = PrefixStore(f"/worker/attempt_{env.text('TORCHELASTIC_RESTART_COUNT') or '0'}", store)
    return store, rank, world_size


def store_of_this_machine(port: int, timeout: float) -> TCPStore:
    """A store for processes of this machine, at `port` of the loopback address. With port 0 this process hosts it, at a
    free port. Raises `RendezvousError` within `timeout` + 1 seconds."""
    open_it = _join if port else _host
    return _bounded(_LOOPBACK, port, timeout + _GRACE_SECONDS, lambda: open_it(_LOOPBACK, port, 1, timeout))


def _query(url: str, parts: SplitResult) -> dict[str, str]:
    query = dict(parse_qsl(parts.query, keep_blank_values=True))
    if unknown := sorted(set(query) - set(_QUERY)):
        raise InvalidArgument(f"url={url!r}: unknown {', '.join(unknown)}; there are {' and '.join(_QUERY)}")
    return query


def _number(url: str, name: str, in_url: str | None, argument: int | None, variable: str) -> int:
    if in_url is not None:
        if not in_url.isdecimal():
            raise InvalidArgument(f"url={url!r}: {name}={in_url!r} is not a number")
        if argument is not None and argument != int(in_url):
            raise InvalidArgument(f"url={url!r} says {name}={in_url}, the argument says {argument}: give one")
        return int(in_url)
    value = argument if argument is not None else env.integer(variable)
    if value is None:
        raise InvalidArgument(
            f"{name} is missing: pass {name}=, add ?{name}= to the URL, or set {variable} (torchrun does)"
        )
    return value


def check_rank(rank: int, world_size: int) -> None:
    """Raises `InvalidArgument` unless these are integers, and `rank` is one of the ranks 0 to `world_size` - 1."""
    check_integers(rank, world_size)
    if not 0 <= rank < world_size:
        raise InvalidArgument(
            f"rank={rank}: the ranks of world_size={world_size} are 0 to {world_size - 1}; give each process its own"
        )


def check_integers(rank: int, world_size: int) -> None:
    """Raises `InvalidArgument` unless these are integers and the world size is allowed."""
    for name, value in (("rank", rank), ("world_size", world_size)):
        if isinstance(value, bool) or not isinstance(value, int) or abs(value) >= 1 << 31:
            raise InvalidArgument(f"{name}={value!r}: an integer is needed")
    if not 1 <= world_size <= MAX_WORLD_SIZE:
        raise InvalidArgument(f"world_size={world_size}: 1 to {MAX_WORLD_SIZE} ranks are possible")


def _from_environment() -> tuple[str, int]:
    host, port = env.text("MASTER_ADDR"), env.integer("MASTER_PORT")
    missing = [n for n, v in (("MASTER_ADDR", host), ("MASTER_PORT", port)) if v is None]
    if host is None or port is None:
        raise InvalidArgument(
            f"env:// needs {' and '.join(missing)}: start with torchrun, set the variables, or use tcp:// or file://"
        )
    return host, _port(port, "MASTER_PORT")


def _from_url(url: str, parts: SplitResult) -> tuple[str, int]:
    try:
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise InvalidArgument(f"url={url!r}: {error}") from None
    if not host or port is None:
        raise InvalidArgument(f"url={url!r}: host and port are needed, as in tcp://127.0.0.1:29500")
    return host, _port(port, url)


def _port(port: int, source: str) -> int:
    if not 1 <= port <= 65535:
        raise InvalidArgument(f"{source}: port {port} is not in 1..65535")
    return port


def _file_store(url: str, parts: SplitResult, world_size: int) -> FileStore:
    path = parts.path
    if parts.netloc or not path.startswith("/") or path.endswith("/"):
        raise InvalidArgument(f"url={url!r}: an absolute path is needed, as in file:///dir/name")
    if not os.path.isdir(os.path.dirname(path)):
        raise InvalidArgument(f"url={url!r}: the directory {os.path.dirname(path)!r} does not exist; make it first")
    try:
        with files.opened(path, "ab") as file:  # torch would create it readable for all users
            status = os.fstat(file.fileno())
    except OSError as error:
        raise RendezvousError(
            f"url={url!r}: {error.strerror}; all ranks need a file there that is their own"
        ) from error
    if status.st_mode & 0o022:
        whose = f"uid {status.st_uid}, mode {stat.S_IMODE(status.st_mode):o}"
        raise RendezvousError(
            f"url={url!r}: the file ({whose}) can be written by others than uid {os.geteuid()}: use a new path in a "
            "directory of your own"
        )
    key = (os.getpid(), path, world_size)
    with _hosting:
        # torch deletes the file when its last store is freed; a rank that uses it for the next group would lose it.
        if key not in _files:
            _files[key] = FileStore(path, world_size)
        return _files[key]


def _host(host: str, port: int, world_size: int, timeout: float) -> TCPStore:
    """Host the store; a second call in this process gets the same one."""
    key = (os.getpid(), host, port)
    with _hosting, ExitStack() as undo:
        if key in _hosted:
            return _hosted[key]
        try:
            family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            listener = undo.enter_context(socket.socket(family, socket.SOCK_STREAM))
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(1024)
            port = listener.getsockname()[1]
        except OSError as error:
            raise RendezvousError(
                f"rank 0 cannot host a store at {host}:{port} ({error.strerror}): take a free port on an address of "
                "this machine, or pass a store that exists"
            ) from error
        fd = os.dup(listener.fileno())  # the store closes the descriptor that it gets
        return _hosted.setdefault(key, _tcp_store(str(address[0]), port, world_size, timeout, fd))


def _join(host: str, port: int, world_size: int, timeout: float) -> TCPStore:
    """Connect to the store once its host listens."""
    deadline = Deadline(timeout)
    refusals: list[OSError] = []

    def listening() -> bool:
        try:
            # torch's client retries by its own timing and exceeds the limit, so it begins only when the store listens.
            socket.create_connection((host, port), max(deadline.left, 0.01)).close()
        except OSError as error:
            refusals[:] = [error]
            return False
        return True

    if not poll(listening, timeout - _RETRY_SECONDS, _RETRY_SECONDS):
        error = refusals[-1]
        raise RendezvousError(
            f"no store at {host}:{port}: timeout after {deadline.waited:.1f} s ({error.strerror or error}): does rank "
            "0 run, and do all ranks have the same MASTER_ADDR and MASTER_PORT?"
        ) from error
    return _tcp_store(host, port, world_size, max(deadline.left, _RETRY_SECONDS), None)


def _tcp_store(host: str, port: int, world_size: int, timeout: float, fd: int | None) -> TCPStore:
    limit = timedelta(seconds=timeout)
    if fd is None:
        return TCPStore(host, port, world_size, False, limit, wait_for_workers=False)
    return TCPStore(host, port, world_size, True, limit, wait_for_workers=False, master_listen_fd=fd)


def _bounded(host: str, port: int, timeout: float, action: Callable[[], TCPStore]) -> TCPStore:
    deadline = Deadline(timeout)
    thread = BoundedThread("tricomm-open-store")
    try:
        return thread.run(action, f"opening the store at {host}:{port}", timeout)
    except RendezvousError:
        raise
    except Exception as error:
        raise RendezvousError(
            f"no store at {host}:{port} after {deadline.waited:.1f} s: {first_line(error)}"
        ) from error
    finally:
        thread.close()
