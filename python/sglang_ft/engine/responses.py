"""/v1/responses as the openai package reads it: usage by its names, and a bounded memory for past responses.

SGLang names the token counts right only in streams, keeps every stored response for ever, and answers 400 where
the server failed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastapi.responses import JSONResponse
from sglang.srt.entrypoints.openai.protocol import ResponsesResponse
from sglang.srt.plugins.hook_registry import HookType

from sglang_ft.engine.hook import Hook
from sglang_ft.engine.requests import FAILURE

MAX_STORED = 1000


class Newest(dict):
    """A dict that forgets its oldest entry when there are more than `limit`."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.limit = limit

    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__(key, value)
        if len(self) > self.limit:
            del self[next(iter(self))]


def hooks() -> list[Hook]:
    """Hooks for the HTTP process."""
    target = "sglang.srt.entrypoints.openai.serving_responses.OpenAIServingResponses"
    options = "*, enable_prompt_tokens_details=False, tool_server=None"
    return [
        Hook(
            f"{target}.__init__",
            HookType.AFTER,
            _bound,
            f"(self, tokenizer_manager, template_manager, {options})",
        ),
        Hook(f"{target}.create_responses", HookType.AROUND, _create, "(self, request, raw_request=None)"),
        Hook(f"{target}.retrieve_responses", HookType.AROUND, _renamed, "(self, response_id)"),
    ]


def _bound(result: None, serving: Any, *args: Any, **kwargs: Any) -> None:
    del result, args, kwargs
    serving.response_store = Newest(MAX_STORED)
    # Also holds the messages of requests that failed; a stored response must find its own.
    serving.msg_store = Newest(2 * MAX_STORED)


async def _create(original: Callable, serving: Any, request: Any, raw_request: Any = None) -> Any:
    response = await _renamed(original, serving, request, raw_request)
    if raw_request is not None and (failure := raw_request.scope.get(FAILURE)):
        raise failure  # SGLang made a 400 of it
    return response


async def _renamed(original: Callable, *args: Any, **kwargs: Any) -> Any:
    response = await original(*args, **kwargs)
    if not isinstance(response, ResponsesResponse) or response.usage is None:
        return response
    body = response.model_dump(mode="json")
    return JSONResponse(body | {"usage": usage(body["usage"])})


def usage(counts: dict[str, Any]) -> dict[str, Any]:
    """Token counts of the chat API by the names of the responses API."""
    details = counts.get("prompt_tokens_details") or {}
    return {
        "input_tokens": counts["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": details.get("cached_tokens") or 0},
        "output_tokens": counts["completion_tokens"] or 0,
        "output_tokens_details": {"reasoning_tokens": counts.get("reasoning_tokens") or 0},
        "total_tokens": counts["total_tokens"],
    }
