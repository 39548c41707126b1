"""The demo model on a GPU, by real servers: every mode, pool and way to run a step gives the same probabilities."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from serving import DEMO, Server, serving

from sglang_ft.experts.replay import replay
from sglang_ft.experts.traces import read_trace

FLAGS = ("--attention-backend", "triton", "--sampling-backend", "pytorch", "--context-length", "2048")
FLAGS += ("--max-total-tokens", "16384", "--max-running-requests", "8", "--cuda-graph-max-bs", "8")
FLAGS += ("--mem-fraction-static", "0.5", "--skip-server-warmup")
PROMPTS = ["The valley", "def area(width, height):", "What is the weather in Paris?", "One, two, three,"]
LONG = "The river runs through the valley. " * 40  # more rows than a step of the cache takes
# Rounding of bfloat16 sums; routes that are nearly tied may go the other way.
TOLERANCE = 0.08

WAYS = {
    "middle pool": ("--ft-moe-mode", "hybrid", "--ft-slots", "60"),
    "smallest pool, no graphs": ("--ft-moe-mode", "hybrid", "--ft-slots", "1", "--disable-cuda-graph"),
    "no overlap": ("--ft-moe-mode", "cache", "--ft-slots", "60", "--disable-overlap-schedule"),
    "all in the worker": ("--ft-moe-mode", "cpu"),
    "short chunks": ("--ft-moe-mode", "hybrid", "--ft-slots", "60", "--chunked-prefill-size", "100"),
    "whole layers": ("--ft-moe-mode", "hybrid", "--ft-slots", "130", "--disable-cuda-graph"),
}


def complete(server: Server, prompt: str, tokens: int = 24) -> list[float]:
    """Log probabilities of a greedy continuation."""
    body: dict[str, Any] = {"model": "demo", "prompt": prompt, "max_tokens": tokens, "temperature": 0}
    reply = httpx.post(server.url + "/v1/completions", json={**body, "logprobs": 1}, timeout=120)
    reply.raise_for_status()
    return reply.json()["choices"][0]["logprobs"]["token_logprobs"]


def together(server: Server, prompts: list[str]) -> list[list[float]]:
    """The same for all of them at once."""
    answers: dict[int, list[float]] = {}
    threads = [
        threading.Thread(target=lambda i=i, p=p: answers.update({i: complete(server, p)}))
        for i, p in enumerate(prompts)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [answers[i] for i in range(len(prompts))]


def answers_by(server: Server, path: str) -> list[list[float]]:
    """The answers when the experts of prompts run by one path, where that is possible; nothing is cached of them."""
    for change in ({"prompt_path": "auto"}, {"prompt_path": path}):  # 400 where there are no buffers
        httpx.post(server.url + "/ft/experts", json=change, timeout=30)
    httpx.post(server.url + "/flush_cache", timeout=30).raise_for_status()
    return [complete(server, prompt) for prompt in [*PROMPTS, LONG]]


@pytest.fixture(scope="module")
def resident() -> Iterator[list[list[float]]]:
    """What all experts in GPU memory answer."""
    with serving(DEMO, *FLAGS, "--ft-moe-mode", "resident") as server:
        yield [complete(server, prompt) for prompt in [*PROMPTS, LONG]]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("way", WAYS)
def test_every_way_gives_the_same(resident: list[list[float]], way: str) -> None:
    with serving(DEMO, *FLAGS, *WAYS[way]) as server:
        alone = [complete(server, prompt) for prompt in [*PROMPTS, LONG]]
        by_path = [answers_by(server, path) for path in ("slots", "stream", "worker")]
        at_once = together(server, [*PROMPTS, LONG])
        state = httpx.get(server.url + "/ft/experts", timeout=30).json()
    for answers in (alone, at_once, *by_path):
        for got, want in zip(answers, resident, strict=True):
            assert max(abs(a - b) for a, b in zip(got, want, strict=True)) < TOLERANCE
    assert state["misses"] > 0 and state["failed_jobs"] == 0


@pytest.mark.timeout(300)
def test_a_worker_killed_during_decode(resident: list[list[float]]) -> None:
    with serving(DEMO, *FLAGS, *WAYS["middle pool"]) as server:
        stop = threading.Event()

        def kill() -> None:
            while not stop.wait(1.0):
                with contextlib.suppress(Exception):
                    server.worker.kill()

        killer = threading.Thread(target=kill)
        killer.start()
        answered = refused = 0
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            try:
                got = complete(server, PROMPTS[0])
            except httpx.HTTPStatusError as e:
                assert e.response.status_code == 503, e.response.text
                refused += 1
                continue
            answered += 1
            assert max(abs(a - b) for a, b in zip(got, resident[0], strict=True)) < TOLERANCE
        stop.set()
        killer.join()
        assert answered > 5, f"{answered} answered, {refused} refused"
        deadline = time.monotonic() + 10
        while server.health().status_code != 200:
            assert time.monotonic() < deadline
            time.sleep(0.2)


@pytest.mark.timeout(300)
def test_recorded_routes_replay_to_the_digit(tmp_path: Path) -> None:
    """The counters of a server are those of the offline replay of the routes that it recorded."""
    trace = tmp_path / "trace"
    flags = ("--ft-moe-mode", "cache", "--ft-slots", "60", "--ft-record-routes", str(trace))
    with serving(DEMO, *FLAGS, *flags) as server, ThreadPoolExecutor() as pool:
        answer = pool.submit(complete, server, PROMPTS[0], 600)
        time.sleep(0.5)  # past the prompt, whose steps a replay does not know
        assert not answer.done()
        httpx.post(server.url + "/ft/experts", json={"reset": True}, timeout=30).raise_for_status()
        answer.result()
        state = httpx.get(server.url + "/ft/experts", timeout=30).json()
    recorded = read_trace(trace)
    counters = vars(replay(recorded.last(state["steps"] // recorded.header.num_layers), 60).counters)
    assert counters["misses"] > 100
    assert {name: state[name] for name in counters} == counters
