"""A soak: clients in tool loops, clients that leave, over-long prompts and malformed bodies, all at once.

    python benchmark/soak.py --minutes 30 --clients 16 --kill-worker-every 5

Starts a server with the demo model on this machine (or takes one that runs, --url), keeps it busy for the given
time, and compares the memory of each of its processes after a warm-up with that at the end. Writes
benchmark/results/soak.json; exits with 1 after a crash, an unexpected error or growth above the limit.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

REPOSITORY = Path(__file__).parents[1]
sys.path[:0] = [str(REPOSITORY / "benchmark"), str(REPOSITORY / "test")]

import anthropic  # noqa: E402
import bad_requests  # noqa: E402
import httpx  # noqa: E402
import openai  # noqa: E402
import psutil  # noqa: E402
import results_file  # noqa: E402
from serving import DEMO, Server, serving  # noqa: E402

MIB = 1 << 20
CONTEXT_LENGTH = 4096
# Small pools, so that all of their memory is touched during the warm-up and what grows later is a leak.
SERVER_FLAGS = ("--context-length", str(CONTEXT_LENGTH), "--max-total-tokens", "16384")
SERVER_FLAGS += ("--max-running-requests", "16")
WARM_UP_S = 300  # caches that have a bound (oneDNN kernels, prefixes) fill in this time
SAMPLE_S = 5
REPLACEMENT_S = 20  # so long after a kill of the worker, requests may fail with 503
MAX_REQUESTS = 2_000_000
CITIES = ("Paris", "Rome", "Madrid", "Berlin", "Lisbon", "Vienna", "Oslo", "Cairo", "Lima", "Athens")
SKIES = ("sunny", "cloudy", "rainy", "windy", "snowy", "foggy")
TOOL = {
    "name": "get_weather",
    "description": "Get the current weather in a city",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}


class Tally:
    """What happened so far, over all clients."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self.unexpected: list[str] = []
        self.last_kill = -1e9

    def add(self, what: str) -> None:
        with self._lock:
            self._counts[what] += 1

    def failed(self, what: str, error: BaseException) -> None:
        """An error that a client met: expected only while the worker is being replaced."""
        if time.monotonic() - self.last_kill < REPLACEMENT_S:
            self.add("errors_during_worker_replacement")
            return
        self.add("errors_unexpected")
        with self._lock:
            self.unexpected.append(f"{what}: {type(error).__name__}: {str(error)[:300]}")

    def counts(self) -> dict[str, int]:
        with self._lock:
            return dict(self._counts)


