"""Holds the port while the model loads and answers everything with 503, a reason and the progress.

The real server then takes over the same listening socket, so that no connection is refused in between.
"""

from __future__ import annotations

import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from sglang_ft.api import health
from sglang_ft.errors import ConfigError


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def _answer(self) -> None:
        status = health.loading_status()
        if self.path.partition("?")[0] not in health.PATHS:
            message = f"{status['reason']}; try again in a moment"
            status = {"error": {"message": message, "type": "service_unavailable", "code": 503}}
        body = health.to_json(status)
        self.send_response(503)
        self.send_header("Content-Type", "application/json")
        self.send_header("Retry-After", "2")
        self.send_header("Connection", "close")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
        self.close_connection = True

    do_GET = do_POST = do_PUT = do_DELETE = do_HEAD = do_OPTIONS = _answer

    def log_message(self, format: str, *args: Any) -> None:
        """Silent: a client that polls /health must not fill the log."""


class EarlyServer:
    """Owns the listening socket from before loading until the real server takes it."""

    def __init__(self, host: str, port: int, answer: bool = True) -> None:
        """`answer` False: only hold the port, for a server that speaks TLS. Raises ConfigError if it is taken."""
        try:
            info = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            self.socket = socket.socket(info[0], socket.SOCK_STREAM)
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self.socket.bind(info[4])
        except OSError as e:
            raise ConfigError(
                f"cannot listen on {host} port {port}: {e.strerror or e}. Choose another --port"
            ) from e
        self.socket.listen(2048)
        self._server = ThreadingHTTPServer((host, port), _Handler, bind_and_activate=False)
        self._server.socket.close()
        self._server.socket = self.socket
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        if answer:
            self._thread.start()

    def hand_over(self) -> socket.socket:
        """Stops answering and gives the socket away; connections queue until someone accepts them."""
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join()
        return self.socket
