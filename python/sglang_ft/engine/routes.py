"""The HTTP side: an honest /health, from the first moment.

`EarlyServer` holds the port while the model loads and answers everything with 503, a reason and the progress; the
real server then takes over the same listening socket, so that no connection is refused in between. Later a
middleware answers /health with 503 while the cpu_worker is being replaced.
"""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import uvicorn
from sglang.srt.plugins.hook_registry import HookType

from sglang_ft import runtime
from sglang_ft.engine.hook import Hook
from sglang_ft.errors import ConfigError

_HEALTH = ("/health", "/health_generate")


def loading_status() -> dict[str, Any]:
    """Why the server is not ready yet."""
    load = runtime.read("load")
    reason = "the server is starting"
    if load.get("stage") == "weights":
        reason = "the weights are loading"
        if load.get("total"):
            load["progress"] = round(min(load["done"] / load["total"], 1.0), 4)
    return {"status": "loading", "reason": reason, **load}


def worker_status() -> dict[str, Any] | None:
    """Why the server cannot run experts right now; None when it can."""
    worker = runtime.read("worker")
    if worker.get("state") in (None, "ready"):
        return None
    return {"status": "unhealthy", "reason": f"the cpu_worker is {worker['state']}", **worker}


def _json(body: dict[str, Any]) -> bytes:
    return json.dumps(body).encode()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def _answer(self) -> None:
        status = loading_status()
        if self.path.partition("?")[0] not in _HEALTH:
            message = f"{status['reason']}; try again in a moment"
            status = {"error": {"message": message, "type": "service_unavailable", "code": 503}}
        body = _json(status)
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
        """`answer` False: only hold the port, for a server that speaks TLS. Raises ConfigError when the port is taken."""
        try:
            info = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            self.socket = socket.socket(info[0], socket.SOCK_STREAM)
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self.socket.bind(info[4])
        except OSError as e:
            raise ConfigError(f"cannot listen on {host} port {port}: {e.strerror or e}. Choose another --port") from e
        self.socket.listen(2048)
        self._server = ThreadingHTTPServer(info[4][:2], _Handler, bind_and_activate=False)
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


class HealthMiddleware:
    """ASGI middleware: /health is 503 with a reason while the cpu_worker cannot run experts."""

    def __init__(self, app: Callable) -> None:
        self.app = app

    async def __call__(self, scope: dict, receive: Callable, send: Callable) -> None:
        if scope["type"] == "http" and scope["path"] in _HEALTH and (status := worker_status()):
            headers = [(b"content-type", b"application/json"), (b"retry-after", b"1")]
            await send({"type": "http.response.start", "status": 503, "headers": headers})
            await send({"type": "http.response.body", "body": _json(status)})
            return
        await self.app(scope, receive, send)


def hooks(early: EarlyServer) -> list[Hook]:
    """Lets SGLang's uvicorn serve on the socket that `early` holds."""

    def run(original: Callable, app: Any, **options: Any) -> None:
        del original  # it would open a socket of its own
        app.add_middleware(HealthMiddleware)
        server = uvicorn.Server(uvicorn.Config(app, **options))
        server.run(sockets=[early.hand_over()])

    return [Hook("uvicorn.run", HookType.AROUND, run, None)]
