"""A long prompt does not silence the requests that already answer: between its chunks they get a token in time.

SGLang reads a prompt to its end before it decodes again. On a GPU that the experts do not fit a chunk takes about a
second, so a prompt of 32k tokens would stop all other answers for many.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from sglang.srt.managers.schedule_batch import NextBatchPlan
from sglang.srt.plugins.hook_registry import HookType

from sglang_ft.engine.hook import Hook

_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"


class DecodeTurns:
    """Says when a decode step comes before the next chunk."""

    def __init__(self, gap_s: float, now: Callable[[], float] = time.monotonic) -> None:
        """`gap_s`: seconds without a decode step after which one is due."""
        self._gap_s, self._now = gap_s, now
        self._last = -gap_s

    def launched(self, batch: Any) -> None:
        """`batch` is about to run."""
        if batch is not None and (batch.forward_mode.is_decode() or batch.forward_mode.is_mixed()):
            self._last = self._now()

    def due(self, last_batch: Any, running_batch: Any) -> bool:
        """Whether a decode step comes next, although a prompt could go on: the last batch was one, and time is up."""
        if last_batch is None or not last_batch.forward_mode.is_extend_without_speculative():
            return False
        if running_batch.is_empty() or running_batch.is_prefill_only:
            return False
        answering = any(not req.finished() for req in running_batch.reqs)
        return answering and self._now() - self._last >= self._gap_s


def hooks(turns: DecodeTurns) -> list[Hook]:
    """Puts decode steps between the chunks of prompts."""

    def get_new_batch_prefill(original: Callable, scheduler: Any, running_batch: Any) -> Any:
        if turns.due(scheduler.last_batch, running_batch):
            return NextBatchPlan(batch_to_run=None, running_batch=running_batch)
        return original(scheduler, running_batch)

    def run_batch(scheduler: Any, batch: Any, *args: Any, **kwargs: Any) -> None:
        turns.launched(batch)

    return [
        Hook(
            f"{_SCHEDULER}.get_new_batch_prefill",
            HookType.AROUND,
            get_new_batch_prefill,
            "(self, running_batch)",
        ),
        Hook(f"{_SCHEDULER}.run_batch", HookType.BEFORE, run_batch, "(self, batch, pp_proxy_tensors=None)"),
    ]
