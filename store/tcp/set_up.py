"""How the ranks of a group connect: each pair of ranks over one TCP connection.

Every rank listens, and tells the others its address and a key over the store. Of each pair the higher rank connects to
the lower one and sends that one's key; the lower rank answers with the other's key. So each knows that it has reached
that rank of that group. Other connections are closed. Nothing here waits for one rank before another, so
groups that connect in a different order on each rank do not wait for each other.
"""

from __future__ import annotations

import errno
import fcntl
import hmac
import os
import secrets
import select
import socket
import struct
from contextlib import ExitStack, closing, suppress

from tricomm.errors import InvalidArgument, RendezvousError, ResourceError
from tricomm.store.bounded_store import first_line
from tricomm.store.generation import Generation
from tricomm.store.records import Capabilities

_SECONDS = 30.0  # the ranks have just met over the store
_KEY_BYTES = 16
_ADDRESS = struct.Struct(f"<64sH{_KEY_BYTES}s")  # host, port, key
_HELLO = struct.Struct(f"<8sI{_KEY_BYTES}s")  # magic, the sender's rank, the receiver's key
_MAGIC = b"TRICOMM1"
_SPARE = 16  # descriptors that a group leaves for files, the store, and the socket at which it listens
_STRANGERS = 64  # connections without a hello that are kept open, in addition to the group's
_INTERFACE = "GLOO_SOCKET_IFNAME"
_SIOCGIFADDR = 0x8915
_UNDER_WAY = (errno.EINPROGRESS, errno.EINTR)


def connect(generation: Generation[Capabilities], name: str) -> dict[int, socket.socket]:
    """The connections to the other ranks, by rank; every rank of the group `name` calls it.

    Raises `ResourceError` on all ranks if one has too few descriptors, `RendezvousError` if the ranks cannot connect,
    and as `Generation.look` does.
    """
    _check_descriptors(generation, name)
    generation.limit(_SECONDS)
    meeting = None
    try:
        with closing(_listener()) as server:
            key = secrets.token_bytes(_KEY_BYTES)
            host, port = server.getsockname()[:2]
            pages = generation.gather("addresses", _ADDRESS.pack(host.encode(), port, key))
            meeting = _Meeting(generation.rank, server, [_ADDRESS.unpack(page) for page in pages])
            meeting.begin()
            generation.wait(meeting.step, "the ranks do not connect")
            return meeting.take()
    except OSError as error:
        generation.explain()
        kind = ResourceError if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM) else RendezvousError
        raise kind(
            f"{name}, rank {generation.rank} of {generation.world_size}: the ranks could not connect: "
            f"{first_line(error)}; set {_INTERFACE} to the network interface if it is not that of the host name"
        ) from error
    finally:
        if meeting is not None:
            meeting.close()


def _check_descriptors(generation: Generation[Capabilities], name: str) -> None:
    """Raises `ResourceError`, on all ranks, if any of them has too few descriptors for its connections."""
    members = [generation.members[r] for r in range(generation.world_size)]
    needed = len(members) - 1 + _SPARE
    short = {rank: member.descriptors for rank, member in enumerate(members) if member.descriptors < needed}
    if short:
        named = "; ".join(f"rank {rank} (pid {members[rank].pid}) has {left} left" for rank, left in short.items())
        raise ResourceError(
            f"{name}: the group needs {len(members) - 1} descriptors on each rank, and {_SPARE} to spare: {named} "
            "of its limit of open files (RLIMIT_NOFILE). Raise the limit (ulimit -n), or destroy groups that are not "
            "needed"
        )


