"""A worker that is killed, stopped or kept from running, under a real server with requests in flight."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest
from serving import Server, serving

PROMPT = list(range(20, 60))


@pytest.fixture(scope="module")
def server(tiny_checkpoint):
    with serving(tiny_checkpoint("qwen3_moe"), "--dtype", "float32", "--context-length", "4096") as running:
        yield running


def generate(server: Server, tokens: int = 48, prompt: list[int] | None = None) -> httpx.Response:
    sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
    body = {"input_ids": prompt or PROMPT, "sampling_params": sampling}
    return httpx.post(server.url + "/generate", json=body, timeout=60)


def output(response: httpx.Response) -> list[int]:
    assert response.status_code == 200, response.text
    return response.json()["output_ids"]


def reasons_to_be_unhealthy(server: Server, seconds: float) -> list[str]:
    """What /health says while it is 503. SGLang's own answer, a second later, is not waited for."""
    reasons = []
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and not reasons:
        with contextlib.suppress(httpx.TimeoutException):
            response = httpx.get(server.url + "/health", timeout=0.1)
            if response.status_code == 503:
                reasons.append(response.json()["reason"])
    return reasons


def wait_healthy(server: Server, seconds: float = 10) -> None:
    deadline = time.monotonic() + seconds
    while server.health().status_code != 200:
        assert time.monotonic() < deadline, server.health().text


def restarts(server: Server) -> int:
    time.sleep(1.5)  # counters are exported twice a second
    return int(server.metrics()["sglang_ft_worker_restarts_total"])


@contextlib.contextmanager
def keep_killing(server: Server):
    """Kills every worker process as soon as it is seen."""
    stop = threading.Event()

    tasks = Path(f"/proc/{server.worker.parent().pid}/task")

    def kill() -> None:
        # Faster than a worker starts: none becomes ready.
        while not stop.is_set():
            for children in tasks.glob("*/children"):
                with contextlib.suppress(OSError):
                    for pid in children.read_text().split():
                        os.kill(int(pid), signal.SIGKILL)

    thread = threading.Thread(target=kill)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def test_an_idle_server_burns_no_core(server):
    output(generate(server))
    time.sleep(2)
    processes = server.children().values()
    before = sum(sum(p.cpu_times()[:2]) for p in processes)
    time.sleep(4)
    assert sum(sum(p.cpu_times()[:2]) for p in processes) - before < 0.8, (
        "a fifth of a core, all processes together"
    )


def test_a_request_survives_a_killed_worker_with_the_same_answer(server):
    expected = output(generate(server))
    before = restarts(server)
    with ThreadPoolExecutor() as pool:
        running = pool.submit(generate, server, 400)
        time.sleep(0.3)
        server.worker.kill()
        assert output(running.result())[:48] == expected
    wait_healthy(server)
    assert restarts(server) == before + 1
    assert output(generate(server)) == expected


def test_a_stopped_worker_is_replaced_and_the_request_goes_on(server):
    expected = output(generate(server))
    server.worker.suspend()
    with ThreadPoolExecutor() as pool:
        started = time.monotonic()
        running = pool.submit(generate, server)
        assert output(running.result()) == expected
        assert time.monotonic() - started < 8
    wait_healthy(server)


def test_requests_end_with_an_error_within_five_seconds_when_no_worker_stays_alive(server):
    expected = output(generate(server))
    with ThreadPoolExecutor() as pool, keep_killing(server):
        started = time.monotonic()
        running = [pool.submit(generate, server, 400, [*PROMPT, i]) for i in range(4)]
        assert all(r.result().status_code == 503 for r in running)
        assert all("cpu_worker" in r.result().text for r in running)
        assert time.monotonic() - started < 5 + 2, "the passes themselves take a moment too"
        assert any("cpu_worker" in reason for reason in reasons_to_be_unhealthy(server, 5))
    wait_healthy(server)
    assert output(generate(server)) == expected, "nothing wrong was left in the prefix cache"


def test_a_long_prompt_that_fails_in_the_middle_ends_with_an_error_and_frees_its_memory(server):
    long_prompt = [20 + i % 250 for i in range(3900)]
    with ThreadPoolExecutor() as pool, keep_killing(server):
        response = pool.submit(generate, server, 8, long_prompt).result()
        assert response.status_code == 503
    wait_healthy(server)
    expected = output(generate(server, 8, long_prompt))
    assert output(generate(server, 8, long_prompt)) == expected


def test_the_worker_ends_with_the_server(tiny_checkpoint):
    with serving(tiny_checkpoint("qwen3_moe"), "--context-length", "4096") as running:
        worker, main = running.worker, psutil.Process(running.process.pid)
        main.kill()
        worker.wait(timeout=10)


def test_health_tells_the_reason_while_loading(tiny_checkpoint):
    server = Server(tiny_checkpoint("qwen3_moe"))
    try:
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            with contextlib.suppress(httpx.TransportError):
                response = server.health()
                break
            time.sleep(0.05)
        assert response.status_code == 503
        assert response.json()["reason"] == "the server is starting"
        other = httpx.get(server.url + "/v1/models")
        assert other.status_code == 503 and "Retry-After" in other.headers
        server.wait_ready()
    finally:
        server.stop()
