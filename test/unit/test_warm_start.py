"""The GPU's experts write down what is hot while they serve, and begin with it the next time; without CUDA."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("sglang")

from sglang_ft.engine import cpu_platform

EXPERTS, SLOTS = 36, 10


@pytest.fixture
def make(tmp_path, monkeypatch):
    """A factory of GpuExperts whose cache is its state alone."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for name, value in cpu_platform.required_environment().items():
        monkeypatch.setenv(name, value)
    from sglang_ft.engine.gpu_experts import GpuExperts
    from sglang_ft.experts.cache_state import CacheState
    from sglang_ft.experts.heat import HeatList

    def new(heat_list: bool = True):
        gpu = GpuExperts.__new__(GpuExperts)
        state = CacheState(EXPERTS, SLOTS, "cpu")

        def seed(experts: list[int]) -> int:
            state.seed(experts[:SLOTS], SLOTS)
            return len(experts[:SLOTS])

        gpu.cache = SimpleNamespace(state=state, seed=seed, reset=lambda: state.reset(SLOTS))
        gpu._heat_list = HeatList("m" * 64, EXPERTS) if heat_list else None
        gpu._heat, gpu._heat_at = None, -1e9
        return gpu

    return new


def test_the_next_start_begins_with_what_was_hot(make):
    first = make()
    first.warm()
    assert first.cache.state.expert_of.tolist() == [-1] * SLOTS, "there is no list yet"
    first.cache.state.seed([30, 4, 17], SLOTS)
    first.note_heat()
    first.save_heat()
    second = make()
    second.warm()
    assert second.cache.state.expert_of.tolist()[:3] == [30, 4, 17]
    assert second.cache.state.control().free_slots == SLOTS - 3


def test_it_is_written_down_now_and_then_only(make):
    gpu = make()
    gpu.cache.state.seed([1], SLOTS)
    gpu.note_heat()
    gpu.cache.state.seed([2], SLOTS)
    gpu.note_heat()
    gpu.save_heat()
    assert gpu._heat_list.load() == [1], "the second came too soon"
    gpu.save_heat()
    assert gpu._heat is None


def test_what_has_not_arrived_is_waited_for(make):
    gpu = make()
    gpu.cache.state.seed([5], SLOTS)
    gpu.note_heat()
    arrived, gpu._heat = gpu._heat, lambda: None
    gpu.save_heat()
    assert gpu._heat_list.load() == []
    gpu._heat = arrived
    gpu.save_heat()
    assert gpu._heat_list.load() == [5]


def test_without_a_list_nothing_is_written_or_read(make, tmp_path):
    gpu = make(heat_list=False)
    gpu.cache.state.seed([5], SLOTS)
    gpu.note_heat()
    gpu.save_heat()
    gpu.warm()
    assert gpu.cache.state.expert_of.tolist() == [-1] * SLOTS and not list(tmp_path.iterdir())
