"""GPU memory that runs out costs slots, not requests: a prompt's pass is repeated once with a smaller cache.

A pass that fails half-way has already changed the recurrent states of requests that it continues, so those are kept
from before it. KV cache and kept checkpoints are written again with the same values.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.mem_cache.memory_pool import HybridReqToTokenPool
from sglang.srt.plugins.hook_registry import HookType

from sglang_ft.engine.hook import Hook

if TYPE_CHECKING:
    from sglang_ft.engine.gpu_experts import GpuExperts

logger = logging.getLogger(__name__)

_GIVEN = 1 << 30
"""What a pass that ran out of memory gets, beside what it lacked at first."""
_RUNNER = "sglang.srt.model_executor.model_runner.ModelRunner"


@dataclass
class States:
    """Recurrent states of some requests as they were: [layers, requests, ...] each."""

    slots: torch.Tensor
    stored: list[tuple[torch.Tensor, torch.Tensor]]

    @classmethod
    def of(cls, pool: Any, requests: torch.Tensor) -> States:
        """`pool`: SGLang's, of requests with recurrent states; `requests`: their places in it."""
        slots = pool.translate_mamba_indices(pool.get_mamba_indices(requests)).long()
        state = pool.mamba_pool.mamba_cache
        tensors = [*state.conv, state.temporal]
        return cls(slots, [(tensor, tensor[:, slots]) for tensor in tensors])

    def restore(self) -> None:
        for tensor, before in self.stored:
            tensor[:, self.slots] = before


class MemoryGuard:
    """Repeats a pass over a prompt's rows when it ran out of memory and the experts had some to give."""

    def __init__(self, executor: Callable[[], GpuExperts | None]) -> None:
        self._executor = executor
        self._states: States | None = None

    def remember(self, runner: Any, batch: Any) -> None:
        """The states of the requests that this pass continues; called when they are as it will find them."""
        self._states = None
        lengths = batch.extend_prefix_lens_cpu
        if not self._guards(runner, batch) or not isinstance(runner.req_to_token_pool, HybridReqToTokenPool):
            return
        continued = [i for i, length in enumerate(lengths or ()) if length > 0]
        if continued:
            self._states = States.of(runner.req_to_token_pool, batch.req_pool_indices[continued])

    def run(self, original: Callable, runner: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Around a pass."""
        if not self._guards(runner, batch):
            return original(runner, batch, *args, **kwargs)
        try:
            return original(runner, batch, *args, **kwargs)
        except torch.OutOfMemoryError as e:
            why = str(e).partition(".")[0]
        # Not in the handler: the error's frames hold what the pass had allocated.
        experts = self._executor()
        given = experts.give_memory(_GIVEN) if experts is not None else 0
        if not given:
            raise torch.OutOfMemoryError(f"{why}; no expert slots are left to give back")
        logger.warning(
            "%s: the expert cache gives back %.2f GiB, the pass runs again", why, given / (1 << 30)
        )
        if self._states is not None:
            self._states.restore()
        assert experts is not None
        experts.begin_again(batch.positions.shape[-1])
        return original(runner, batch, *args, **kwargs)

    def _guards(self, runner: Any, batch: Any) -> bool:
        return (
            self._executor() is not None
            and not runner.is_draft_worker
            and batch.forward_mode.is_extend_without_speculative()
        )


def hooks(executor: Callable[[], GpuExperts | None]) -> list[Hook]:
    """`executor` gives the experts of this process once they are loaded."""
    guard = MemoryGuard(executor)

    def states_ready(result: Any, runner: Any, forward_batch: Any) -> None:
        guard.remember(runner, forward_batch)

    return [
        Hook(
            f"{_RUNNER}._forward_raw",
            HookType.AROUND,
            guard.run,
            "(self, forward_batch, pp_proxy_tensors, reinit_attn_backend=False, split_forward_count=1)",
        ),
        Hook(
            f"{_RUNNER}._maybe_execute_deferred_mamba_cow_and_clear",
            HookType.AFTER,
            states_ready,
            "(self, forward_batch)",
        ),
    ]
