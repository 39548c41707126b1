"""Anchors on a real server: an edit costs what lies after it, a hit equals a miss, and clients see what was reused.

The shared server runs SGLang's strategy for one state at the exact end of a chunk; the other one here runs the
strategy of a GPU (two states a request, tracked coarsely), on a tiny model against transformers.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import agent_session
import anthropic
import family_check
import httpx
import openai
import pytest
import transformers
from agent_session import words
from serving import DEMO, Server, serving


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return transformers.AutoTokenizer.from_pretrained(DEMO)


def test_edits_at_anchors_cost_what_lies_after_them_and_change_nothing(
    demo_server: Server, tokenizer: Any
) -> None:
    views = agent_session.edited_views(random.Random(7))
    for outcome in agent_session.outcomes(demo_server, tokenizer, views, longest=4000):
        assert outcome.recomputed <= outcome.minimum + 64, outcome
        # bfloat16: a state that went on from another chunk border rounds differently.
        assert outcome.cached_elsewhere == 0 and outcome.same_output and outcome.max_error < 0.05, outcome


def test_reuse_is_visible_by_kind_and_in_every_api(
    demo_server: Server, openai_client: openai.OpenAI, anthropic_client: anthropic.Anthropic
) -> None:
    rng = random.Random(11)
    system, first, second = words(rng, 60), words(rng, 5), words(rng, 5)
    billing = "x-anthropic-billing-header: cc_version=2.1.0; cch={};\n"
    for text, expected in ((first, 0), (second, 64)):
        messages: list[Any] = [{"role": "system", "content": system}, {"role": "user", "content": text}]
        usage = openai_client.chat.completions.create(model="m", messages=messages, max_tokens=2).usage
        assert usage is not None
        details = usage.prompt_tokens_details
        assert ((details.cached_tokens if details else 0) or 0) >= expected
    answer = anthropic_client.messages.create(
        model="m",
        system=billing.format("abcde") + system,
        messages=[{"role": "user", "content": words(rng, 5)}],
        max_tokens=2,
    )
    assert (answer.usage.cache_read_input_tokens or 0) >= 64, "the client's own line changed the prompt"
    response = openai_client.responses.create(
        model="m", instructions=system, input=words(rng, 5), max_output_tokens=2
    )
    assert response.usage is not None and response.usage.input_tokens_details.cached_tokens >= 64
    text = httpx.get(demo_server.url + "/metrics", timeout=30).text
    assert 'sglang_ft_anchor_states_reused_total{kind="system"' in text
    assert 'sglang_ft_anchor_states_kept_total{kind="assistant"' in text


def test_a_turn_that_comes_back_as_text_is_found_again(demo_server: Server) -> None:
    """What the model sampled comes back with its thinking, written anew by the template, before a tool's result."""
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "What is the capital of the largest country?"}
    ]
    body = {"model": "m", "messages": messages, "max_tokens": 200, "temperature": 0}
    reply = httpx.post(demo_server.url + "/v1/chat/completions", json=body, timeout=120).json()
    turn, usage = reply["choices"][0]["message"], reply["usage"]
    assert turn["reasoning_content"] and reply["choices"][0]["finish_reason"] != "length"
    messages += [turn, {"role": "tool", "content": "12", "tool_call_id": "x"}]
    again = httpx.post(demo_server.url + "/v1/chat/completions", json=body, timeout=120).json()["usage"]
    # All of the answer but its last token, which was never fed.
    known = usage["prompt_tokens"] + usage["completion_tokens"] - 1
    assert again["prompt_tokens_details"]["cached_tokens"] == known


def random_edit(rng: random.Random, blocks: list[list[int]]) -> list[list[int]]:
    """Blocks of a conversation cut off, replaced, removed; and a new one at the end."""
    blocks = list(blocks)
    if len(blocks) > 1 and (kind := rng.randrange(4)) < 3:
        at = rng.randrange(1, len(blocks))
        blocks[at : (None, at + 1, at + 1)[kind]] = [] if kind != 1 else [block(rng)]
    return [*blocks, block(rng)][:7]


def block(rng: random.Random) -> list[int]:
    """A turn with thinking, in tokens of the tiny models."""
    start, end, think, close = (257, 258, 259, 260)
    text = [rng.randrange(256) for _ in range(rng.randrange(10, 120))]
    return [
        start,
        117,
        115,
        101,
        114,
        10,
        think,
        *text[: len(text) // 2],
        close,
        *text[len(text) // 2 :],
        end,
    ]


def test_random_edits_on_a_gpus_strategy_match_transformers(tiny_checkpoint: Callable[[str], Path]) -> None:
    folder = tiny_checkpoint("qwen3_5_moe_text")
    reference = family_check.Reference(folder)
    flags = ["--dtype", "float32", "--chunked-prefill-size", "130", "--skip-server-warmup"]
    flags += ["--max-total-tokens", "6000", "--max-running-requests", "4", "--max-mamba-cache-size", "40"]
    paths = [str(Path(__file__).parents[1] / "without_pinning"), os.environ.get("PYTHONPATH", "")]
    rng = random.Random(3)
    with serving(
        folder,
        *flags,
        "--mamba-radix-cache-strategy",
        "extra_buffer",
        env={"PYTHONPATH": os.pathsep.join(paths)},
    ) as server:
        conversations, cached = [[block(rng)] for _ in range(2)], 0
        for _ in range(5):
            conversations = [random_edit(rng, c) for c in conversations]
            prompts = [[i for b in c for i in b] for c in conversations]
            answers = family_check.ask(server.url, prompts, new_tokens=rng.choice([1, 6]), of_prompt=False)
            worst = reference.compare_all(answers, 5e-4)
            assert worst.wrong_tokens == 0 and worst.max_error < 5e-4, worst
            cached += sum(a.cached_tokens for a in answers)
        assert cached > 400
        assert server.health().status_code == 200, "SGLang ends a server that has lost a slot"
