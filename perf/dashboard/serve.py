"""Serves the page and its data on loopback while a benchmark or a job runs, and the metrics to a local Prometheus."""

from __future__ import annotations

import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler
from socketserver import ThreadingTCPServer
from typing import Any

from tricomm.errors import ResourceError, TricommError

ADDRESS, PORT = "127.0.0.1", 8377
RENEW = 5.0  # seconds
_BUSY = b"HTTP/1.0 503 Service Unavailable\r\nRetry-After: 1\r\nContent-Length: 0\r\n\r\n"
_PAGE = "text/html; charset=utf-8"
_KINDS = {"/": _PAGE, "/data": "text/plain", "/metrics": "text/plain; version=0.0.4", "/calls": _PAGE}


class Server(ThreadingTCPServer):
    """Answers `connections` clients at once; each has `seconds` to send its request and `seconds` to take the answer.

    `makers` make the answers to /, /data, /metrics and /calls. With every connection in use, a new client
    replaces the one that has kept its thread waiting longest. Raises `ResourceError` if it cannot listen on `port`.
    """

    daemon_threads = allow_reuse_address = True
    request_queue_size = 128  # with a full queue the next client would wait a second

    def __init__(self, port: int, *makers: Callable[[], bytes], connections: int = 32, seconds: float = 10.0) -> None:
        self.makers = dict(zip(_KINDS, makers, strict=True))
        self.seconds, self._free = seconds, threading.Semaphore(connections)
        self.deadlines: dict[Any, float] = {}  # deadlines of the clients for which a thread waits, the earliest first
        try:
            super().__init__((ADDRESS, port), _Handler)
        except OSError as error:
            remedy = "--port names another, --port 0 takes a free one"
            raise ResourceError(f"port {port} on {ADDRESS}: {error.strerror}; {remedy}") from None
        self.url = f"http://{ADDRESS}:{self.server_address[1]}/"

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._free.acquire(blocking=False):
            _disconnect(list(self.deadlines)[:1])
            if not self._free.acquire(timeout=1.0):  # every thread is making an answer
                request.sendall(_BUSY)
                return self.close_request(request)
        self.deadlines[request] = time.monotonic() + self.seconds
        super().process_request(request, client_address)

    def service_actions(self) -> None:  # twice a second
        _disconnect([client for client, end in list(self.deadlines.items()) if end < time.monotonic()])

    def shutdown_request(self, request: Any) -> None:
        self.deadlines.pop(request, None)
        super().shutdown_request(request)
        self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), OSError):  # an OSError: the client has gone or was disconnected
            super().handle_error(request, client_address)


def _disconnect(clients: list[socket.socket]) -> None:
    for client in clients:
        with suppress(OSError):
            client.shutdown(socket.SHUT_RDWR)  # ends the read or write of its thread


class _Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        self.server.deadlines.pop(self.connection, None)
        path = self.path.partition("?")[0]
        # Another site's page may resolve its host name to this address; its requests then have that name.
        if self.headers.get("Host", "").partition(":")[0] not in (ADDRESS, "localhost"):
            return self.send_error(403, "Ask for 127.0.0.1 or localhost")
        if path not in _KINDS:
            return self.send_error(404)
        try:
            body = self.server.makers[path]()
        except TricommError as error:
            return self.send_error(503, explain=str(error))
        self.server.deadlines[self.connection] = time.monotonic() + self.server.seconds
        self.send_response(200)
        headers = {"Content-Type": _KINDS[path], "Content-Length": str(len(body)), "Cache-Control": "no-store"}
        for header in (*headers.items(), ("X-Content-Type-Options", "nosniff")):
            self.send_header(*header)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: object) -> None:
        """Print nothing: the terminal is the command's."""