class Client:
    """One client: its connections, its randomness, and the things that it does."""

    def __init__(self, url: str, seed: int, tally: Tally) -> None:
        self.rng = random.Random(seed)
        self.tally = tally
        self.openai = openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0, timeout=300)
        self.anthropic = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0, timeout=300)
        self.http = httpx.Client(base_url=url, timeout=300)
        self.actions: list[Callable[[], None]] = [self.openai_loop, self.anthropic_loop, self.leave]
        self.actions += [self.too_long, self.malformed]

    def run(self, deadline: float) -> None:
        """One thing after another until the deadline."""
        for _ in range(MAX_REQUESTS):
            if time.monotonic() > deadline:
                return
            (action,) = self.rng.choices(self.actions, weights=(35, 30, 12, 8, 15))
            try:
                action()
                self.tally.add(f"done_{action.__name__}")
            except (openai.APIError, anthropic.APIError, httpx.HTTPError, AssertionError) as e:
                self.tally.failed(action.__name__, e)
                time.sleep(1)

    def openai_loop(self) -> None:
        """Questions to the openai package, each with a call and its result; half of them streamed."""
        messages: list[Any] = []
        for _ in range(self.rng.randint(1, 3)):
            city, result = self._task()
            messages.append({"role": "user", "content": f"What is the weather in {city}?"})
            message = self._openai_turn(messages)
            messages.append(message)
            calls = message.get("tool_calls") or []
            self._judge_call([(c["function"]["name"], c["function"]["arguments"]) for c in calls], city)
            for call in calls:
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": json.dumps(result)})
            if calls:
                answer = self._openai_turn(messages)
                self._judge_answer(answer.get("content") or "", result)
                messages.append({"role": "assistant", "content": answer.get("content") or ""})

    def _openai_turn(self, messages: list[Any]) -> dict[str, Any]:
        self.tally.add("requests")
        tools = [{"type": "function", "function": TOOL}]
        options: Any = {"model": "default", "messages": messages, "tools": tools, "max_tokens": 160}
        options["temperature"] = 0
        if self.rng.random() < 0.5:
            answer = self.openai.chat.completions.create(**options)
            return answer.choices[0].message.model_dump(exclude_none=True)
        with self.openai.chat.completions.create(**options, stream=True) as stream:
            return _collect(stream)

    def anthropic_loop(self) -> None:
        """The same with the anthropic package."""
        messages: list[Any] = []
        city, result = self._task()
        messages.append({"role": "user", "content": f"What is the weather in {city}?"})
        blocks = self._anthropic_turn(messages)
        calls = [block for block in blocks if block["type"] == "tool_use"]
        self._judge_call([(call["name"], json.dumps(call["input"])) for call in calls], city)
        if not calls:
            return
        messages.append({"role": "assistant", "content": blocks})
        results = [
            {"type": "tool_result", "tool_use_id": c["id"], "content": json.dumps(result)} for c in calls
        ]
        messages.append({"role": "user", "content": results})
        answer = self._anthropic_turn(messages)
        self._judge_answer("".join(block.get("text", "") for block in answer), result)

    def _anthropic_turn(self, messages: list[Any]) -> list[dict[str, Any]]:
        self.tally.add("requests")
        tool = {
            "name": TOOL["name"],
            "description": TOOL["description"],
            "input_schema": TOOL["parameters"],
        }
        options: Any = {"model": "default", "messages": messages, "tools": [tool], "max_tokens": 160}
        options["extra_body"] = {"temperature": 0}
        if self.rng.random() < 0.5:
            return [
                b.model_dump(exclude_none=True) for b in self.anthropic.messages.create(**options).content
            ]
        with self.anthropic.messages.stream(**options) as stream:
            return [b.model_dump(exclude_none=True) for b in stream.get_final_message().content]

    def leave(self) -> None:
        """Asks for a long answer and hangs up after some of it."""
        self.tally.add("requests")
        body = {
            "model": "default",
            "prompt": "The valley",
            "max_tokens": 2000,
            "ignore_eos": True,
            "stream": True,
        }
        with self.http.stream("POST", "/v1/completions", json=body) as answer:
            assert answer.status_code == 200, f"status {answer.status_code}"
            lines = answer.iter_lines()
            for _ in range(self.rng.randint(0, 12)):
                next(lines, None)

    def too_long(self) -> None:
        """A prompt above the context length."""
        words = "word " * self.rng.randint(CONTEXT_LENGTH, 2 * CONTEXT_LENGTH)
        path = self.rng.choice([bad_requests.CHAT, bad_requests.MESSAGES])
        body = {"model": "default", "messages": [{"role": "user", "content": words}], "max_tokens": 8}
        self._expect_4xx(path, json.dumps({**body, "stream": self.rng.random() < 0.5}).encode())

    def malformed(self) -> None:
        """One of the bodies of test/bad_requests.py."""
        bad = self.rng.choice(bad_requests.ALL)
        self._expect_4xx(bad.path, bad.body, bad.headers)

    def _expect_4xx(self, path: str, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.tally.add("requests")
        answer = self.http.post(path, content=body, headers=headers or bad_requests.JSON)
        assert 400 <= answer.status_code < 500, f"{path}: status {answer.status_code}: {answer.text[:200]}"

    def _task(self) -> tuple[str, dict[str, Any]]:
        result = {"temperature": self.rng.randint(-9, 35), "condition": self.rng.choice(SKIES)}
        return self.rng.choice(CITIES), result

    def _judge_call(self, calls: list[tuple[str, str]], city: str) -> None:
        right = bool(calls) and calls[0][0] == TOOL["name"] and city in calls[0][1]
        self.tally.add("calls_right" if right else "calls_wrong")

    def _judge_answer(self, text: str, result: dict[str, Any]) -> None:
        self.tally.add("answers_right" if str(result["temperature"]) in text else "answers_wrong")


def _collect(stream: Any) -> dict[str, Any]:
    """The message of a streamed chat."""
    content, calls = "", []
    for chunk in stream:
        for choice in chunk.choices:
            content += choice.delta.content or ""
            for call in choice.delta.tool_calls or ():
                if call.function.name:
                    calls.append([call.id, call.function.name, ""])
                calls[-1][2] += call.function.arguments or ""
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if calls:
        message["tool_calls"] = [
            {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}
            for id, name, arguments in calls
        ]
    return message


class Sample(NamedTuple):
    """Memory of one process: its share of shared pages counted in, and its private pages."""

    pss: int
    private: int


def memory(server: Server) -> dict[str, Sample]:
    """Of each process of the server that is alive, by name."""
    found = {}
    for name, process in server.children().items():
        if name.startswith("python"):
            continue  # the tracker of multiprocessing
        with contextlib.suppress(psutil.Error):
            info = process.memory_full_info()
            found[name.removeprefix("sglang::")] = Sample(info.pss, info.uss)
    return found


class Watch:
    """Samples memory until told to stop, and kills the worker now and then."""

    def __init__(self, server: Server, tally: Tally, kill_every_s: float) -> None:
        self.samples: list[dict[str, Sample]] = []
        self.kills = 0
        self._server, self._tally, self._kill_every_s = server, tally, kill_every_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        next_kill = time.monotonic() + self._kill_every_s
        while not self._stop.wait(SAMPLE_S):
            with contextlib.suppress(psutil.Error):
                self.samples.append(memory(self._server))
            if self._kill_every_s and time.monotonic() > next_kill:
                next_kill += self._kill_every_s
                with contextlib.suppress(psutil.Error, KeyError):
                    self._tally.last_kill = time.monotonic()
                    self._server.worker.kill()
                    self.kills += 1


def soak(url: str, clients: int, seconds: float, tally: Tally) -> None:
    """Runs the clients to the end of the time."""
    deadline = time.monotonic() + seconds
    runs = [Client(url, seed, tally).run for seed in range(clients)]
    threads = [threading.Thread(target=run, args=(deadline,), daemon=True) for run in runs]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        time.sleep(min(30, max(1, seconds / 10)))
        print(f"{max(0, deadline - time.monotonic()):6.0f} s left  {tally.counts()}", flush=True)


def growth(samples: list[dict[str, Sample]], warm_up: int) -> Iterator[tuple[str, float, float]]:
    """(process, MiB at start, MiB at end); each the median of the nearest five samples, after the warm-up."""
    samples = samples[min(warm_up, len(samples) // 3) :]
    for name in sorted(set.intersection(*(set(sample) for sample in samples)) if samples else ()):
        sizes = [sample[name].private / MIB for sample in samples]
        yield name, sorted(sizes[:5])[len(sizes[:5]) // 2], sorted(sizes[-5:])[len(sizes[-5:]) // 2]


def run_on_server(args: argparse.Namespace, tally: Tally) -> tuple[dict[str, float], list[str]]:
    """Soaks a server of our own. Returns metrics of its processes and what is wrong with them."""
    metrics: dict[str, float] = {}
    problems = []
    with serving(args.model, *SERVER_FLAGS) as server:
        watch = Watch(server, tally, args.kill_worker_every * 60)
        soak(server.url, args.clients, args.minutes * 60, tally)
        watch.stop()
        time.sleep(5)
        watch.samples.append(memory(server))
        if server.process.poll() is not None or server.health().status_code != 200:
            problems.append("the server is not healthy at the end:\n" + server.log[-3000:])
        else:
            metrics["worker_restarts"] = server.metrics().get("sglang_ft_worker_restarts_total", 0)
    metrics["worker_kills"] = watch.kills
    for name, start, end in growth(watch.samples, WARM_UP_S // SAMPLE_S):
        metrics |= {f"{name}_start_mib": start, f"{name}_end_mib": end, f"{name}_growth_mib": end - start}
        if end - start > args.max_growth_mib:
            problems.append(
                f"{name} grew from {start:.0f} to {end:.0f} MiB (limit {args.max_growth_mib} MiB)"
            )
    return metrics, problems


def main() -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--model", type=Path, default=DEMO)
    parser.add_argument(
        "--url", help="a server on this machine that runs already; its memory is not looked at"
    )
    parser.add_argument("--kill-worker-every", type=float, default=0, metavar="MINUTES", help="0: never")
    parser.add_argument("--max-growth-mib", type=float, default=64, help="of one process, after the warm-up")
    parser.add_argument("--output", type=Path, default=results_file.RESULTS / "soak.json")
    args = parser.parse_args()
    if args.url and httpx.URL(args.url).host not in ("127.0.0.1", "localhost"):
        parser.error("--url: only a server on this machine (127.0.0.1)")
    tally = Tally()
    start = time.monotonic()
    if args.url:
        soak(args.url, args.clients, args.minutes * 60, tally)
        metrics, problems = {}, []
    else:
        metrics, problems = run_on_server(args, tally)
    problems += [*tally.unexpected[:20]]
    counts = {"errors_unexpected": 0, "errors_during_worker_replacement": 0, **tally.counts()}
    metrics |= {"minutes": args.minutes, "clients": args.clients, "seconds": time.monotonic() - start}
    results_file.write(args.output, "soak", {**counts, **metrics})
    for problem in problems:
        print(f"PROBLEM {problem}", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
