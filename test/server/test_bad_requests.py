"""What clients do wrong: a 4xx with a helpful text, never a 5xx, and the server goes on."""

from __future__ import annotations

import json
from typing import Any

import bad_requests
import httpx
import pytest
from bad_requests import CHAT, COMPLETIONS, COUNT, GENERATE, MESSAGES, RESPONSES, BadRequest
from serving import Server

USER = [{"role": "user", "content": "Hello!"}]


@pytest.fixture(scope="module")
def http(demo_server: Server):
    with httpx.Client(base_url=demo_server.url, timeout=30) as client:
        yield client


@pytest.fixture(scope="module", autouse=True)
def the_server_is_well_afterwards(demo_server: Server):
    yield
    assert demo_server.process.poll() is None
    assert demo_server.health().status_code == 200
    body = {"model": "default", "messages": USER, "max_tokens": 8}
    assert httpx.post(demo_server.url + CHAT, json=body, timeout=30).status_code == 200


def message_of(answer: httpx.Response) -> str:
    """The text of an error, in whichever of the shapes of the APIs."""
    body = answer.json()
    error = body.get("error", body)
    assert isinstance(error["message"], str), body
    for internal in ("Traceback", "site-packages", 'File "'):
        assert internal not in error["message"]
    return error["message"]


@pytest.mark.parametrize("bad", bad_requests.ALL, ids=str)
def test_a_bad_request_is_refused_with_a_reason(http: httpx.Client, bad: BadRequest):
    answer = http.request(bad.method, bad.path, content=bad.body, headers=bad.headers)
    assert answer.status_code in bad.statuses, answer.text
    text = message_of(answer).lower()
    assert not bad.says or any(words.lower() in text for words in bad.says), text
    assert len(text) < 2000


@pytest.mark.parametrize("bad", [*bad_requests.CHATS, *bad_requests.COMPLETION_CASES], ids=str)
def test_a_bad_request_for_a_stream_is_refused_too(http: httpx.Client, bad: BadRequest):
    """Most are refused before the stream starts; what only the scheduler notices comes as an error event."""
    try:
        body = json.dumps({"stream": True, **json.loads(bad.body)})
    except ValueError:
        pytest.skip("not JSON")
    answer = http.post(bad.path, content=body, headers=bad.headers)
    if answer.status_code == 200:
        events = [
            line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: {")
        ]
        assert any("error" in json.loads(event) for event in events), answer.text[-500:]
    else:
        assert answer.status_code == 400, answer.text


LONG = "word " * 5000


@pytest.mark.parametrize(
    "path, body",
    [
        (CHAT, {"messages": [{"role": "user", "content": LONG}], "max_tokens": 4}),
        (COMPLETIONS, {"prompt": LONG, "max_tokens": 4}),
        (MESSAGES, {"messages": [{"role": "user", "content": LONG}], "max_tokens": 4}),
        (RESPONSES, {"input": LONG, "max_output_tokens": 4}),
        (GENERATE, {"text": LONG}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_prompt_that_is_too_long_names_both_lengths(
    http: httpx.Client, path: str, body: dict[str, Any], stream: bool
):
    answer = http.post(path, json={"model": "default", "stream": stream, **body})
    assert answer.status_code == 400, answer.text
    text = message_of(answer)
    assert "4096 tokens" in text
    lengths = [int(word.strip("(),.")) for word in text.split() if word.strip("(),.").isdigit()]
    assert max(lengths) > 5000


def test_a_completion_that_is_too_long_is_refused_with_numbers(http: httpx.Client):
    answer = http.post(CHAT, json={"model": "default", "messages": USER, "max_tokens": 1_000_000})
    assert answer.status_code == 400
    assert "1000000" in message_of(answer) and "4096" in message_of(answer)


def test_counting_a_long_prompt_is_no_error(http: httpx.Client):
    body = {"model": "default", "messages": [{"role": "user", "content": LONG}]}
    assert http.post(COUNT, json=body).json()["input_tokens"] > 5000


@pytest.mark.parametrize(
    "path", ["/v1/nothing", "/v2/chat/completions", "/chat/completions", "/%00", "/v1/../etc"]
)
def test_a_path_that_is_not_there_is_404(http: httpx.Client, path: str):
    assert http.post(path, json={}).status_code == 404


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, MESSAGES, RESPONSES])
def test_a_wrong_method_is_405(http: httpx.Client, path: str):
    assert http.delete(path).status_code == 405
    assert http.get(path).status_code == 405


def test_a_body_shorter_than_it_says_does_not_hold_the_server(demo_server: Server):
    import socket

    with socket.create_connection(("127.0.0.1", demo_server.port), timeout=5) as connection:
        connection.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n{")
    with socket.create_connection(("127.0.0.1", demo_server.port), timeout=5) as connection:
        connection.sendall(b"\x16\x03\x01 this is not HTTP\r\n\r\n")
        assert connection.recv(64).startswith(b"HTTP/1.1 400")
    assert demo_server.health().status_code == 200
