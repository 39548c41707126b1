"""Prompts on the GPU: experts through buffers, steps of many rows, and a cache that lends its slots."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import pytest
import torch
from gpu_stack import GpuStack

from sglang_ft.experts import policy
from sglang_ft.experts.formats import LayerSpec, find_format
from sglang_ft.experts.prefill import CudaLanes, ExpertStream
from sglang_ft.experts.step import Split

BF16 = find_format(None, "bfloat16")
TOLERANCE = 6e-3
HALF = [Split((m + 1) // 2) for m in range(1025)]


@pytest.fixture
def stack() -> Iterator[Callable[..., GpuStack]]:
    made: list[GpuStack] = []

    def make(slots: int, layers: int = 5, experts: int = 32, **options) -> GpuStack:
        spec = LayerSpec(BF16, experts, 512, 192, **options)
        made.append(GpuStack([spec] * layers, slots))
        made[-1].cache.state.set_split(HALF)
        made[-1].cache.set_prompt_split(HALF)
        return made[-1]

    yield make
    for one in made:
        one.close()


def used(one: GpuStack, steps: int = 60) -> GpuStack:
    for _ in range(steps):
        layer = random.randrange(len(one.specs))
        one.worker.wake()
        one.cache.step(layer, *one.inputs(random.choice([1, 4]), layer))
    torch.cuda.synchronize()
    return one


def check_slots(one: GpuStack) -> None:
    """Every slot holds the expert that the tables say."""
    tables = one.cache.state.tables()
    experts = one.specs[0].num_experts
    for slot in range(tables.live):
        expert = int(tables.expert_of[slot])
        if expert < 0:
            continue
        assert int(tables.slot_of[expert]) == slot
        for role, view in one.cache.slot_views(slot, 1).items():
            bank = one.pool.banks(expert // experts)[role][expert % experts]
            assert torch.equal(view[0].cpu(), bank), (slot, expert, role)
    assert one.cache.state.control().free_slots == int((tables.expert_of[: tables.live] < 0).sum())


def check_group(one: GpuStack, layer: int, group) -> Callable[[], None]:
    """Copies what the work on a group would see; the result compares it once the device is done."""
    seen = {role: view.clone() for role, view in group.experts.items()}

    def compare() -> None:
        for role, copy in seen.items():
            bank = one.pool.banks(layer)[role][group.first : group.first + group.count]
            assert torch.equal(copy.cpu(), bank), (layer, group.first, role)

    return compare


@pytest.mark.parametrize("options", [{}, {"bias": True}], ids=["plain", "bias"])
@pytest.mark.parametrize("slots, group", [(64, 32), (150, 32), (60, 7), (160, 16)])
def test_every_group_is_what_the_pool_holds(stack, slots: int, group: int, options: dict) -> None:
    one = used(stack(slots, **options), 60 if slots != 64 else 0)
    stream = ExpertStream(one.cache, group, CudaLanes(one.cache.device))
    for prompt in range(3):
        checks = []
        for chunk in range(3):
            stream.begin()
            for layer in range(len(one.specs)):
                for first in stream.firsts():
                    got = stream.acquire(layer, first)
                    checks.append(check_group(one, layer, got))
                    stream.release(layer, got, torch.randint(0, 32, (50, 4), device="cuda"), more=chunk < 2)
            for _ in range(random.randrange(3)):  # decode steps between two chunks
                stream.decoded()
                used(one, 5)
        stream.end()
        for check in checks:
            check()
        check_slots(one)
        used(one, 40 if prompt else 3)
        check_slots(one)
        for layer in range(len(one.specs)):
            assert one.error(layer, 3) < TOLERANCE


@pytest.mark.parametrize("live", [0, 1, 33, 79])
def test_a_smaller_cache_keeps_what_it_says_and_grows_again(stack, live: int) -> None:
    one = used(stack(80))
    one.cache.shrink(live)
    check_slots(one)
    used(one)
    check_slots(one)
    assert one.error(1, 5) < TOLERANCE
    one.cache.grow(80)
    used(one)
    check_slots(one)
    assert one.error(2, 5) < TOLERANCE


@pytest.mark.parametrize("split", [HALF, policy.fills_only(1024), policy.cpu_only(1024)])
@pytest.mark.parametrize("slots", [1, 40, 160])
def test_steps_of_prompts(stack, slots: int, split: list[Split]) -> None:
    one = used(stack(slots))
    one.cache.set_prompt_split(split)
    for rows in (1, 3, 64, 65, 200, 256):
        for layer in range(len(one.specs)):
            x, routes, weights = one.inputs(rows, layer)
            one.worker.wake()
            got = one.cache.step(layer, x, routes, weights, prompt=True)
            want = one.reference(layer, x, routes, weights)
            assert ((got.double().cpu() - want).norm() / want.norm()).item() < TOLERANCE, (rows, layer)
        used(one, 10)
    check_slots(one)


def test_a_prompt_leaves_the_cache_of_decode_steps_alone(stack) -> None:
    one = stack(80)
    one.cache.state.set_split(policy.fills_only(1024))
    one.cache.set_prompt_split(policy.fills_only(1024))
    used(one, 100)
    before = set(one.cache.state.tables().expert_of.tolist())
    for layer in range(len(one.specs)):
        one.cache.step(layer, *one.inputs(16, layer), prompt=True)
    after = set(one.cache.state.tables().expert_of.tolist())
    assert len(before - after) <= 32, "no more than one layer's experts gave way"
    check_slots(one)
