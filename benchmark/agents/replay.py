"""Replays of agent harnesses against a server: tokens computed again each turn, ours against SGLang without us.

    python benchmark/agents/replay.py --model-path demo/model --out benchmark/results/anchors.json

Each harness grows a session to `--tokens` tokens. A turn's unavoidable minimum is what lies after the longest prefix
that it shares with anything the server has seen before (prompts and what it answered). Without anchors the same
server runs SGLang's own rules: states at the ends of prefill chunks, prompts and answers.

Assistant turns of the sessions are made up, not sampled: what is measured is the cache, and what a model says does
not matter to it. Times on a CPU say little about a GPU.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import numpy as np
from transformers import AutoTokenizer

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "benchmark"), str(ROOT / "test"), str(Path(__file__).parent)]

import harnesses  # noqa: E402
import results_file  # noqa: E402
from serving import serving  # noqa: E402

from sglang_ft.anchors import find  # noqa: E402

ALLOWANCE = 64  # tokens over the minimum that a turn may compute again


class Turn(NamedTuple):
    """One request of a replay."""

    prompt: int  # tokens
    recomputed: int
    minimum: int
    seconds: float  # to the first token

    @property
    def aligned(self) -> bool:
        return self.recomputed <= self.minimum + ALLOWANCE


class Client:
    """Sends token ids, and knows what a server has seen."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.seen: list[np.ndarray] = []

    def turn(self, ids: list[int]) -> Turn:
        started = time.perf_counter()
        output, cached = self.generate(ids, 1)
        seconds = time.perf_counter() - started
        shared = max((common_prefix(np.array(ids), old) for old in self.seen), default=0)
        self.seen.append(np.array([*ids, *output]))
        # The last token of a prompt is always computed.
        return Turn(len(ids), len(ids) - cached, max(1, len(ids) - shared), seconds)

    def generate(self, ids: list[int], tokens: int) -> tuple[list[int], int]:
        """Sampled ids and cached tokens."""
        sampling = {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True}
        body = {"input_ids": ids, "sampling_params": sampling}
        reply = httpx.post(self.url + "/generate", json=body, timeout=1200)
        reply.raise_for_status()
        return reply.json()["output_ids"], reply.json()["meta_info"]["cached_tokens"]


def common_prefix(a: np.ndarray, b: np.ndarray) -> int:
    """Length of the common prefix of two sequences of token ids."""
    shorter = min(len(a), len(b))
    different = np.flatnonzero(a[:shorter] != b[:shorter])
    return int(different[0]) if len(different) else shorter


def replay(client: Client, tokenizer: Any, name: str, seed: int, most: int, scale: int) -> list[Turn]:
    """One harness until a session has `most` tokens."""
    done: list[Turn] = []
    sizes = harnesses.Sizes(*(scale * words for words in harnesses.Sizes()))
    for messages in harnesses.requests(name, seed, sizes):
        text = find.render(tokenizer, messages, None, None, add_generation_prompt=True)
        if text is None:
            raise ValueError("the chat template refuses the session")
        ids = tokenizer.encode(text, add_special_tokens=False)
        if len(ids) > most:
            return done
        done.append(client.turn(ids))
    return done


def summary(turns: dict[str, list[Turn]]) -> dict[str, float]:
    """Numbers of all harnesses together and of each. A harness's first turn has nothing to reuse."""
    later = {name: done[1:] for name, done in turns.items()}
    every = [t for done in later.values() for t in done]
    metrics = {
        "aligned_turns_share": sum(t.aligned for t in every) / len(every),
        "recompute_over_minimum": sum(t.recomputed for t in every) / sum(t.minimum for t in every),
        "ttft_median_s": statistics.median(t.seconds for t in every),
        "ttft_worst_s": max(t.seconds for t in every),
        "longest_prompt": max(t.prompt for t in every),
        "turns": len(every),
    }
    for name, done in later.items():
        metrics[f"{name}_aligned_turns_share"] = sum(t.aligned for t in done) / len(done)
        metrics[f"{name}_recompute_over_minimum"] = sum(t.recomputed for t in done) / sum(
            t.minimum for t in done
        )
        metrics[f"{name}_recomputed_tokens"] = sum(t.recomputed for t in done)
        metrics[f"{name}_minimum_tokens"] = sum(t.minimum for t in done)
        metrics[f"{name}_ttft_median_s"] = statistics.median(t.seconds for t in done)
    return metrics


