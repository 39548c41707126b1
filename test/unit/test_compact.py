"""A cache that shrinks keeps what was used last, and its tables stay true."""

from __future__ import annotations

import random

import pytest
import torch

from sglang_ft.experts.compact import keep_latest
from sglang_ft.experts.step import NONE, TRANSIENT_AGE, Split, StepCache

EXPERTS = 96


def tables(cache: StepCache) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    def signed(values: list[int]) -> torch.Tensor:
        return torch.tensor([v - 2**32 if v >= 2**31 else v for v in values], dtype=torch.int32)

    return signed(cache.slot_of), signed(cache.expert_of), signed(cache.used)


def used_cache(slots: int, steps: int, transient: float = 0.0) -> StepCache:
    cache = StepCache(EXPERTS, slots)
    for step in range(steps):
        routes = torch.tensor([random.sample(range(32), 4) for _ in range(2)])
        cache.step(
            routes, step % 3 * 32, 32, [Split(m) for m in range(33)], transient=random.random() < transient
        )
    return cache


@pytest.mark.parametrize("transient", [0.0, 0.4])
@pytest.mark.parametrize("wanted", [0, 1, 13, 40, 59, 60])
@pytest.mark.parametrize("steps", [0, 5, 200])
def test_the_latest_stay_and_every_table_agrees(steps, wanted, transient):
    cache = used_cache(60, steps, transient)
    slot_of, expert_of, used = tables(cache)
    got = keep_latest(slot_of, expert_of, used, cache.step_number, 60, wanted)

    def age(slot: int) -> int:
        return (cache.step_number - cache.used[slot]) & 0xFFFFFFFF

    occupied = [slot for slot in range(60) if cache.expert_of[slot] != NONE]
    stay = sorted(occupied, key=lambda slot: (age(slot), slot))[:wanted]
    assert got.kept == len(stay) == int((got.expert_of != -1).sum())
    contents = {slot: expert_of[slot].item() for slot in range(60)}
    for source, to in got.moves:  # what the copies make of the slots
        assert source >= wanted > to
        contents[to] = expert_of[source].item()
    kept = {expert_of[slot].item(): used[slot].item() for slot in stay}
    for expert in range(EXPERTS):
        slot = got.slot_of[expert].item()
        assert (slot != -1) == (expert in kept)
        if slot != -1:
            assert slot < wanted and got.expert_of[slot] == expert and contents[slot] == expert
            assert got.used[slot] == kept[expert]
    moved = {slot for move in got.moves for slot in move}
    assert len(moved) == 2 * len(got.moves)
    assert all(got.slot_of[expert_of[s].item()] == s for s in stay if s < wanted), "no needless copies"
    assert (got.expert_of[wanted:] == -1).all()


def test_transient_fills_go_first():
    cache = StepCache(EXPERTS, 8)
    all_filled = [Split(m) for m in range(33)]
    cache.step(torch.arange(8).view(1, 8), 0, 32, all_filled)
    cache.step(torch.arange(8, 12).view(1, 4), 0, 32, all_filled, transient=True)
    got = keep_latest(*tables(cache), cache.step_number, 8, 4)
    assert {e for e in got.expert_of.tolist() if e >= 0} == {4, 5, 6, 7}
    assert TRANSIENT_AGE > 2**30
