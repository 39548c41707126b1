"""A stream that is refused before its first token becomes a plain 400, as for a request that is not streamed.

SGLang sends 200 and the first events of some APIs before it reads the prompt; a refusal then comes as an event
that clients do not take for a client's mistake, or without its reason. So the first events are held back until
the prompt was read, but never longer than HOLD_S: a client must not wait for headers during a long prefill.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

from sglang_ft.api import errors

HOLD_S = 1.0
REFUSAL = "sglang_ft.refusal"  # key in an ASGI scope: why this request is refused
_OPENING_EVENTS = (b"event: response.created", b"event: response.in_progress")

Message = dict[str, Any]
Send = Callable[[Message], Awaitable[None]]


class StreamRefusals:
    """ASGI middleware; whoever refuses a request leaves the text in its scope under REFUSAL."""

    def __init__(self, app: Callable[..., Awaitable[None]]) -> None:
        self.app = app

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        gate = Gate(scope, send)
        try:
            await self.app(scope, receive, gate.send)
        finally:
            await gate.close()


class Gate:
    """Passes the messages of one response on, after holding back the opening ones of an event stream."""

    def __init__(self, scope: dict[str, Any], send: Send, hold_s: float = HOLD_S) -> None:
        self._scope = scope
        self._send = send
        self._hold_s = hold_s
        self._held: list[Message] = []
        self._timer: asyncio.Task[None] | None = None
        self._refused = False
        self._lock = asyncio.Lock()

    async def send(self, message: Message) -> None:
        """One message from the application."""
        async with self._lock:
            if self._refused:
                return
            if message["type"] == "http.response.start" and _is_stream(message):
                self._held.append(message)
                self._timer = asyncio.create_task(self._open_later())
            elif self._held and REFUSAL in self._scope:
                await self._refuse()
            elif self._held and message.get("body", b"").startswith(_OPENING_EVENTS):
                self._held.append(message)
            else:
                await self._open()
                await self._send(message)

    async def close(self) -> None:
        """The application has ended."""
        async with self._lock:
            if not self._refused:
                await self._open()

    async def _open_later(self) -> None:
        await asyncio.sleep(self._hold_s)
        async with self._lock:
            self._timer = None
            await self._open()

    async def _open(self) -> None:
        self._stop_timer()
        held, self._held = self._held, []
        for message in held:
            await self._send(message)

    async def _refuse(self) -> None:
        self._stop_timer()
        self._refused, self._held = True, []
        body = json.dumps(errors.body(self._scope["path"], 400, self._scope[REFUSAL])).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        await self._send({"type": "http.response.start", "status": 400, "headers": headers})
        await self._send({"type": "http.response.body", "body": body})

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _is_stream(start: Message) -> bool:
    kind = dict(start.get("headers", ())).get(b"content-type", b"")
    return start["status"] == 200 and kind.startswith(b"text/event-stream")
