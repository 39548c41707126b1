"""Ends the requests of a batch whose forward pass failed, and nothing else: the server goes on."""

from __future__ import annotations

import logging
from collections.abc import Callable
from http import HTTPStatus
from typing import Any, Protocol

import torch
from sglang.srt.managers.io_struct import AbortReq
from sglang.srt.managers.schedule_batch import FINISH_ABORT
from sglang.srt.plugins.hook_registry import HookType

from sglang_ft.engine.hook import Hook
from sglang_ft.errors import WorkerError

logger = logging.getLogger(__name__)


class Passes(Protocol):
    """Who runs the experts of forward passes, and knows why some failed."""

    def expect(self, more_prompt: bool) -> None:
        """A batch is about to be launched; `more_prompt`: a prompt goes on in a later one."""

    def take_failure(self) -> WorkerError | None:
        """Of the pass that was just run or launched by this thread, so far as the host knows."""

    def last_pass(self) -> int:
        """Number of the pass launched last on a GPU."""

    def failure_of(self, number: int) -> WorkerError | None:
        """Of a pass that a GPU has finished; asked for in order."""


def hooks(passes: Passes, on_gpu: bool) -> list[Hook]:
    """Ends the requests of a failed pass before anything that it computed reaches a client."""

    def run_batch(original: Callable, scheduler: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        passes.expect(scheduler.chunked_req is not None)
        result = original(scheduler, batch, *args, **kwargs)
        failure = passes.take_failure()
        if failure is not None:
            fail_requests(scheduler, batch, str(failure))
        if on_gpu:
            result.ft_pass = passes.last_pass()
        return result

    def process_batch_result(original: Callable, scheduler: Any, batch: Any, result: Any) -> None:
        # The pass was only launched when run_batch returned; SGLang waits for it next anyway.
        if getattr(result, "copy_done", None) is not None:
            result.copy_done.synchronize()
        else:
            torch.cuda.synchronize()
        failure = passes.failure_of(getattr(result, "ft_pass", passes.last_pass()))
        if failure is not None:
            fail_requests(scheduler, batch, str(failure))
        original(scheduler, batch, result)

    scheduler = "sglang.srt.managers.scheduler.Scheduler"
    found = [
        Hook(f"{scheduler}.run_batch", HookType.AROUND, run_batch, "(self, batch, pp_proxy_tensors=None)")
    ]
    if on_gpu:
        signature = "(self, batch, result)"
        found.append(
            Hook(f"{scheduler}.process_batch_result", HookType.AROUND, process_batch_result, signature)
        )
    return found


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
