"""What prompts cost with the experts partly in GPU memory, as shares of one full stream of the experts over the link.

    python benchmark/prefill.py --config shapes.json

Random weights of the given shapes (a config.json), routers as uneven as a miss rate of about 16 % takes. One full
stream is the bytes of all experts over the rate of a plain copy from pinned memory, measured in the same run. Times of
passes are the GPU's own. Writes benchmark/results/prefill.json.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[1]
sys.path[:0] = [str(REPOSITORY / "benchmark"), str(REPOSITORY / "test")]

import httpx  # noqa: E402
import results_file  # noqa: E402
import torch  # noqa: E402
from decode import shapes_folder  # noqa: E402
from serving import Server  # noqa: E402

FLAGS = ("--load-format", "dummy", "--skip-tokenizer-init", "--skip-server-warmup")
FLAGS += ("--attention-backend", "triton", "--sampling-backend", "pytorch", "--cuda-graph-max-bs", "4")
FLAGS += ("--max-running-requests", "4", "--context-length", "40000", "--max-total-tokens", "120000")
PREFIX, FOLLOW_UP = 4096, 64
PROBE_TOKENS = 128  # of an answer whose miss rate is looked at
_COPY_BYTES = 1 << 30


class Client:
    """Requests of random tokens to one server."""

    def __init__(self, server: Server) -> None:
        self.server, self.random = server, random.Random(7)

    def tokens(self, count: int) -> list[int]:
        return [self.random.randrange(1000, 100_000) for _ in range(count)]

    def answer(self, prompt: list[int], tokens: int = 1) -> Iterator[tuple[float, dict[str, Any]]]:
        """(time, meta_info) of each piece of an answer."""
        sampling = {"max_new_tokens": tokens, "ignore_eos": True, "temperature": 0}
        body = {"input_ids": prompt, "sampling_params": sampling, "stream": True}
        with httpx.stream("POST", self.server.url + "/generate", json=body, timeout=600) as reply:
            for line in reply.iter_lines():
                if line.startswith("data: {"):
                    yield time.perf_counter(), json.loads(line[6:])["meta_info"]

    def first_token_s(self, prompt: list[int]) -> tuple[float, dict[str, Any]]:
        """Time to the first token and what is told of the request."""
        begin = time.perf_counter()
        at, info = next(iter(self.answer(prompt)))
        return at - begin, info

    def experts(self, **change: Any) -> dict[str, Any]:
        """State of the experts, after a change if one is given."""
        url = self.server.url + "/ft/experts"
        reply = httpx.post(url, json=change, timeout=120) if change else httpx.get(url, timeout=120)
        reply.raise_for_status()
        return reply.json()

    def miss_rate(self, prompt: list[int]) -> float:
        """Of the decode steps of an answer, without those of its prompt."""
        pieces = iter(self.answer(prompt, PROBE_TOKENS))
        next(pieces)
        before = self.experts()
        for _ in pieces:
            pass
        after = self.experts()
        misses, hits = (after[name] - before[name] for name in ("misses", "hits"))
        return misses / max(misses + hits, 1)


def copy_rate() -> float:
    """Bytes a second of plain copies from pinned memory, while the server is idle."""
    host = torch.empty(_COPY_BYTES, dtype=torch.uint8, pin_memory=True)
    device = torch.empty(_COPY_BYTES, dtype=torch.uint8, device="cuda")
    seconds = []
    for _ in range(6):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        device.copy_(host, non_blocking=True)
        end.record()
        end.synchronize()
        seconds.append(begin.elapsed_time(end) * 1e-3)
    return _COPY_BYTES / sorted(seconds)[len(seconds) // 2]


def pass_seconds(client: Client, prompt: int) -> float:
    """Time on the GPU of a fresh prompt's passes."""
    before = client.experts()["prompts"]
    client.first_token_s(client.tokens(prompt))
    client.first_token_s(client.tokens(8))  # the times of a pass are collected when the next one begins
    after = client.experts()["prompts"]
    return after["stream"]["seconds"] - before["stream"]["seconds"]


def median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


def measure_chunks(client: Client, metrics: dict[str, float], repeats: int) -> None:
    """A chunk against a full stream; what copying ahead gains."""
    stream = metrics["stream_s"]
    chunk = median([pass_seconds(client, 8192) for _ in range(repeats)])
    metrics["chunk8k_over_stream"] = chunk / stream
    for ahead in (True, False):
        client.experts(stream_ahead=ahead)
        for size in (8192, 16384, 32000):
            seconds = median([client.first_token_s(client.tokens(size))[0] for _ in range(repeats)])
            name = f"prefill_{size // 1000}k_tokens_s{'' if ahead else '_not_ahead'}"
            metrics[name] = size / seconds
    client.experts(stream_ahead=True)
    for size in (8, 16, 32):
        ratio = metrics[f"prefill_{size}k_tokens_s"] / metrics[f"prefill_{size}k_tokens_s_not_ahead"]
        metrics[f"overlap_gain_{size}k"] = ratio - 1


