"""The prompt of a whole chunk that a server with a GPU runs once at its start."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from types import SimpleNamespace

import pytest

from sglang_ft.engine import warmup
from sglang_ft.engine.install import check_signature


@pytest.fixture
def server():
    """Answers as told and keeps what it was sent."""
    seen = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            seen.append((self.path, self.headers["Authorization"], body))
            self.send_response(http.status)
            self.end_headers()

        def log_message(self, *args) -> None:
            pass

    http = HTTPServer(("127.0.0.1", 0), Handler)
    http.status, http.seen = 200, seen
    threading.Thread(target=http.serve_forever, daemon=True).start()
    yield http
    http.shutdown()


def args(server, **fields):
    url = f"http://127.0.0.1:{server.server_port}"
    given = {
        "chunked_prefill_size": 4096,
        "context_length": None,
        "max_total_tokens": 50_000,
        "api_key": None,
    }
    return SimpleNamespace(url=lambda: url, ssl_verify=lambda: True, **given | fields)


@pytest.mark.parametrize(
    "fields, context, rows",
    [
        ({}, 262_144, 4080),
        ({"context_length": 1000}, 262_144, 984),
        ({"chunked_prefill_size": -1, "max_total_tokens": 2016}, 0, 2000),
        ({}, 512, 496),
    ],
)
def test_the_longest_prompt_of_one_pass_is_sent(server, fields, context, rows):
    warmup.run_longest_pass(args(server, api_key="secret", **fields), context)
    ((path, key, body),) = server.seen
    assert (path, key, len(body["input_ids"])) == ("/generate", "Bearer secret", rows)


def test_a_failure_is_told_and_the_server_goes_on(server, caplog):
    server.status = 503
    warmup.run_longest_pass(args(server), 0)
    assert "4080 tokens failed at the start" in caplog.text


def test_it_comes_after_sglang_s_own_when_that_went_well(server):
    (hook,) = warmup.hooks(0)
    check_signature(hook)
    assert hook.function(lambda _: False, args(server)) is False and not server.seen
    assert hook.function(lambda _: True, args(server)) is True and len(server.seen) == 1
