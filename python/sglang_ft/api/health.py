"""/health tells the truth: why the server is not ready yet, and when the cpu_worker cannot run experts."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any

from sglang_ft import runtime

PATHS = ("/health", "/health_generate")


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


def to_json(body: dict[str, Any]) -> bytes:
    """A response body."""
    return json.dumps(body).encode()


class HealthMiddleware:
    """ASGI middleware: /health is 503 with a reason while the cpu_worker cannot run experts."""

    def __init__(self, app: Callable[..., Awaitable[None]]) -> None:
        self.app = app

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] == "http" and scope["path"] in PATHS and (status := worker_status()):
            headers = [(b"content-type", b"application/json"), (b"retry-after", b"1")]
            await send({"type": "http.response.start", "status": 503, "headers": headers})
            await send({"type": "http.response.body", "body": to_json(status)})
            return
        await self.app(scope, receive, send)
