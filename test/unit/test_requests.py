"""Checks of requests, texts of errors, and draws with a seed."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from sglang_ft.api import errors, request_checks

KNOWN = ("temperature", "top_k", "stop", "stop_regex", "stop_token_ids", "logit_bias", "sampling_seed", "n")


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 0, "top_k": -1, "stop": ["a", "b"], "stop_token_ids": [1], "sampling_seed": -7},
        {"temperature": None, "stop": "a", "logit_bias": {"5": -100, 6: 0.5}, "stop_regex": "a+"},
    ],
)
def test_usual_sampling_parameters_pass(params: dict[str, Any]):
    request_checks.check_sampling(params, KNOWN)


@pytest.mark.parametrize(
    "params, words",
    [
        ({"warmth": 1}, "warmth is not a sampling parameter"),
        ({"temperature": "hot"}, "temperature must be a number of at least 0, got 'hot'"),
        ({"temperature": float("nan")}, "temperature must be"),
        ({"temperature": True}, "temperature must be"),
        ({"top_k": 1.5}, "top_k must be an integer"),
        ({"stop": 7}, "stop must be a text"),
        ({"stop": ["a", ""]}, "none of them empty"),
        ({"stop_regex": "("}, "not a regular expression"),
        ({"stop_token_ids": ["x"]}, "list of token ids"),
        ({"logit_bias": {"hello": 1}}, "'hello' is not a token id"),
        ({"logit_bias": {"5": float("inf")}}, "logit_bias of token 5"),
        ({"logit_bias": "x"}, "must map token ids"),
        ({"sampling_seed": 1 << 80}, "64 bits"),
    ],
)
def test_other_sampling_parameters_are_refused(params: dict[str, Any], words: str):
    with pytest.raises(ValueError, match=words.replace("(", r"\(")):
        request_checks.check_sampling(params, KNOWN)


@pytest.mark.parametrize("count", [0, -3, 129, 1_000_000, "2", 1.5, True])
def test_n_is_bounded(count: Any):
    for params in ({"n": count}, [{"n": 1}, {"n": count}]):
        with pytest.raises(ValueError, match="n must be an integer from 1 to 128"):
            request_checks.check_samples(params)


def test_n_may_be_left_out():
    for params in (None, {}, {"n": None}, {"n": 128}, [{}, {"n": 2}]):
        request_checks.check_samples(params)


@pytest.mark.parametrize("ids", [[10], [-1], [1, 2, 1 << 40], ["a"], [1.0], [None]])
def test_token_ids_outside_of_the_vocabulary(ids: list[Any]):
    request_checks.check_token_ids([0, 9], 10)
    with pytest.raises(ValueError, match="ids 0 to 9"):
        request_checks.check_token_ids(ids, 10)


def test_top_logprobs_stay_below_the_vocabulary():
    request_checks.check_top_logprobs(10, 10)
    request_checks.check_top_logprobs(1000, 150_000)
    for count, vocabulary in ((11, 10), (1001, 150_000), (-1, 10)):
        with pytest.raises(ValueError, match="top_logprobs"):
            request_checks.check_top_logprobs(count, vocabulary)


@pytest.mark.parametrize("body", [[1], "x", None, 7, {"messages": []}, {"input": []}])
def test_bodies_that_cannot_be_requests(body: Any):
    request_checks.check_body({"messages": [{}]})
    with pytest.raises(ValueError, match="object|empty"):
        request_checks.check_body(body)


def test_problems_become_one_line_without_repetition():
    problems = [
        {"loc": ("body", "messages", 0, "role"), "msg": "Field required"},
        {"loc": ("body", "messages", 0, "role"), "msg": "Field required"},
        *({"loc": ("body", f"field{i}"), "msg": "wrong"} for i in range(7)),
    ]
    text = errors.describe(problems)
    assert text.startswith("invalid request: messages.0.role: Field required; field0: wrong")
    assert text.endswith("and 3 more")
    broken = {"type": "json_invalid", "loc": ("body", 7), "msg": "JSON decode error", "ctx": {"error": "cut"}}
    assert errors.describe([broken]) == "invalid request: the body is not JSON: cut at character 7"


def test_a_draw_depends_on_seed_and_position_alone():
    from sglang_ft.engine.seeds import draw

    probs = torch.softmax(torch.randn(50, generator=torch.Generator().manual_seed(0)), 0)
    drawn = [draw(probs, 7, position, 50, 1.0, 0.0) for position in range(40)]
    assert drawn == [draw(probs, 7, position, 50, 1.0, 0.0) for position in range(40)]
    assert drawn != [draw(probs, 8, position, 50, 1.0, 0.0) for position in range(40)]
    assert len(set(drawn)) > 5


def test_draws_follow_the_probabilities():
    from sglang_ft.engine.seeds import draw

    probs = torch.tensor([0.1, 0.0, 0.6, 0.3])
    counts = Counter(draw(probs, seed, 3, 4, 1.0, 0.0) for seed in range(4000))
    for token, probability in enumerate(probs.tolist()):
        assert abs(counts[token] / 4000 - probability) < 0.03
    assert counts[1] == 0


@pytest.mark.parametrize(
    "limits, kept",
    [((1, 1.0, 0.0), {2}), ((2, 1.0, 0.0), {2, 3}), ((4, 0.5, 0.0), {2}), ((4, 1.0, 0.4), {2, 3})],
)
def test_draws_keep_to_top_k_top_p_and_min_p(limits: tuple[float, float, float], kept: set[int]):
    from sglang_ft.engine.seeds import draw

    probs = torch.tensor([0.1, 0.0, 0.6, 0.3])
    assert {draw(probs, seed, 0, *limits) for seed in range(200)} == kept
