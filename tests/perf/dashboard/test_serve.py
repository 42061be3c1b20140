"""`dashboard --serve` under clients that are slow, many, or send too much: a normal one is still served."""

import socket
import threading
import time
import urllib.request
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack

import pytest

from tests.perf.dashboard.conftest import serving
from tricomm.perf.dashboard import serve

_BIG = b"x" * (32 << 20)  # more than the buffers of a connection take


def _served(connections: int = 4, seconds: float = 1.0) -> AbstractContextManager[serve.Server]:
    makers = (lambda: _BIG, lambda: b"data", bytes, bytes)
    return serving(serve.Server(0, *makers, connections=connections, seconds=seconds))


def _connect(server: serve.Server, stack: ExitStack, text: bytes = b"") -> socket.socket:
    client = stack.enter_context(socket.create_connection(server.server_address[:2], timeout=20))
    client.sendall(text)
    return client


def _data(server: serve.Server) -> str:
    with urllib.request.urlopen(server.url + "data", timeout=20) as answer:
        return str(answer.read().decode())


def _until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"not within {seconds} s"
        time.sleep(0.01)


def _threads(server: serve.Server) -> int:
    return sum("process_request_thread" in thread.name for thread in threading.enumerate())


def _ended(client: socket.socket) -> bool:
    """Whether the server has ended the connection; False for one that it keeps, after a moment."""
    client.settimeout(0.2)
    try:
        return client.recv(1) == b""
    except TimeoutError:
        return False
    except ConnectionError:
        return True


def test_a_slow_client_is_disconnected_at_its_deadline() -> None:
    with _served() as server, ExitStack() as stack:
        began, client = time.monotonic(), _connect(server, stack)
        for byte in b"GET /data HTTP/1.1\r\nHost: 127.0.0.1\r\n" * 10:
            try:
                client.sendall(bytes([byte]))
            except ConnectionError:
                break
            if _ended(client):
                break
        else:
            pytest.fail("a slow request was never cut")
        assert 0.9 < time.monotonic() - began < 10
        _until(lambda: _threads(server) == 0)


def test_without_a_deadline_a_slow_client_stays() -> None:
    with _served(seconds=60.0) as server, ExitStack() as stack:
        client = _connect(server, stack, b"GET")
        time.sleep(2.0)
        assert not _ended(client) and _threads(server) == 1


def test_a_client_that_does_not_read_its_answer_is_disconnected() -> None:
    with _served() as server, ExitStack() as stack:
        client = _connect(server, stack, b"GET / HTTP/1.0\r\nHost: 127.0.0.1:1\r\n\r\n")
        assert client.recv(8) == b"HTTP/1.0"
        _until(lambda: _threads(server) == 0)
        assert _data(server) == "data"


def test_a_hundred_connections_use_a_bounded_number_of_threads_and_lock_no_client_out() -> None:
    with _served(connections=8, seconds=60.0) as server, ExitStack() as stack:
        slow = []
        for _ in range(100):
            slow.append(_connect(server, stack, b"GET /data HTTP/1.0\r\n"))
            assert _threads(server) <= 9  # one may be closing
        assert _data(server) == "data"
        _until(lambda: sum(map(_ended, slow[:90])) == 90)  # the first client was disconnected
        assert _threads(server) <= 8
        assert _data(server) == "data"


_ASKS_FOR_THE_PAGE = b"GET / HTTP/1.0\r\nHost: 127.0.0.1:1\r\n\r\n"


def _never_read(server: serve.Server, stack: ExitStack, count: int) -> None:
    for _ in range(count):
        assert _connect(server, stack, _ASKS_FOR_THE_PAGE).recv(8) == b"HTTP/1.0"


def test_clients_that_never_read_lock_no_client_out() -> None:
    with _served(seconds=60.0) as server, ExitStack() as stack:
        for _ in range(3):
            _never_read(server, stack, 5)
            assert [_data(server) for _ in range(3)] == ["data"] * 3 and _threads(server) <= 4


def test_a_client_beyond_the_limit_gets_an_error() -> None:
    go, at_work = threading.Event(), []

    def page() -> bytes:
        at_work.append(1)
        go.wait(60)
        return b"page"

    made = serve.Server(0, page, lambda: b"data", bytes, bytes, connections=2, seconds=5.0)
    with serving(made) as server, ExitStack() as stack:
        busy = [_connect(server, stack, _ASKS_FOR_THE_PAGE) for _ in range(2)]
        _until(lambda: len(at_work) == 2)
        refused = _connect(server, stack, b"GET /data HTTP/1.0\r\nHost: 127.0.0.1:1\r\n\r\n")
        assert refused.recv(12) == b"HTTP/1.0 503"
        go.set()
        for client in busy:
            assert client.recv(12) == b"HTTP/1.0 200"
        _until(lambda: _threads(server) == 0)
        assert _data(server) == "data"


@pytest.mark.parametrize(
    "request_text,status",
    [
        (b"GET /" + b"a" * 65536, b"414"),
        (b"GET / HTTP/1.0\r\nX: " + b"a" * 65536, b"431"),
        (b"GET / HTTP/1.0\r\n" + b"X: aaaa\r\n" * 101, b"431"),
        (b"GET /data HTTP/1.0\r\nHost: example.org\r\n\r\n", b"403"),
        (b"POST /data HTTP/1.0\r\nHost: 127.0.0.1:1\r\n\r\n", b"501"),
        (b"nonsense\r\n\r\n", b"400"),
    ],
    ids=["line", "header", "headers", "host", "method", "nonsense"],
)
def test_requests_that_are_too_long_or_of_another_kind_are_refused(request_text: bytes, status: bytes) -> None:
    with _served() as server, ExitStack() as stack:
        client = _connect(server, stack, request_text)
        assert status in client.recv(4096)
        _until(lambda: _threads(server) == 0)
        assert _data(server) == "data"


@pytest.mark.parametrize("host", [b"127.0.0.1", b"localhost", b"localhost:8377"])
def test_a_host_header_may_lack_the_port_as_at_port_80(host: bytes) -> None:
    with _served() as server, ExitStack() as stack:
        client = _connect(server, stack, b"GET /data HTTP/1.0\r\nHost: " + host + b"\r\n\r\n")
        assert client.recv(12) == b"HTTP/1.0 200"