class _Meeting:
    """The connections of one rank while they are made. `step` moves all of them."""

    def __init__(self, rank: int, server: socket.socket, addresses: list[tuple[bytes, int, bytes]]) -> None:
        self._rank, self._server, self._keys = rank, server, [key for _, _, key in addresses]
        self._made: dict[int, socket.socket] = {}
        self._lower: dict[int, socket.socket] = {}  # to lower ranks, begun here, by rank
        self._hellos: dict[socket.socket, bytearray] = {}  # what has come of each connection's hello
        self._begun: set[socket.socket] = set()  # connections that this rank has begun
        self._addresses = addresses

    def begin(self) -> None:
        """Begin to connect to the lower ranks."""
        for peer, (host, port, _) in enumerate(self._addresses[: self._rank]):
            self._begin(peer, host.rstrip(b"\0").decode(), port)

    def take(self) -> dict[int, socket.socket]:
        made, self._made = self._made, {}
        return made

    def close(self) -> None:
        for one in [*self._made.values(), *self._lower.values(), *self._hellos]:
            one.close()

    def step(self, seconds: float) -> bool:
        """Wait for `seconds` at most and go on with whatever is ready; whether all connections are made."""
        poller = select.poll()
        sockets = {one.fileno(): one for one in (self._server, *self._lower.values(), *self._hellos)}
        for fd, one in sockets.items():
            poller.register(fd, select.POLLOUT if one in self._lower.values() else select.POLLIN)
        if len(self._made) < len(self._keys) - 1:
            for fd, _ in poller.poll(seconds * 1000.0):
                self._ready(sockets[fd])
        return len(self._made) == len(self._keys) - 1

    def _begin(self, peer: int, host: str, port: int) -> None:
        one = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
        self._lower[peer] = one
        one.setblocking(False)
        code = one.connect_ex((host, port))
        if code and code not in _UNDER_WAY:
            raise OSError(code, f"{os.strerror(code)}, at {host}, port {port}, where rank {peer} listens")

    def _ready(self, one: socket.socket) -> None:
        if one.fileno() < 0:  # dropped for another one
            return
        if one is self._server:
            self._accept()
        elif one in self._hellos:
            self._read(one)
        else:
            self._connected(one)

    def _connected(self, one: socket.socket) -> None:
        peer = next(rank for rank, other in self._lower.items() if other is one)
        code = one.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            raise OSError(code, f"{os.strerror(code)}, where rank {peer} listens")
        one.send(_HELLO.pack(_MAGIC, self._rank, self._keys[peer]))
        self._hellos[self._lower.pop(peer)] = bytearray()
        self._begun.add(one)

    def _accept(self) -> None:
        with suppress(BlockingIOError, ConnectionAbortedError):
            one, _ = self._server.accept()
            one.setblocking(False)
            self._hellos[one] = bytearray()
            silent = [other for other in self._hellos if other not in self._begun]
            if len(silent) > _STRANGERS + len(self._keys):
                self._drop(silent[0])

    def _read(self, one: socket.socket) -> None:
        data = self._hellos[one]
        try:
            more = one.recv(_HELLO.size - len(data))
        except BlockingIOError:
            return
        except OSError:
            more = b""
        data += more
        if not more:
            self._drop(one)  # `Generation.look` finds out if it was a rank that has ended
        elif len(data) == _HELLO.size:
            magic, rank, key = _HELLO.unpack(data)
            known = rank < len(self._keys) and rank != self._rank and rank not in self._made
            if magic != _MAGIC or not known or not hmac.compare_digest(key, self._keys[self._rank]):
                self._drop(one)
                return
            if rank > self._rank:
                one.send(_HELLO.pack(_MAGIC, self._rank, self._keys[rank]))
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            del self._hellos[one]
            self._made[rank] = one

    def _drop(self, one: socket.socket) -> None:
        del self._hellos[one]
        one.close()


def _listener() -> socket.socket:
    """A listening socket: at the address of the interface in GLOO_SOCKET_IFNAME, of the host name, or loopback, in this
    order."""
    interface = (os.environ.get(_INTERFACE) or "").split(",")[0].strip()
    hosts = [_address_of(interface)] if interface else [*_addresses_of_host_name(), "127.0.0.1"]
    for host in hosts:
        try:
            with ExitStack() as undo:
                family = socket.AF_INET6 if ":" in host else socket.AF_INET
                server = undo.enter_context(closing(socket.socket(family, socket.SOCK_STREAM)))
                server.bind((host, 0))
                server.listen(socket.SOMAXCONN)
                server.setblocking(False)
                undo.pop_all()
                return server
        except OSError as error:
            if host == hosts[-1] or error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                raise
    raise AssertionError("unreachable: the last address is bound, or raises")


def _addresses_of_host_name() -> list[str]:
    try:
        found = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
    except OSError:
        return []
    return list(dict.fromkeys(str(address[0]) for *_, address in found))


def _address_of(interface: str) -> str:
    """The IPv4 address of `interface`, else its first IPv6 address."""
    with closing(socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) as any_socket, suppress(OSError):
        request = struct.pack("256s", interface.encode()[:15])
        return socket.inet_ntoa(fcntl.ioctl(any_socket, _SIOCGIFADDR, request)[20:24])
    with suppress(OSError), open("/proc/net/if_inet6") as lines:
        for line in lines:
            address, *_, scope, _, at = line.split()[:6]
            if at == interface and scope != "20":  # an address of the link is of no use without the link's number
                return socket.inet_ntop(socket.AF_INET6, bytes.fromhex(address))
    raise InvalidArgument(
        f"{_INTERFACE}={interface}: no such network interface, or it has no address; there are "
        f"{', '.join(name for _, name in socket.if_nameindex())}"
    )
