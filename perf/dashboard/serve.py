"""The page on loopback, renewed while a benchmark or a job runs; and its metrics, for a Prometheus on this machine."""

from __future__ import annotations

import socket
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from tricomm.errors import ResourceError, TricommError

ADDRESS = "127.0.0.1"
PORT = 8377
RENEW = 5.0  # seconds
_HTML, _DATA, _METRICS = "text/html; charset=utf-8", "text/plain", "text/plain; version=0.0.4; charset=utf-8"


class Server(ThreadingHTTPServer):
    """`/` is `page()`, `/data` what it asks for again, `/metrics` for Prometheus. Only this machine reaches it.

    Raises `ResourceError` for a port that cannot be had.
    """

    daemon_threads = True
    allow_reuse_address = True

    def __init__(
        self, port: int, page: Callable[[], str], data: Callable[[], str], metrics: Callable[[], bytes]
    ) -> None:  # fmt: skip
        self.answers: dict[str, tuple[str, Callable[[], bytes]]] = {
            "/": (_HTML, lambda: page().encode()),
            "/data": (_DATA, lambda: data().encode()),
            "/metrics": (_METRICS, metrics),
        }
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
        # As http.server has it, but for its look-up of our own name, which may wait for a name server.
        socket.socket.bind(self.socket, self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = self.server_address[:2]  # type: ignore[assignment]


class _Handler(BaseHTTPRequestHandler):
    server: Server
    timeout = 30  # seconds for a request to come in

    def do_GET(self) -> None:
        # A page elsewhere can point a name of its own at this address; its requests carry that name.
        host = (self.headers.get("Host") or "").rpartition(":")[0]
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
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: object) -> None:
        """Say nothing: the terminal belongs to whoever started this."""
