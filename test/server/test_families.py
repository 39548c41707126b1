"""Every family against transformers in float32: prompts whole and in chunks, decode, 1 to 64 requests at once.

One server a family, with experts in the worker. The next family's server starts while this one is tested,
because most of a start is SGLang's imports. The whole matrix of families, chunks and batches is in
benchmark/family_logits.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import family_check
import pytest
from serving import Server

# Prompt tokens of one prefill chunk: each kind of layer sees chunks of 64 and of 7.
CHUNKS = {
    "qwen3": 64,
    "qwen3_moe": 7,
    "qwen3_5_moe": 64,
    "qwen3_5_moe_text": 7,
    "qwen3_next": 64,
    "glm4_moe": 64,
    "gpt_oss": 7,
    "olmoe": 64,
    "mixtral": 7,
    "deepseek_v2": 7,
    "deepseek_v3": 64,
}
# float32 on both sides; measured: log probabilities differ by at most 5e-5, relatively by 2e-6.
MAX_ERROR = 5e-4
MAX_RELATIVE_ERROR = 2e-5

StartServer = Callable[[str], Server]


@pytest.fixture(scope="module")
def start(tiny_checkpoint: Callable[[str], Path]) -> Iterator[StartServer]:
    """Starts the server of a family unless it has been started; stops the one before."""
    running: dict[str, Server] = {}
    order = list(CHUNKS)

    def launch(family: str) -> None:
        flags = ["--dtype", "float32", "--chunked-prefill-size", str(CHUNKS[family])]
        flags += ["--max-total-tokens", "20000", "--skip-server-warmup"]
        running[family] = Server(tiny_checkpoint(family), *flags)

    def get(family: str) -> Server:
        for other in [f for f in running if order.index(f) < order.index(family)]:
            running.pop(other).stop()
        if family not in running:
            launch(family)
        running[family].wait_ready()
        following = order[order.index(family) + 1 :][:1]
        if following and following[0] not in running:
            launch(following[0])
        return running[family]

    yield get
    for server in running.values():
        server.stop()


@pytest.mark.parametrize("family", CHUNKS)
def test_family_matches_transformers(
    family: str, start: StartServer, tiny_checkpoint: Callable[[str], Path]
) -> None:
    server = start(family)
    reference = family_check.Reference(tiny_checkpoint(family))
    results = {name: check(server.url, reference) for name, check in CHECKS.items()}
    for name, result in results.items():
        print(f"{family} {name}: {result}")
    for name, result in results.items():
        assert result.wrong_tokens == 0, (name, result)
        assert result.max_error < MAX_ERROR, (name, result)
        assert result.relative_error < MAX_RELATIVE_ERROR, (name, result)


def few_requests(count: int, lengths: list[int]) -> Callable:
    """Log probabilities within prompts too: every position of prefill and decode is compared."""

    def check(url: str, reference: family_check.Reference) -> family_check.Comparison:
        batch = family_check.prompts(count, lengths, seed=count)
        answers = family_check.ask(url, batch, new_tokens=8, of_prompt=True)
        return reference.compare_all(answers, MAX_ERROR)

    return check


def many_requests(url: str, reference: family_check.Reference) -> family_check.Comparison:
    batch = family_check.prompts(64, [1, 7, 12, 20, 33, 64], seed=64)
    return reference.compare_all(family_check.ask(url, batch, new_tokens=6, of_prompt=False), MAX_ERROR)


def reused_prefixes(url: str, reference: family_check.Reference) -> family_check.Comparison:
    """A prompt again, then with other ends, then as the next turn of a conversation."""
    prompt = family_check.prompts(1, [100], seed=100)[0]
    batches = [[prompt], [prompt + [1, 2, 3]], [prompt + [7], prompt + [8, 9]]]
    answers = [family_check.ask(url, batch, new_tokens=8, of_prompt=False) for batch in batches]
    turn = answers[1][0]
    answers.append(family_check.ask(url, [turn.prompt + turn.output + [5, 6]], new_tokens=8, of_prompt=False))
    cached = [a.cached_tokens for batch in answers[1:] for a in batch]
    assert min(cached) >= 64, f"prefixes of 100 tokens and more were not reused: {cached} tokens"
    return reference.compare_all([a for batch in answers for a in batch], MAX_ERROR)


CHECKS: dict[str, Callable] = {
    "one_short_prompt": few_requests(1, [5]),
    "two_prompts_at_chunk_borders": few_requests(2, [64, 65]),
    "seven_prompts": few_requests(7, [1, 3, 7, 8, 63, 130, 200]),
    "sixty_four_prompts": many_requests,
    "reused_prefixes": reused_prefixes,
}
