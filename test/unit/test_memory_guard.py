"""A pass that runs out of GPU memory runs again with fewer slots, on states as they were."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from sglang.srt.mem_cache.memory_pool import HybridReqToTokenPool
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from sglang_ft.engine import gpu_experts, memory_guard
from sglang_ft.engine.install import check_signature
from sglang_ft.engine.memory_guard import MemoryGuard


class Pool(HybridReqToTokenPool):
    """Recurrent states of three layers, in slots that are not the requests' places."""

    def __init__(self) -> None:
        state = SimpleNamespace(conv=[torch.randn(3, 8, 2)], temporal=torch.randn(3, 8, 4))
        self.mamba_pool = SimpleNamespace(mamba_cache=state)
        self.req_index_to_mamba_index_mapping = torch.tensor([0, 5, 2, 7])


class Experts:
    """What gives memory, so many times."""

    def __init__(self, times: int = 1) -> None:
        self.times, self.begun = times, []

    def give_memory(self, nbytes: int) -> int:
        self.times -= 1
        return nbytes if self.times >= 0 else 0

    def begin_again(self, rows: int) -> None:
        self.begun.append(rows)


def batch(mode: ForwardMode = ForwardMode.EXTEND, prefixes: tuple[int, ...] = (0, 12)):
    return SimpleNamespace(
        forward_mode=mode,
        extend_prefix_lens_cpu=list(prefixes),
        req_pool_indices=torch.tensor([1, 3]),
        positions=torch.zeros(100),
    )


class Runner:
    """A pass that changes the states of its requests and then fails so many times."""

    def __init__(self, guard: MemoryGuard, failures: int) -> None:
        self.guard, self.failures, self.passes = guard, failures, 0
        self.is_draft_worker, self.req_to_token_pool = False, Pool()

    def forward(self, batch, *args) -> str:
        self.passes += 1
        if batch.forward_mode.is_extend():
            self.guard.remember(self, batch)
        state = self.req_to_token_pool.mamba_pool.mamba_cache
        for slot in (5, 7):
            state.temporal[:, slot] += 1
            state.conv[0][:, slot] += 1
        if self.passes <= self.failures:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.")
        return "logits"


def states(runner: Runner) -> list[torch.Tensor]:
    state = runner.req_to_token_pool.mamba_pool.mamba_cache
    return [state.temporal.clone(), state.conv[0].clone()]


def test_a_pass_that_fails_once_is_repeated_on_the_states_before():
    experts = Experts()
    guard = MemoryGuard(lambda: experts)
    runner = Runner(guard, failures=1)
    before = states(runner)
    assert guard.run(Runner.forward, runner, batch(), None) == "logits"
    assert (runner.passes, experts.begun) == (2, [100])
    for was, now in zip(before, states(runner), strict=True):
        changed = now - was
        assert torch.allclose(changed[:, 7], torch.ones_like(changed[:, 7])), "continued: as if it ran once"
        assert changed[:, [0, 1, 2, 3, 4, 6]].abs().max() == 0


@pytest.mark.parametrize("times, failures, passes", [(0, 1, 1), (1, 2, 2)])
def test_a_second_failure_and_one_without_slots_are_the_request_s(times, failures, passes):
    guard = MemoryGuard(lambda: Experts(times))
    runner = Runner(guard, failures)
    with pytest.raises(torch.OutOfMemoryError, match="out of memory"):
        guard.run(Runner.forward, runner, batch(), None)
    assert runner.passes == passes


@pytest.mark.parametrize("mode", [ForwardMode.DECODE, ForwardMode.TARGET_VERIFY])
def test_only_prompts_are_repeated(mode):
    guard = MemoryGuard(lambda: Experts())
    runner = Runner(guard, failures=1)
    with pytest.raises(torch.OutOfMemoryError):
        guard.run(Runner.forward, runner, batch(mode), None)
    assert runner.passes == 1


def test_nothing_is_kept_of_prompts_that_begin():
    guard = MemoryGuard(lambda: Experts())
    runner = Runner(guard, failures=0)
    guard.remember(runner, batch(prefixes=(0, 0)))
    assert guard._states is None


def test_the_hooks_of_a_gpu_are_written_for_this_sglang():
    hooks = [*gpu_experts.hooks(lambda: None), *memory_guard.hooks(lambda: None)]
    for hook in hooks:
        check_signature(hook)
    assert {hook.target.rpartition(".")[2] for hook in hooks} >= {
        "forward",
        "_forward_raw",
        "init_cuda_graphs",
    }
