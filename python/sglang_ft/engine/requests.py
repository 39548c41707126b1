"""Refuses requests that would hang or crash SGLang's processes, before they reach the scheduler.

What is checked is in api/request_checks.py. Without these hooks a large `n` blocks the HTTP process; more
top_logprobs than there are tokens, or token ids outside of the vocabulary, end the scheduler process.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from http import HTTPStatus
from typing import Any

from fastapi import HTTPException
from sglang.srt.plugins.hook_registry import HookType

from sglang_ft.api import client_headers, errors, request_checks
from sglang_ft.api.stream_refusals import REFUSAL
from sglang_ft.engine.hook import Hook

FAILURE = "sglang_ft.failure"  # key in a request's scope: the HTTPException that ended its generation


def hooks() -> list[Hook]:
    """Hooks for the HTTP process."""
    managers, entrypoints = "sglang.srt.managers", "sglang.srt.entrypoints"
    return [
        Hook(f"{entrypoints}.http_server.ORJSONRequest.json", HookType.AROUND, _json, "(self)"),
        Hook(
            f"{managers}.io_struct.GenerateReqInput._handle_parallel_sampling",
            HookType.BEFORE,
            _before_samples,
            "(self)",
        ),
        Hook(
            f"{managers}.tokenizer_manager.TokenizerManager._validate_one_request",
            HookType.BEFORE,
            _before_validate,
            "(self, obj, input_ids)",
        ),
        Hook(
            f"{managers}.tokenizer_manager.TokenizerManager.generate_request",
            HookType.AROUND,
            _generate,
            "(self, obj, request=None)",
        ),
        Hook(
            f"{entrypoints}.anthropic.serving.AnthropicServing.handle_messages",
            HookType.AROUND,
            _handle_messages,
            "(self, request, raw_request)",
        ),
    ]


async def _json(original: Callable, request: Any) -> Any:
    body = await original(request)
    try:
        request_checks.check_body(body)
    except ValueError as e:
        raise HTTPException(400, str(e)) from e
    return client_headers.without_volatile_lines(body)


def _before_samples(request: Any) -> None:
    request_checks.check_samples(request.sampling_params)


def _before_validate(manager: Any, request: Any, input_ids: Any) -> None:
    """One request, its text already turned into token ids."""
    vocab_size = manager.model_config.vocab_size
    request_checks.check_sampling(
        request.sampling_params or {}, manager.sampling_params_class.__struct_fields__
    )
    if request.input_ids is not None and input_ids is not None:
        request_checks.check_token_ids(input_ids, vocab_size)
    request_checks.check_top_logprobs(getattr(request, "top_logprobs_num", None), vocab_size)
    request_checks.check_logprob_start(getattr(request, "logprob_start_len", None))


async def _generate(original: Callable, manager: Any, obj: Any, request: Any = None) -> AsyncIterator[Any]:
    """Leaves the reason of a refusal where StreamRefusals finds it, and a failure where responses.py does."""
    try:
        async with aclosing(original(manager, obj, request)) as outputs:
            async for output in outputs:
                yield output
    except ValueError as e:
        if (
            request is not None
            and getattr(e, "status_code", HTTPStatus.BAD_REQUEST) == HTTPStatus.BAD_REQUEST
        ):
            request.scope[REFUSAL] = str(e)
        raise
    except HTTPException as e:
        if request is not None:
            request.scope[FAILURE] = e
        raise


async def _handle_messages(original: Callable, serving: Any, request: Any, raw_request: Any) -> Any:
    """Answers with the status of a failure; SGLang says 500 to all of them."""
    response = await original(serving, request, raw_request)
    failure = raw_request.scope.get(FAILURE)
    return errors.answer(raw_request.url.path, failure.status_code, failure.detail) if failure else response
