"""The longest pass once before users come: what does not fit costs slots then, not a request; kernels get compiled."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from typing import Any

import requests
from sglang.srt.plugins.hook_registry import HookType

from sglang_ft.engine.hook import Hook

logger = logging.getLogger(__name__)

_TIMEOUT_S = 600
_SPARE = 16
"""Tokens of room that an answer needs behind its prompt."""


def hooks(context_length: int) -> list[Hook]:
    """After SGLang's own warm-up a prompt of a whole chunk; `context_length` of the model, 0 when nothing limits it."""

    def warm_up(original: Callable, server_args: Any) -> Any:
        success = original(server_args)
        if success:
            run_longest_pass(server_args, context_length)
        return success

    target = "sglang.srt.entrypoints.http_server._execute_server_warmup"
    return [Hook(target, HookType.AROUND, warm_up, "(server_args)")]


def run_longest_pass(server_args: Any, context_length: int) -> None:
    """Sends it; a failure is told in the log, for the server can still run shorter ones."""
    limits = [server_args.chunked_prefill_size, server_args.context_length, server_args.max_total_tokens]
    rows = min(limit for limit in (*limits, context_length) if limit and limit > 0) - _SPARE
    headers = {"Authorization": f"Bearer {server_args.api_key}"} if server_args.api_key else {}
    body: dict[str, Any] = {
        "input_ids": [random.randrange(10, 100) for _ in range(max(rows, 1))],
        "sampling_params": {"max_new_tokens": 1, "temperature": 0},
    }
    try:
        url, verify = server_args.url() + "/generate", server_args.ssl_verify()
        answer = requests.post(url, json=body, headers=headers, timeout=_TIMEOUT_S, verify=verify)
        answer.raise_for_status()
    except requests.RequestException as e:
        logger.warning("A prompt of %d tokens failed at the start (--chunked-prefill-size): %s", rows, e)
