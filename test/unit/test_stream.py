"""The stream of experts through two buffers: right contents whatever the order in which two queues of a device run."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from sglang_ft.experts.cache_state import CacheState
from sglang_ft.experts.compact import keep_latest
from sglang_ft.experts.decode import runs
from sglang_ft.experts.prefill import ExpertStream

ROLE = 0


class FakeEvent:
    """How often it was recorded, and how often that was reached."""

    def __init__(self) -> None:
        self.recorded = self.reached = 0


class FakeDevice:
    """Two queues of work that only run when asked, in a random order that events allow."""

    def __init__(self) -> None:
        self.queues: dict[bool, list[Callable[[], bool]]] = {False: [], True: []}

    def event(self) -> FakeEvent:
        return FakeEvent()

    def enqueue(self, copies: bool, work: Callable[[], object]) -> None:
        self.queues[copies].append(lambda: work() is not False)

    def record(self, event: FakeEvent, copies: bool) -> None:
        event.recorded += 1
        number = event.recorded

        def reach() -> None:
            event.reached = max(event.reached, number)

        self.enqueue(copies, reach)

    def wait(self, event: FakeEvent, copies: bool) -> None:
        number = event.recorded
        self.enqueue(copies, lambda: event.reached >= number)

    def copy(self, cache: FakeCache, copies: list[tuple[int, int, int, int]]) -> None:
        for one in copies:  # each may run at another time
            self.enqueue(True, lambda one=one: cache.run_copy(*one))

    def run(self, most: float = float("inf")) -> None:
        """Up to so many pieces of work; all of it must be able to end."""
        done, blocked, favour = 0, set(), random.choice([0.02, 0.5, 0.98])
        while done < most and any(self.queues.values()):
            ready = [c for c in (False, True) if self.queues[c] and c not in blocked]
            assert ready, "both queues wait for each other"
            copies = random.random() < favour if len(ready) == 2 else ready[0]
            if self.queues[copies][0]():
                self.queues[copies].pop(0)
                done += 1
                blocked.clear()
            else:
                blocked.add(copies)


@dataclass
class FakeCache:
    """Experts that are one number, the id; what ExpertStream needs of an ExpertCache."""

    device_: FakeDevice
    layers_: int
    experts: int
    live: int
    uncached: tuple[int, ...] = ()
    link: int = field(default=0)

    def __post_init__(self) -> None:
        self.device = torch.device("cpu")
        self.spec = SimpleNamespace(num_experts=self.experts, expert_bytes=10)
        self.layers = [
            SimpleNamespace(first_expert_id=i * self.experts, uncached=i in self.uncached)
            for i in range(self.layers_)
        ]
        self.state = CacheState(self.layers_ * self.experts, self.live, "cpu")
        self.state.reset(self.live)
        self.slots = torch.full((self.live,), -1)

    def shrink(self, live: int) -> None:
        self.device_.run()
        compaction = keep_latest(*self.state.tables(), live)
        for source, to in compaction.moves:
            self.slots[to] = self.slots[source]
        self.state.shrink(compaction, live)
        self.live = live

    def grow(self, live: int) -> None:
        self.device_.enqueue(False, lambda before=self.live: self.state.grow(before, live))
        self.live = live

    def fetch(self, layer: int, experts: list[int], first: int, slot: int) -> list[tuple[int, int, int, int]]:
        return [(layer, begin, count, slot + begin - first) for begin, count in runs(experts)]

    def run_copy(self, layer: int, begin: int, count: int, slot: int) -> None:
        base = layer * self.experts + begin
        self.slots[slot : slot + count] = torch.arange(base, base + count)
        self.link += count

    def gather(self, layer: int, experts: torch.Tensor, first: int, slot: int) -> None:
        def work() -> None:
            for e in experts.tolist():
                own = int(self.state.slot_of[layer * self.experts + e])
                self.slots[slot + e - first] = self.slots[own] if own >= 0 else layer * self.experts + e

        self.device_.enqueue(False, work)

    def slot_views(self, first: int, count: int) -> dict[int, torch.Tensor]:
        return {ROLE: self.slots[first : first + count]}

    def cached(self, expert: int, slot: int) -> None:
        """Puts an expert into a slot, as a decode step does."""
        old = int(self.state.expert_of[slot])
        if old >= 0:
            self.state.slot_of[old] = -1
        else:
            self.state._control_words()[1] -= 1
        if (before := int(self.state.slot_of[expert])) >= 0:
            self.state.expert_of[before] = -1
            self.state._control_words()[1] += 1
        self.state.slot_of[expert], self.state.expert_of[slot] = slot, expert
        self.state.used[slot] = random.randrange(1, 100)
        self.slots[slot] = expert


def check_tables(cache: FakeCache) -> None:
    state = cache.state
    for slot in range(cache.live):
        expert = int(state.expert_of[slot])
        assert expert < 0 or (int(state.slot_of[expert]) == slot and int(cache.slots[slot]) == expert)
    assert state.control().free_slots == int((state.expert_of[: cache.live] < 0).sum())
    assert int((state.slot_of >= 0).sum()) == int((state.expert_of[: cache.live] >= 0).sum())


def one_pass(
    stream: ExpertStream, cache: FakeCache, device: FakeDevice, routes: torch.Tensor, more: bool
) -> None:
    """What GpuExperts does with a chunk of a prompt; every group's work looks at what it finds."""
    keep = stream._keep
    stream._keep = lambda *args: device.enqueue(False, lambda: keep(*args))
    stream.begin()
    for layer in range(cache.layers_):
        if cache.layers[layer].uncached:
            continue
        seen = []
        for first in stream.firsts():
            group = stream.acquire(layer, first)

            def work(layer=layer, group=group) -> None:
                base = layer * cache.experts + group.first
                found = group.experts[ROLE]
                assert torch.equal(found, torch.arange(base, base + group.count)), (layer, group)

            device.enqueue(False, work)
            stream.release(layer, group, routes, more)
            seen += range(group.first, group.first + group.count)
            if random.random() < 0.5:
                device.run(random.randrange(20))
        assert seen == list(range(cache.experts))
    stream._keep = keep


