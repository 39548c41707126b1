"""A refused stream becomes a 400; any other stream passes unchanged and is not held for long."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

from sglang_ft.api.stream_refusals import REFUSAL, Gate

START = {"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]}
CREATED = {"type": "http.response.body", "body": b"event: response.created\n\n", "more_body": True}
TOKEN = {"type": "http.response.body", "body": b"data: token\n\n", "more_body": True}
END = {"type": "http.response.body", "body": b"", "more_body": False}


def passed(*steps: Any, path: str = "/v1/responses", hold_s: float = 30.0) -> list[Any]:
    """What the client gets of `steps`: messages; a text refuses; a number waits so many seconds."""
    sent: list[Any] = []

    async def run() -> None:
        scope: dict[str, Any] = {"path": path}

        async def send(message: Any) -> None:
            sent.append(message)

        gate = Gate(scope, send, hold_s)
        for step in steps:
            if isinstance(step, str):
                scope[REFUSAL] = step
            elif isinstance(step, float):
                await asyncio.sleep(step)
                sent.append("waited")
            else:
                await gate.send(step)
        await gate.close()

    asyncio.run(run())
    return sent


def test_a_stream_passes_unchanged():
    messages = [START, CREATED, TOKEN, TOKEN, END]
    start = time.monotonic()
    assert passed(*messages) == messages
    assert time.monotonic() - start < 5


def test_a_stream_of_opening_events_only_passes_at_its_end():
    assert passed(START, CREATED) == [START, CREATED]


def test_a_refusal_before_the_first_token_is_a_400():
    for opening in ([START], [START, CREATED]):
        start, body = passed(*opening, "too long", CREATED, TOKEN, END)
        assert start["status"] == 400
        assert json.loads(body["body"])["error"]["message"] == "too long"


def test_a_refusal_has_the_shape_of_its_api():
    _, body = passed(START, "too long", TOKEN, path="/v1/messages")
    assert json.loads(body["body"])["error"]["type"] == "invalid_request_error"
    assert json.loads(body["body"])["type"] == "error"


def test_a_refusal_after_the_first_token_comes_as_the_application_says():
    assert passed(START, TOKEN, "too late", TOKEN, END) == [START, TOKEN, TOKEN, END]


def test_headers_are_not_held_during_a_long_prefill():
    assert passed(START, CREATED, 0.2, TOKEN, hold_s=0.01) == [START, CREATED, "waited", TOKEN]


def test_other_responses_are_not_held():
    plain = {
        "type": "http.response.start",
        "status": 200,
        "headers": [(b"content-type", b"application/json")],
    }
    assert passed(plain, 0.0, END) == [plain, "waited", END]
