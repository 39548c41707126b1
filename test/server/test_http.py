"""Clients without a package: curl, clients that leave before the answer, /ft/experts. An API key; a dense model."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest
from serving import Server, serving


@pytest.mark.skipif(not shutil.which("curl"), reason="curl is not installed")
@pytest.mark.parametrize("stream", [False, True])
def test_curl(demo_server: Server, stream: bool):
    body = {
        "model": "default",
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
        "temperature": 0,
        "max_tokens": 60,
        "stream": stream,
    }
    command = [
        "curl",
        "-sN",
        "--fail-with-body",
        "--max-time",
        "60",
        demo_server.url + "/v1/chat/completions",
    ]
    command += ["-H", "Content-Type: application/json", "-d", json.dumps(body)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    if not stream:
        assert "Paris" in json.loads(done.stdout)["choices"][0]["message"]["content"]
        return
    lines = [line for line in done.stdout.splitlines() if line]
    assert lines[-1] == "data: [DONE]"
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    text = "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks if c["choices"])
    assert "Paris" in text


# Would keep the server at work for minutes if nobody ended it.
LONG_ANSWER = {
    "model": "default",
    "prompt": "The valley",
    "max_tokens": 3500,
    "temperature": 1,
    "ignore_eos": True,
}


def test_a_client_that_leaves_a_stream_ends_its_request(demo_server: Server):
    body = {**LONG_ANSWER, "stream": True}
    with httpx.stream("POST", demo_server.url + "/v1/completions", json=body, timeout=30) as answer:
        lines = answer.iter_lines()
        for _ in range(6):
            next(lines)
    demo_server.jobs_when_idle(timeout=30)
    assert demo_server.health().status_code == 200


def test_a_client_that_gives_up_waiting_ends_its_request(demo_server: Server):
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(demo_server.url + "/v1/completions", json=LONG_ANSWER, timeout=2)
    demo_server.jobs_when_idle(timeout=30)


def test_many_clients_that_leave_at_once(demo_server: Server):
    streams = []
    client = httpx.Client(base_url=demo_server.url, timeout=30)
    for _ in range(12):
        request = client.build_request("POST", "/v1/completions", json={**LONG_ANSWER, "stream": True})
        streams.append(client.send(request, stream=True))
    for stream in streams:
        stream.close()
    demo_server.jobs_when_idle(timeout=30)
    answer = client.post("/v1/completions", json={**LONG_ANSWER, "max_tokens": 4})
    assert answer.json()["usage"]["completion_tokens"] == 4


def test_the_experts_tell_their_mode_and_nothing_changes_without_a_gpu(demo_server: Server):
    url = demo_server.url + "/ft/experts"
    state = httpx.get(url, timeout=30)
    assert (state.status_code, state.headers["content-type"]) == (200, "application/json")
    assert state.json() == {"moe_mode": "cpu", "slots": 0}
    assert httpx.post(url, json={}, timeout=30).json() == state.json(), "nothing to change: the same as GET"
    for change in ({"moe_mode": "cache"}, {"reset": True}, {"no_such": 1}):
        answer = httpx.post(url, json=change, timeout=30)
        assert answer.status_code == 400
        assert answer.json()["error"]["message"].startswith("without a GPU there is nothing to change")
    assert demo_server.health().status_code == 200


def test_the_start_is_told_in_phases_that_add_up(demo_server: Server):
    answer = httpx.get(demo_server.url + "/ft/startup", timeout=30).json()
    phases = {p["name"]: p["seconds"] for p in answer["phases"]}
    assert {"launcher", "flags and imports of SGLang", "model", "weights", "cpu_worker"} <= phases.keys()
    assert min(phases.values()) >= 0
    assert abs(sum(phases.values()) - answer["seconds"]) < 0.02
    assert abs(answer["seconds"] - demo_server.ready_after) < 0.05 * demo_server.ready_after + 2
    assert f"{answer['seconds']:.2f} s  from launch to ready" in demo_server.log


@pytest.mark.parametrize(
    "body, words",
    [
        ("{", "the body is not JSON"),
        ("", "the body is not JSON"),
        ("[1]", "must be a JSON object"),
        ("null", "object"),
    ],
)
def test_a_change_of_the_experts_that_is_no_json_object(demo_server: Server, body: str, words: str):
    answer = httpx.post(demo_server.url + "/ft/experts", content=body, timeout=30)
    assert answer.status_code == 400
    assert words in answer.json()["error"]["message"]


@pytest.fixture(scope="module")
def dense_server(tiny_checkpoint) -> Iterator[Server]:
    flags = ("--api-key", "secret", "--context-length", "4096", "--chunked-prefill-size", "64")
    with serving(tiny_checkpoint("qwen3"), *flags, "--ft-decode-gap-ms", "0") as server:
        yield server


KEY = {"Authorization": "Bearer secret"}


def test_a_dense_model_is_served_plainly_behind_an_api_key(dense_server: Server):
    server = dense_server
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=server.url + "/v1", api_key="guess", max_retries=0).models.list()
    assert httpx.post(server.url + "/v1/chat/completions", json={}).status_code == 401
    assert httpx.get(server.url + "/ft/experts").status_code == 401
    assert httpx.get(server.url + "/ft/experts", headers=KEY).json() == {"moe_mode": None}
    client = openai.OpenAI(base_url=server.url + "/v1", api_key="secret", max_retries=0)
    answer = client.completions.create(model="default", prompt="abc", max_tokens=4)
    assert answer.usage.completion_tokens == 4
    assert "worker" not in server.children(), "no experts, no cpu_worker"
    assert "dense model" in server.log


def test_an_answer_goes_on_while_a_long_prompt_is_read(dense_server: Server):
    """Sixty chunks; without our turns in between, the running answer would stop until the last of them."""
    url, chunks, arrived = dense_server.url + "/generate", 60, []
    started, done = threading.Event(), threading.Event()

    def answer() -> None:
        sampling = {"temperature": 0, "max_new_tokens": 2000, "ignore_eos": True}
        body = {"input_ids": [5, 6, 7], "sampling_params": sampling, "stream": True}
        with httpx.stream("POST", url, json=body, headers=KEY, timeout=60) as response:
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    arrived.append(time.monotonic())
                    started.set()
                if done.is_set():
                    return

    with ThreadPoolExecutor() as pool:
        running = pool.submit(answer)
        assert started.wait(30)
        begin = time.monotonic()
        prompt = [random.randrange(20, 200) for _ in range(64 * chunks)]
        body = {"input_ids": prompt, "sampling_params": {"max_new_tokens": 1}}
        assert httpx.post(url, json=body, headers=KEY, timeout=60).status_code == 200
        end = time.monotonic()
        done.set()
        running.result()
    between = sum(begin < at < end for at in arrived)
    assert between >= chunks / 2, "one token a chunk"
