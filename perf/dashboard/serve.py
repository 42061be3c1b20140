"""The page on loopback, renewed while a benchmark or a job runs; and its metrics, for a Prometheus on this machine.

There are at most `CONNECTIONS` clients, and `EACH` of one address, each with a thread. A request is complete within
`SECONDS` and has at most `HEAD_BYTES`; its answer is taken within `SECONDS`. If there is no room for a client, the one
that has kept its thread waiting for longest is cut off, so slow clients do not lock others out.
"""

from __future__ import annotations

import io
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tricomm.errors import ResourceError, TricommError

ADDRESS = "127.0.0.1"
PORT = 8377
RENEW = 5.0  # seconds
CONNECTIONS, EACH = 32, 24
SECONDS = 10.0
HEAD_BYTES = 16 << 10
_LEAVE_SECONDS = 1.0  # for a thread to end, if there are too many
_HTML, _DATA, _METRICS = "text/html; charset=utf-8", "text/plain", "text/plain; version=0.0.4; charset=utf-8"
_BUSY = b"HTTP/1.0 503 Service Unavailable\r\nRetry-After: 1\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"


class Server(ThreadingHTTPServer):
    """`/` is `page()`, `/data` is its new data, `/metrics` is for Prometheus. Only this machine reaches it.

    `connections` at once, `each` of one address, each with `seconds` to send its request and `seconds` to take the
    answer. Raises `ResourceError` for a port that is refused.
    """

    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 128  # a full queue costs the next client a second

    def __init__(
        self, port: int, page: Callable[[], bytes], data: Callable[[], bytes], metrics: Callable[[], bytes],
        connections: int = CONNECTIONS, each: int = EACH, seconds: float = SECONDS,
    ) -> None:  # fmt: skip
        self.answers: dict[str, tuple[str, Callable[[], bytes]]] = {
            "/": (_HTML, page),
            "/data": (_DATA, data),
            "/metrics": (_METRICS, metrics),
        }
        self.seconds, self._most, self._each = seconds, connections, each
        self._changed = threading.Condition()
        self._open: dict[socket.socket, str] = {}  # and the client's address
        self._waiting: dict[socket.socket, None] = {}  # for the client, the one that waits for longest first
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

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._changed:
            if not self._make_room(client_address[0]):
                request.setblocking(False)
                with suppress(OSError):
                    request.send(_BUSY)
                return self.shutdown_request(request)
            self._open[request] = client_address[0]
            self._waiting[request] = None
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

    def waits(self, request: socket.socket, for_client: bool) -> None:
        """The thread of `request` waits for the client, or works."""
        with self._changed:
            self._waiting.pop(request, None)
            if for_client:
                self._waiting[request] = None

    def _make_room(self, address: str) -> bool:
        """Cut off the client that has kept its thread waiting for longest, if there are too many of them."""

        def same() -> bool:
            return sum(other == address for other in self._open.values()) >= self._each

        def room() -> bool:
            return len(self._open) < self._most and not same()

        if room():
            return True
        oldest = next((r for r in self._waiting if not same() or self._open[r] == address), None)
        if oldest is not None:
            with suppress(OSError):
                oldest.shutdown(socket.SHUT_RDWR)  # ends the reads and writes of its thread, which closes it
        return self._changed.wait_for(room, _LEAVE_SECONDS)

    def _leave(self, request: socket.socket) -> None:
        with self._changed:
            self._open.pop(request, None)
            self._waiting.pop(request, None)
            self._changed.notify_all()

    def shutdown_request(self, request: Any) -> None:
        with suppress(OSError):  # its thread may have closed it before an interrupt ends the server
            request.setblocking(False)
            request.recv(4 * HEAD_BYTES)  # closing a socket with unread data may discard the answer
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Report nothing for a client that has gone or was cut off; any other error is a bug."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    server: Server

    def handle(self) -> None:
        head = self._head()
        self.rfile = io.BytesIO(head)
        if len(head) > HEAD_BYTES:
            self.requestline = self.request_version = self.command = ""
            line = b"\n" not in head[:HEAD_BYTES]
            long = HTTPStatus.REQUEST_URI_TOO_LONG if line else HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE
            return self.send_error(long)
        super().handle()

    def _head(self) -> bytes:
        """The request's lines. Raises `TimeoutError` if they are not there in time."""
        head, end = b"", time.monotonic() + self.server.seconds
        while b"\r\n\r\n" not in head and b"\n\n" not in head and len(head) <= HEAD_BYTES:
            self.connection.settimeout(max(1e-3, end - time.monotonic()))
            more = self.connection.recv(HEAD_BYTES)
            if not more:
                break
            head += more
        self.connection.settimeout(self.server.seconds)  # `sendall` takes it for the whole of its data
        return head

    def do_GET(self) -> None:
        self.server.waits(self.connection, for_client=False)
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
        self.server.waits(self.connection, for_client=True)
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: object) -> None:
        """Print nothing: the terminal is the command's."""