def overheads(ours: Client, stock: Client, tokenizer: Any, rounds: int) -> dict[str, float]:
    """Time of prefill and decode without reuse, ours over SGLang's, less one: medians, the servers take turns."""
    times: dict[str, list[float]] = {"ours": [], "stock": [], "ours_decode": [], "stock_decode": []}
    for i in range(rounds + 1):
        session = harnesses.Session(10_000 + i, harnesses.Sizes())
        for _ in range(4):
            session.step()
        text = find.render(tokenizer, session.history, None, None, add_generation_prompt=True)
        ids = tokenizer.encode(text or "", add_special_tokens=False)
        for name, client in (("ours", ours), ("stock", stock))[:: 1 if i % 2 else -1]:
            started = time.perf_counter()
            client.generate(ids, 1)
            between = time.perf_counter()
            client.generate(ids, 65)
            if i:  # the first round warms up
                times[name].append(between - started)
                times[f"{name}_decode"].append(time.perf_counter() - between)
    middle = {name: statistics.median(values) for name, values in times.items()}
    return {
        "prefill_overhead": middle["ours"] / middle["stock"] - 1,
        "decode_overhead": middle["ours_decode"] / middle["stock_decode"] - 1,
    }


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model-path", default=str(ROOT / "demo" / "model"))
    parser.add_argument("--harness", nargs="*", default=list(harnesses.HARNESSES))
    parser.add_argument("--tokens", type=int, default=30_000, help="length of a session at its end")
    parser.add_argument("--scale", type=int, default=3, help="times the usual length of a message")
    parser.add_argument(
        "--gpu-strategy", action="store_true", help="without a GPU: keep states as SGLang does on one"
    )
    parser.add_argument("--rounds", type=int, default=10, help="of the measurement of overheads; 0: none")
    parser.add_argument("--out", type=Path)
    parser.add_argument("flags", nargs="*", help="of the server, after --")
    args = parser.parse_args(argv)
    tokenizer = AutoTokenizer.from_pretrained(args.model_path)
    metrics: dict[str, float] = {}
    flags, environment = list(args.flags), {}
    if args.gpu_strategy:
        flags += ["--mamba-radix-cache-strategy", "extra_buffer"]
        paths = [str(ROOT / "test" / "without_pinning"), os.environ.get("PYTHONPATH", "")]
        environment = {"PYTHONPATH": os.pathsep.join(paths)}
    with (
        serving(args.model_path, *flags, env=environment) as ours,
        serving(args.model_path, "--ft-anchors", "off", *flags, env=environment) as stock,
    ):
        if args.rounds:
            metrics |= overheads(Client(ours.url), Client(stock.url), tokenizer, args.rounds)
        for prefix, server in (("", ours), ("stock_", stock)):
            client = Client(server.url)
            turns = {}
            for seed, name in enumerate(args.harness):
                turns[name] = replay(client, tokenizer, name, seed, args.tokens, args.scale)
                print(prefix + name, summary({name: turns[name]}), flush=True)
            found = summary(turns)
            metrics |= {prefix + name: value for name, value in found.items()}
            print(prefix or "ours", {k: round(v, 4) for k, v in found.items()}, flush=True)
    if args.out and args.gpu_strategy:
        named = {f"gpu_strategy_{name}": value for name, value in metrics.items()}
        results_file.write(args.out, "anchors", named, replace=False)
    elif args.out:
        results_file.write(args.out, "anchors", metrics)


if __name__ == "__main__":
    main()
