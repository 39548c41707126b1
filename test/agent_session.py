"""A session of an agent with tools, the ways in which harnesses edit it, and what a server makes of each."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from typing import Any, NamedTuple

import httpx
from serving import Server

from sglang_ft.anchors import find

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "read",
            "description": "Reads a file",
            "parameters": {"type": "object", "properties": {"path": {"type": "string"}}},
        },
    }
]


def words(rng: random.Random, count: int) -> str:
    return " ".join(f"file{rng.randrange(1000)}" for _ in range(count))


def session(rng: random.Random, steps: int) -> list[dict[str, Any]]:
    history = [
        {"role": "system", "content": words(rng, 30)},
        {"role": "user", "content": words(rng, 10)},
    ]
    for i in range(steps):
        call = {
            "id": f"call{i}",
            "type": "function",
            "function": {"name": "read", "arguments": {"path": words(rng, 1)}},
        }
        turn = {"role": "assistant", "content": "", "reasoning_content": words(rng, 25), "tool_calls": [call]}
        history += [turn, {"role": "tool", "content": words(rng, 40), "tool_call_id": f"call{i}"}]
    return history


def generate(server: Server, ids: list[int], **more: Any) -> tuple[list[int], int, list[float]]:
    """Sampled ids, cached tokens and the log probabilities of the best tokens."""
    body = {
        "input_ids": ids,
        "sampling_params": {"max_new_tokens": 4, "temperature": 0, "ignore_eos": True},
        "return_logprob": True,
        "top_logprobs_num": 5,
        **more,
    }
    reply = httpx.post(server.url + "/generate", json=body, timeout=120)
    reply.raise_for_status()
    meta = reply.json()["meta_info"]
    best = [entry[0] for row in meta["output_top_logprobs"] for entry in row]
    return reply.json()["output_ids"], meta["cached_tokens"], best


def edited_views(rng: random.Random) -> list[list[dict[str, Any]]]:
    """A session, and the same with thinking dropped, results cleared, turns cut off, and with another task."""
    history = session(rng, 5)
    results = [i for i, m in enumerate(history) if m["role"] == "tool"]
    without_thinking = [
        {**m, "reasoning_content": ""} if m["role"] == "assistant" else m for m in history[:-2]
    ]
    cleared = [{**m, "content": "[cleared]"} if i in results[:3] else m for i, m in enumerate(history)]
    other_task = [*history[:1], {"role": "user", "content": words(rng, 10)}]
    return [history, without_thinking + history[-2:], cleared, history[:-4], other_task]


class Outcome(NamedTuple):
    """One prompt, with whatever was cached and in a cache of its own."""

    recomputed: int  # tokens
    minimum: int
    cached_elsewhere: int
    same_output: bool
    max_error: float  # of the log probabilities of the best tokens


def outcomes(
    server: Server, tokenizer: Any, views: list[list[dict[str, Any]]], longest: int
) -> Iterator[Outcome]:
    seen: list[list[int]] = []
    for number, view in enumerate(views):
        text = find.render(tokenizer, view, TOOLS, add_generation_prompt=True)
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert len(ids) < longest
        output, cached, best = generate(server, ids)
        again, none, expected = generate(server, ids, extra_key=f"a cache of its own {number}")
        error = max(abs(a - b) for a, b in zip(best, expected, strict=True))
        minimum = len(ids) - max((len(os.path.commonprefix([ids, old])) for old in seen), default=0)
        yield Outcome(len(ids) - cached, max(1, minimum), none, again == output, error)
        seen.append(ids + output)
