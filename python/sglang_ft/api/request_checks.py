"""What a request may ask for, beyond what SGLang itself checks.

Each limit below closes a hole through which one request could stop or block the server for all others. The
functions raise ValueError with a text for the client; SGLang answers 400 with it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from numbers import Integral, Real
from typing import Any, NamedTuple

MAX_SAMPLES = 128  # `n`: every sample is a request of its own in the scheduler
MAX_TOP_LOGPROBS = 1000
_INT64 = (1 - 2**63, 2**63 - 1)  # the lowest number stands for "no seed" in engine/seeds.py


class Bound(NamedTuple):
    """Allowed range of a number, both ends included, and whether it must be an integer."""

    low: float
    high: float
    whole: bool = False


def check_body(body: object) -> None:
    """A request body, parsed: an object whose list of messages or input items is not empty."""
    if not isinstance(body, dict):
        found = "null" if body is None else f"a {type(body).__name__}"
        raise ValueError(f"the request body must be a JSON object like {{...}}, not {found}")
    for name in ("messages", "input"):
        if body.get(name) == []:
            raise ValueError(f"{name} is empty: send at least one")


def check_samples(params: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None) -> None:
    """`n` of one request's sampling parameters, or of each of a list of them."""
    for one in [params] if isinstance(params, Mapping) else params or ():
        count = one.get("n")
        if count is not None:
            check_number("n", count, Bound(1, MAX_SAMPLES, whole=True))


def check_sampling(params: Mapping[str, Any], known: Collection[str]) -> None:
    """Sampling parameters by SGLang's names, of which `known` are all. None stands for the default."""
    for name, value in params.items():
        if name not in known:
            raise ValueError(f"{name} is not a sampling parameter; there are {', '.join(sorted(known))}")
        if value is not None and name in _CHECKS:
            _CHECKS[name](name, value)


def check_number(name: str, value: object, bound: Bound) -> None:
    """One number of a request."""
    kind = Integral if bound.whole else Real
    if isinstance(value, bool) or not isinstance(value, kind) or not bound.low <= value <= bound.high:  # type: ignore[operator]
        what = "an integer" if bound.whole else "a number"
        raise ValueError(f"{name} must be {what} {_range(bound)}, got {value!r}")


def check_token_ids(ids: Sequence[Any], vocab_size: int) -> None:
    """Token ids that the client sent in place of a text."""
    for position, token in enumerate(ids):
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab_size:
            raise ValueError(
                f"token {position} of the prompt is {token!r}; the vocabulary has ids 0 to {vocab_size - 1}"
            )


def check_top_logprobs(count: Any, vocab_size: int) -> None:
    """How many alternatives are asked for at each position."""
    if count is not None:
        check_number("top_logprobs", count, Bound(0, min(MAX_TOP_LOGPROBS, vocab_size), whole=True))


def check_logprob_start(position: Any) -> None:
    """From which token of the prompt on logprobs are wanted; -1: from the last."""
    if position is not None:
        check_number("logprob_start_len", position, Bound(-1, _INT64[1], whole=True))


def _range(bound: Bound) -> str:
    if bound.high in (math.inf, _INT64[1]):
        return f"of at least {bound.low}" if bound.low != _INT64[0] else "of 64 bits"
    return f"from {bound.low} to {bound.high}"


def _check_texts(name: str, texts: Any) -> None:
    listed = texts if isinstance(texts, list) else [texts]
    if not all(isinstance(text, str) and text for text in listed):
        raise ValueError(f"{name} must be a text or a list of texts, none of them empty, got {texts!r}")


def _check_patterns(name: str, patterns: Any) -> None:
    _check_texts(name, patterns)
    for pattern in patterns if isinstance(patterns, list) else [patterns]:
        try:
            re.compile(pattern)
        except re.error as e:
            raise ValueError(f"{name} {pattern!r} is not a regular expression: {e}") from None


def _check_tokens(name: str, tokens: Any) -> None:
    if not isinstance(tokens, list | set | tuple) or not all(isinstance(token, int) for token in tokens):
        raise ValueError(f"{name} must be a list of token ids, got {tokens!r}")


def _check_biases(name: str, biases: Any) -> None:
    if not isinstance(biases, Mapping):
        raise ValueError(f"{name} must map token ids to numbers, got {biases!r}")
    for token, bias in biases.items():
        if not re.fullmatch(r"\d{1,18}", str(token)):
            raise ValueError(f"{name} maps token ids to numbers; {token!r} is not a token id")
        check_number(f"{name} of token {token}", bias, Bound(-1e9, 1e9))


def _within(bound: Bound) -> Callable[[str, Any], None]:
    return lambda name, value: check_number(name, value, bound)


_COUNT = Bound(0, _INT64[1], whole=True)
_CHECKS: dict[str, Callable[[str, Any], None]] = {
    "temperature": _within(Bound(0, math.inf)),
    "top_p": _within(Bound(0, 1)),
    "min_p": _within(Bound(0, 1)),
    "top_k": _within(Bound(-1, math.inf, whole=True)),
    "frequency_penalty": _within(Bound(-2, 2)),
    "presence_penalty": _within(Bound(-2, 2)),
    "repetition_penalty": _within(Bound(0, 2)),
    "max_new_tokens": _within(_COUNT),
    "min_new_tokens": _within(_COUNT),
    "stream_interval": _within(Bound(1, _INT64[1], whole=True)),
    "sampling_seed": _within(Bound(*_INT64, whole=True)),
    "stop": _check_texts,
    "stop_regex": _check_patterns,
    "stop_token_ids": _check_tokens,
    "logit_bias": _check_biases,
}
