"""Compares what a server computes with transformers in float32, token by token over the whole vocabulary.

The server is asked for greedy continuations with the log probabilities of every token of the vocabulary, at
each position of the prompt and of the continuation. transformers then runs prompt and continuation at once.
A continuation is right when each of its tokens is transformers' best, wherever that one leads by more than the
tolerance (ties aside).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import tiny_models
import torch


class Answer(NamedTuple):
    """A request's continuation and what the server thought of every token."""

    prompt: list[int]
    output: list[int]
    first: int  # position of the first token that `logprobs` predicts
    logprobs: torch.Tensor  # [n, V]: of the tokens at positions first, first + 1, ...
    cached_tokens: int


class Comparison(NamedTuple):
    """Server against transformers."""

    positions: int
    max_error: float  # of a log probability
    relative_error: float  # root mean square of the error over that of the reference around its mean
    wrong_tokens: int  # of the continuations
    tied_tokens: int  # not judged: transformers' first and second are closer than the tolerance

    @classmethod
    def worst(cls, parts: Sequence[Comparison]) -> Comparison:
        return cls(
            sum(p.positions for p in parts),
            max(p.max_error for p in parts),
            max(p.relative_error for p in parts),
            sum(p.wrong_tokens for p in parts),
            sum(p.tied_tokens for p in parts),
        )


def prompts(count: int, lengths: Sequence[int], seed: int) -> list[list[int]]:
    """`count` prompts of random bytes; lengths are taken in turn."""
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randint(0, 256, (lengths[i % len(lengths)],), generator=generator).tolist()
        for i in range(count)
    ]


def ask(url: str, batch: list[list[int]], new_tokens: int, of_prompt: bool) -> list[Answer]:
    """Greedy continuations of all prompts at once; with `of_prompt` also the logprobs within the prompts."""
    reply = httpx.post(
        url + "/generate",
        json={
            "input_ids": batch,
            "sampling_params": {"max_new_tokens": new_tokens, "temperature": 0, "ignore_eos": True},
            "return_logprob": True,
            "top_logprobs_num": tiny_models.VOCAB_SIZE,
            "logprob_start_len": 0 if of_prompt else -1,
        },
        timeout=300,
    )
    reply.raise_for_status()
    return [_answer(p, r, of_prompt) for p, r in zip(batch, reply.json(), strict=True)]


def _answer(prompt: list[int], reply: dict[str, Any], of_prompt: bool) -> Answer:
    meta = reply["meta_info"]
    # The first token of a prompt is predicted by nothing.
    rows = (meta["input_top_logprobs"][1:] if of_prompt else []) + meta["output_top_logprobs"]
    first = 1 if of_prompt else len(prompt)
    return Answer(prompt, reply["output_ids"], first, _dense(rows), meta["cached_tokens"])


def _dense(rows: list[list[list[Any]]]) -> torch.Tensor:
    """[[logprob, token, text], ...] of each position -> [n, V]."""
    out = torch.full((len(rows), tiny_models.VOCAB_SIZE), float("nan"))
    for i, row in enumerate(rows):
        values = torch.tensor([(entry[1], entry[0]) for entry in row], dtype=torch.float64)
        out[i, values[:, 0].long()] = values[:, 1].float()
    assert not out.isnan().any(), "the server left out part of the vocabulary"
    return out


class Reference:
    """transformers' model of a checkpoint, float32."""

    def __init__(self, folder: Path) -> None:
        self.model = tiny_models.reference(folder)

    @torch.inference_mode()
    def logprobs(self, tokens: list[int]) -> torch.Tensor:
        """[T, V]: at position t, of the token after t."""
        return self.model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0].float().log_softmax(-1)

    def compare(self, answer: Answer, tolerance: float) -> Comparison:
        tokens = answer.prompt + answer.output
        expected = self.logprobs(tokens)[answer.first - 1 : len(tokens) - 1]
        error = answer.logprobs - expected
        spread = (expected - expected.mean(-1, keepdim=True)).square().mean().sqrt()
        top = expected[-len(answer.output) :].topk(2)
        clear = top.values[:, 0] - top.values[:, 1] > tolerance
        wrong = (top.indices[:, 0] != torch.tensor(answer.output)) & clear
        return Comparison(
            positions=len(expected),
            max_error=error.abs().max().item(),
            relative_error=(error.square().mean().sqrt() / spread).item(),
            wrong_tokens=int(wrong.sum()),
            tied_tokens=int((~clear).sum()),
        )

    def compare_all(self, answers: Sequence[Answer], tolerance: float) -> Comparison:
        return Comparison.worst([self.compare(a, tolerance) for a in answers])