def measure_follow_up(client: Client, metrics: dict[str, float], repeats: int) -> None:
    """A short turn on a cached prefix, and what the cache has for the answer before and after it."""
    prefix = client.tokens(PREFIX)
    client.first_token_s(prefix)
    for _ in range(2):
        client.miss_rate(prefix + client.tokens(8))  # fills the slots
    before, after, seconds = [], [], []
    for _ in range(repeats):
        before.append(client.miss_rate(prefix + client.tokens(8)))
        taken, info = client.first_token_s(prefix + client.tokens(FOLLOW_UP))
        assert info["cached_tokens"] >= PREFIX - 64, info
        seconds.append(taken)
        after.append(client.miss_rate(prefix + client.tokens(8)))
    metrics["followup64_s"] = median(seconds)
    metrics["followup64_over_stream"] = median(seconds) / metrics["stream_s"]
    metrics["miss_rate"] = median(before)
    metrics["hit_rate_change_points"] = 100 * (median(before) - median(after))


def measure_gap(client: Client, metrics: dict[str, float]) -> None:
    """The longest gap between the tokens of an answer while a long prompt is read."""
    times: list[float] = []
    stop = threading.Event()

    def run() -> None:
        for at, _ in client.answer(client.tokens(64), 4000):
            times.append(at)
            if stop.is_set():
                return

    running = threading.Thread(target=run)
    running.start()
    while len(times) < 100:
        time.sleep(0.05)
    begin = time.perf_counter()
    taken, _ = client.first_token_s(client.tokens(32000))
    end = time.perf_counter()
    stop.set()
    running.join()
    inside = [at for at in times if begin <= at <= end]
    edges = [begin, *inside, end]
    metrics["decode_gap_s"] = max(b - a for a, b in zip(edges, edges[1:], strict=False))
    metrics["decode_gap_over_stream"] = metrics["decode_gap_s"] / metrics["stream_s"]
    metrics["prefill_32k_tokens_s_beside_an_answer"] = 32000 / taken


def compare_plan(client: Client, metrics: dict[str, float]) -> None:
    """What the plan said against what is allocated once the longest passes have run."""
    memory = client.experts()["memory"]
    metrics |= {f"memory_{name}": value for name, value in memory.items()}
    metrics["plan_error_share"] = memory["used_bytes"] / memory["planned_bytes"] - 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", type=Path, required=True, help="config.json of the model's shapes")
    parser.add_argument("--slots", type=int, default=3789, help="37 %% of 40 x 256")
    parser.add_argument("--locality", type=float, default=0.5, help="of the routers, see --ft-dummy-locality")
    parser.add_argument("--threads", type=int, default=6)
    parser.add_argument("--chunk", type=int, default=8192)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--output", type=Path, default=results_file.RESULTS / "prefill.json")
    args = parser.parse_args()
    metrics: dict[str, float] = {"slots": args.slots, "threads": args.threads, "chunk": args.chunk}
    with tempfile.TemporaryDirectory() as folder:
        model = shapes_folder(args.config, Path(folder))
        flags = ("--ft-slots", str(args.slots), "--ft-worker-threads", str(args.threads))
        flags += ("--ft-dummy-locality", str(args.locality), "--chunked-prefill-size", str(args.chunk))
        server = Server(model, *FLAGS, *flags, "--ft-decode-gap-ms", "0")
        try:
            server.wait_ready()
            client = Client(server)
            client.first_token_s(client.tokens(9000))  # kernels compile
            state = client.experts()
            pool = state["expert_bytes"] * state["experts"]
            metrics["copy_bytes_s"] = copy_rate()
            metrics["stream_s"] = pool / metrics["copy_bytes_s"]
            metrics |= {name: state[name] for name in ("link_us_an_expert", "cpu_us_an_expert")}
            for part in (measure_chunks, measure_follow_up):
                part(client, metrics, args.repeats)
                results_file.write(args.output, "prefill", metrics)
            measure_gap(client, metrics)
            compare_plan(client, metrics)
            for path, sums in client.experts()["prompts"].items():
                metrics |= {f"{path}_{name}": value for name, value in sums.items()}
            results_file.write(args.output, "prefill", metrics)
        except Exception:
            print(server.log[-6000:], file=sys.stderr, flush=True)
            raise
        finally:
            server.stop()
    for name, value in metrics.items():
        print(f"{name:<40}{value:14.4f}")


if __name__ == "__main__":
    main()
