"""The page on loopback, renewed while a benchmark or a job runs; and its metrics, for a Prometheus on this machine.

There are at most `CONNECTIONS` clients, each with a thread. A request is complete within `SECONDS` and has at most
`HEAD_BYTES`; its answer is taken within `SECONDS`. If there is no room for a client, the one that has been sending its
request for longest is cut off, so slow clients cannot lock others out.
"""

from __future__ import annotations

import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from http import HTTPStatus
from http.client import LineTooLong
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BufferedIOBase
from typing import Any

from tricomm.errors import ResourceError, TricommError

ADDRESS = "127.0.0.1"
PORT = 8377
RENEW = 5.0  # seconds
CONNECTIONS = 32
SECONDS = 10.0
HEAD_BYTES = 16 << 10
_LEAVE_SECONDS = 1.0  # for the thread of a connection that was cut
_HTML, _DATA, _METRICS = "text/html; charset=utf-8", "text/plain", "text/plain; version=0.0.4; charset=utf-8"
_BUSY = b"HTTP/1.0 503 Service Unavailable\r\nRetry-After: 1\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"


class Server(ThreadingHTTPServer):
    """`/` is `page()`, `/data` is its new data, `/metrics` is for Prometheus. Only this machine reaches it.

    `connections` at once, each with `seconds` to send its request and `seconds` to take the answer. Raises
    `ResourceError` for a port that is refused.
    """

    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 128  # a full queue costs the next client a second

    def __init__(
        self, port: int, page: Callable[[], str], data: Callable[[], str], metrics: Callable[[], bytes],
        connections: int = CONNECTIONS, seconds: float = SECONDS,
    ) -> None:  # fmt: skip
        self.answers: dict[str, tuple[str, Callable[[], bytes]]] = {
            "/": (_HTML, lambda: page().encode()),
            "/data": (_DATA, lambda: data().encode()),
            "/metrics": (_METRICS, metrics),
        }
        self._seconds, self._places = seconds, threading.BoundedSemaphore(connections)
        self._lock = threading.Lock()
        self._asking: dict[socket.socket, float] = {}  # their deadlines, the oldest client first
        self._taking: dict[socket.socket, float] = {}
        try:
            super().__init__((ADDRESS, port), _Handler)
        except OSError as error:
            raise ResourceError(
                f"port {port} on {ADDRESS}: {error.strerror}; --port names another, --port 0 takes a free one"
            ) from None

    @property
    def url(self) -> str:
        return f"http://{ADDRESS}:{self.server_port}/"

    def server_bind(self) -> None:
        # As in http.server, without the look-up of this host's name, which may wait for a name server.
        socket.socket.bind(self.socket, self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = self.server_address[:2]  # type: ignore[assignment]

    # Bounds

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._places.acquire(blocking=False) and not self._make_room():
            return self._refuse(request)
        with self._lock:
            self._asking[request] = time.monotonic() + self._seconds
        try:
            super().process_request(request, client_address)
        except BaseException:  # no thread could be started
            self._leave(request)
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._leave(request)

    def asked(self, request: socket.socket) -> None:
        """The request has come in."""
        with self._lock:
            self._asking.pop(request, None)

    def answers_now(self, request: socket.socket) -> None:
        """The answer is ready; the client's time to take it begins."""
        with self._lock:
            self._taking[request] = time.monotonic() + self._seconds

    def service_actions(self) -> None:
        """Cut off the clients whose time is up; called by `serve_forever` twice a second."""
        now = time.monotonic()
        with self._lock:
            for request, end in (*self._asking.items(), *self._taking.items()):
                if now >= end:
                    _cut(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Report nothing for a client that has gone or was cut off; any other error is a bug."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)

    def _make_room(self) -> bool:
        with self._lock:
            oldest = next(iter(self._asking), None)
            if oldest is None:
                return False
            del self._asking[oldest]
            _cut(oldest)
        return self._places.acquire(timeout=_LEAVE_SECONDS)

    def _refuse(self, request: socket.socket) -> None:
        request.setblocking(False)
        with suppress(OSError):
            request.send(_BUSY)
        self.shutdown_request(request)

    def shutdown_request(self, request: Any) -> None:
        request.setblocking(False)
        with suppress(OSError):
            request.recv(4 * HEAD_BYTES)  # closing a socket with unread data may discard the answer
        super().shutdown_request(request)

    def _leave(self, request: socket.socket) -> None:
        with self._lock:
            self._asking.pop(request, None)
            self._taking.pop(request, None)
        self._places.release()


def _cut(request: socket.socket) -> None:
    with suppress(OSError):
        request.shutdown(socket.SHUT_RDWR)  # ends the reads and writes of its thread, which closes it


class _Bounded:
    """The input of a request: `HEAD_BYTES` in all."""

    def __init__(self, file: BufferedIOBase) -> None:
        self._file, self._left = file, HEAD_BYTES
        self.close = file.close

    def readline(self, limit: int = -1) -> bytes:
        line = self._file.readline(self._left + 1)
        self._left -= len(line)
        if self._left < 0:
            raise LineTooLong("request")
        return line


class _Handler(BaseHTTPRequestHandler):
    server: Server

    def setup(self) -> None:
        super().setup()
        self.rfile = _Bounded(self.rfile)  # type: ignore[assignment]

    def handle(self) -> None:
        try:
            super().handle()
        except LineTooLong:  # in the first line; http.server handles the others
            self.requestline = self.request_version = self.command = ""
            self.send_error(HTTPStatus.REQUEST_URI_TOO_LONG)

    def do_GET(self) -> None:
        self.server.asked(self.connection)
        # Another site's page can resolve its own host name to this address; its requests carry that name.
        host = (self.headers.get("Host") or "").partition(":")[0]
        if host not in (ADDRESS, "localhost"):
            return self.send_error(HTTPStatus.FORBIDDEN, "Ask for 127.0.0.1 or localhost")
        known = self.server.answers.get(self.path.partition("?")[0])
        if known is None:
            return self.send_error(HTTPStatus.NOT_FOUND)
        kind, answer = known
        try:
            body = answer()
        except TricommError as error:
            return self.send_error(HTTPStatus.SERVICE_UNAVAILABLE, explain=str(error))
        self.server.answers_now(self.connection)
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: object) -> None:
        """Print nothing: the terminal is the command's."""
