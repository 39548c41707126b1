"""The heat list: the next start begins with what was hot, and nothing but a right list is used."""

from __future__ import annotations

import json
import random

import pytest
import torch

from sglang_ft.experts import heat
from sglang_ft.experts.cache_state import CacheState
from sglang_ft.experts.heat import HeatList
from sglang_ft.experts.step import NONE, Split, StepCache

EXPERTS, SLOTS, LAYERS = 12, 10, 3
FILL_ALL = [Split(m) for m in range(9)]


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def reference(state: CacheState) -> StepCache:
    """The readable cache in the state of the other."""
    cache = StepCache(len(state.slot_of), state.control().live_slots)
    cache.slot_of, cache.expert_of = state.slot_of.tolist(), state.expert_of.tolist()
    cache.slot_of = [NONE if s < 0 else s for s in cache.slot_of]
    cache.expert_of = [NONE if e < 0 else e for e in cache.expert_of]
    cache.seen = [s % (1 << 32) for s in state.seen.tolist()]
    cache.used = [u % (1 << 32) for u in state.used.tolist()]
    cache.step_number = state.control().step
    return cache


def hottest(cache: StepCache) -> list[int]:
    def words(values: list[int]) -> torch.Tensor:
        return torch.tensor([v - (1 << 32) if v >= 1 << 31 else v for v in values], dtype=torch.int32)

    expert_of = [-1 if e == NONE else e for e in cache.expert_of]
    return heat.order_of(words(expert_of), words(cache.used), cache.step_number)


def run(cache: StepCache, steps: int) -> None:
    for _ in range(steps):
        for layer in range(LAYERS):
            routes = torch.rand(2, EXPERTS).topk(2).indices
            cache.step(routes, layer * EXPERTS, EXPERTS, FILL_ALL)


def test_a_seeded_cache_evicts_in_the_order_of_the_one_before():
    for _ in range(20):
        before = StepCache(LAYERS * EXPERTS, SLOTS)
        run(before, random.randrange(1, 30))
        order = hottest(before)
        state = CacheState(LAYERS * EXPERTS, SLOTS, "cpu")
        state.seed(order, SLOTS)
        after = reference(state)
        assert hottest(after) == order
        run(before, 1)
        assert set(after.expert_of) == set(order) | ({NONE} if len(order) < SLOTS else set())
        layer, routes = 1, torch.tensor([[e] for e in range(EXPERTS) if EXPERTS + e not in order][:3])
        after.step(routes, layer * EXPERTS, EXPERTS, FILL_ALL)
        gone = [e for e in order if e not in after.expert_of]
        free = SLOTS - len(order)
        assert set(gone) == set(order[len(order) - max(0, len(routes) - free) :]), "the coldest go first"


def test_what_is_seeded_is_hit():
    state = CacheState(LAYERS * EXPERTS, SLOTS, "cpu")
    state.seed([5, EXPERTS + 3, 2], SLOTS)
    assert (state.control().live_slots, state.control().free_slots) == (SLOTS, SLOTS - 3)
    cache = reference(state)
    assert [h.expert for h in cache.step(torch.tensor([[5, 2]]), 0, EXPERTS, FILL_ALL).hits] == [2, 5]
    assert [h.slot for h in cache.step(torch.tensor([[3, 4]]), EXPERTS, EXPERTS, FILL_ALL).hits] == [1]
    state.reset(SLOTS)
    assert reference(state).expert_of == [NONE] * SLOTS


def test_a_snapshot_is_of_its_moment():
    state = CacheState(LAYERS * EXPERTS, SLOTS, "cpu")
    state.seed([7, 1, 30], SLOTS)
    experts = state.begin_snapshot()
    state.reset(SLOTS)
    assert experts() == [7, 1, 30]
    assert state.begin_snapshot()() == []


def test_stamps_wrap_around():
    expert_of = torch.tensor([4, -1, 9, 2], dtype=torch.int32)
    used = torch.tensor([-3, 0, 2, 2147483647], dtype=torch.int32)
    assert heat.order_of(expert_of, used, step=3) == [9, 4, 2]


def test_a_list_comes_back_for_its_model_only(caplog):
    HeatList("a" * 64, 36).save([3, 35, 0])
    assert HeatList("a" * 64, 36).load() == [3, 35, 0]
    assert HeatList("b" * 64, 36).load() == [] and not caplog.text, "none is nothing to warn of"
    assert HeatList("a" * 64, 40).load() == [] and "another model" in caplog.text
    caplog.clear()
    assert HeatList("a" * 32 + "c" * 32, 36).load() == [] and "another model" in caplog.text


def signed(content: dict) -> str:
    return json.dumps(content | {"checksum": heat._checksum(content)})


BASE = {"format": heat._FORMAT, "version": 1, "model": "a" * 64, "experts_of_model": 36, "experts": [1, 2]}
DAMAGE = {
    "empty": "",
    "no JSON": '{"format": ',
    "no object": "[1, 2]",
    "another format": signed(BASE | {"format": "x"}),
    "newer": signed(BASE | {"version": 2}),
    "an expert twice": signed(BASE | {"experts": [1, 1]}),
    "an expert that is not there": signed(BASE | {"experts": [36]}),
    "no number": signed(BASE | {"experts": ["1"]}),
    "no list": signed(BASE | {"experts": 5}),
    "missing": signed({k: v for k, v in BASE.items() if k != "experts"}),
    "flipped": signed(BASE).replace("[1, 2]", "[1, 3]"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_list_is_not_used_and_then_replaced(damage, caplog):
    heat_list = HeatList("a" * 64, 36)
    heat_list.save([1])
    heat_list.path.write_text(DAMAGE[damage])
    assert heat_list.load() == [] and "the cache starts empty" in caplog.text
    heat_list.save([4, 5])
    assert heat_list.load() == [4, 5]


def test_every_flipped_byte_is_found():
    heat_list = HeatList("a" * 64, 36)
    heat_list.save([1, 20, 3])
    data = heat_list.path.read_bytes()
    for at in range(len(data)):
        heat_list.path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        assert heat_list.load() in ([], [1, 20, 3]), "blanks may differ"


def test_a_folder_that_cannot_be_written_is_a_warning(caplog, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    heat_list = HeatList("a" * 64, 36)
    heat_list.save([1])
    assert "cannot be written" in caplog.text
    assert heat_list.load() == []
