"""Ends the requests of a batch whose forward pass failed, and nothing else: the server goes on."""

from __future__ import annotations

import logging
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

from sglang.srt.managers.io_struct import AbortReq
from sglang.srt.managers.schedule_batch import FINISH_ABORT
from sglang.srt.plugins.hook_registry import HookType

from sglang_ft.engine.hook import Hook
from sglang_ft.errors import WorkerError

logger = logging.getLogger(__name__)


def hooks(take_failure: Callable[[], WorkerError | None], on_gpu: bool) -> list[Hook]:
    """`take_failure` gives the failure of the forward pass that just ended, or None."""

    def process_batch_result(original: Callable, scheduler: Any, batch: Any, result: Any) -> None:
        # The pass was only launched when run_batch returned; SGLang waits for it next anyway.
        if (copied := getattr(result, "copy_done", None)) is not None:
            copied.synchronize()
        failure = take_failure()
        if failure is not None:
            fail_requests(scheduler, batch, str(failure))
        original(scheduler, batch, result)

    if on_gpu:
        return [
            Hook(
                "sglang.srt.managers.scheduler.Scheduler.process_batch_result",
                HookType.AROUND,
                process_batch_result,
                "(self, batch, result)",
            )
        ]

    def run_batch(original: Callable, scheduler: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(scheduler, batch, *args, **kwargs)
        failure = take_failure()
        if failure is not None:
            fail_requests(scheduler, batch, str(failure))
        return result

    return [
        Hook(
            "sglang.srt.managers.scheduler.Scheduler.run_batch",
            HookType.AROUND,
            run_batch,
            "(self, batch, pp_proxy_tensors=None)",
        )
    ]


def fail_requests(scheduler: Any, batch: Any, message: str) -> None:
    """Ends every request of `batch` with 503 and `message`; what the pass computed never enters the prefix cache."""
    logger.error("%d request(s) end: %s", len(batch.reqs), message)
    for req in batch.reqs:
        req.skip_radix_cache_insert = True
        reason = FINISH_ABORT(message, HTTPStatus.SERVICE_UNAVAILABLE, "worker_error")
        if req is scheduler.chunked_req:
            # In the middle of its prompt: SGLang tears it down at the next step, we tell the client why.
            scheduler._pending_chunked_abort_req = req
            abort = AbortReq(rid=req.rid, finished_reason=reason.to_json(), abort_message=message)
            scheduler.ipc_channels.send_to_tokenizer.send_output(abort, req)
        else:
            req.to_finish = reason