@pytest.mark.parametrize("group", [16, 7, 4])
@pytest.mark.parametrize("slots, filled", [(40, 0), (64, 30), (64, 64), (100, 96)])
def test_every_group_is_whole_in_any_order_of_the_queues(slots, filled, group):
    for layers in (1, 2, 3, 6):
        device = FakeDevice()
        cache = FakeCache(device, layers, 16, slots, uncached=(1,) if layers == 6 else ())
        held = random.sample(range(layers * 16), min(filled, layers * 16))
        for slot, expert in enumerate(held):
            cache.cached(expert, slot)
        cache.state._control_words()[2] = 100
        stream = ExpertStream(cache, group, device)
        for _ in range(3):  # prompts
            stream.ahead = random.random() < 0.8
            for chunk in range(3):
                routes = torch.randint(0, 16, (5, 2))
                one_pass(stream, cache, device, routes, more=chunk < 2)
                assert stream.active and cache.live == slots - 2 * group
                for _ in range(random.choice([0, 0, 1, 80])):  # decode steps in between
                    stream.decoded()
                    device.run()
                    cache.cached(random.randrange(layers * 16), random.randrange(cache.live))
            stream.end()
            device.run()
            assert cache.live == slots and not stream.active
            for _ in range(random.randrange(40)):
                cache.cached(random.randrange(layers * 16), random.randrange(slots))
            check_tables(cache)


def test_a_prompt_that_ends_early_leaves_no_copy_behind():
    for _ in range(20):
        device = FakeDevice()
        cache = FakeCache(device, 3, 16, 64)
        stream = ExpertStream(cache, 16, device)
        one_pass(stream, cache, device, torch.randint(0, 16, (5, 2)), more=True)
        stream.end()
        tail = range(32, 64)
        for slot in tail:  # decode steps fill the slots that came back
            device.enqueue(False, partial(cache.cached, slot - 32, slot))
        device.run()
        assert [int(cache.slots[slot]) for slot in tail] == list(range(32))


def test_what_is_cached_does_not_take_the_link():
    device = FakeDevice()
    cache = FakeCache(device, 4, 16, 72)
    for expert in range(40):
        cache.cached(expert, expert)
    stream = ExpertStream(cache, 16, device)
    one_pass(stream, cache, device, torch.zeros(1, 1, dtype=torch.long), more=False)
    device.run()
    assert cache.link == 64 - 40 and stream.bytes == cache.link * 10


def test_the_hottest_survive_the_loan_of_their_slots():
    device = FakeDevice()
    cache = FakeCache(device, 4, 16, 48)
    for slot in range(48):
        cache.cached(slot, slot)
        cache.state.used[slot] = slot + 1
    cache.state._control_words()[2] = 100
    stream = ExpertStream(cache, 8, device)
    stream.begin()
    assert {e for e in cache.state.expert_of.tolist() if e >= 0} == set(range(16, 48))
    check_tables(cache)


def test_a_cold_cache_keeps_what_the_prompt_used_most():
    device = FakeDevice()
    cache = FakeCache(device, 2, 16, 44)
    stream = ExpertStream(cache, 16, device)
    routes = torch.tensor([[3, 5], [3, 7], [3, 5], [-1, 40]])
    one_pass(stream, cache, device, routes, more=False)
    device.run()
    for layer in range(2):
        kept = {e for e in range(16) if cache.state.slot_of[layer * 16 + e] >= 0}
        assert len(kept) == 6 and {3, 5, 7} <= kept
    assert cache.state.control().free_slots == 0
    stream.end()
    device.run()
    check_tables(cache)
    assert cache.state.control().free_slots == 32


def test_runs_of_consecutive_experts():
    assert runs([]) == []
    assert runs([4]) == [(4, 1)]
    assert runs([0, 1, 2, 5, 7, 8]) == [(0, 3), (5, 1), (7, 2)]
