"""Replay of a route trace through an expert cache: what would have hit, missed and been filled, with no model.

`replay` counts exactly what step.py counts (a test compares them) without its search over all slots, so that a trace
of a full-size model takes seconds, and takes other policies than LRU. `replay_reference` runs step.py itself.
"""

from __future__ import annotations

import heapq
import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from sglang_ft.errors import TraceError
from sglang_ft.experts.policy import fills_only
from sglang_ft.experts.step import NONE, Counters, Split, StepCache
from sglang_ft.experts.traces import Trace, synthetic_trace


@dataclass(frozen=True)
class Replay:
    """Outcome of one replay. `distribution[m]`: layer steps that had m misses."""

    policy: str
    slots: int
    counters: Counters
    distribution: list[int]

    @property
    def miss_rate(self) -> float:
        """Misses a routed expert; an expert counts once a layer step, however many rows it has."""
        return self.counters.misses / max(1, self.counters.hits + self.counters.misses)


class Replacement(ABC):
    """Which experts stay in the slots. One instance serves one replay."""

    name: str
    help: str

    @abstractmethod
    def __init__(self, trace: Trace) -> None:
        """`trace` is what will be replayed."""

    @abstractmethod
    def use(self, expert: int, step: int) -> tuple[float, float]:
        """(worth, priority) of an expert id that layer step `step` uses; called once for each, hit or miss.

        Of the misses of a step, those of more rows are filled first, then those of higher worth, then the lower id.
        The slot of the lowest priority is evicted first, the lower slot on a tie.
        """


class LRU(Replacement):
    name = "lru"
    help = "least recently used; what the server does"

    def __init__(self, trace: Trace) -> None:
        self._seen = [0] * num_expert_ids(trace)

    def use(self, expert: int, step: int) -> tuple[float, float]:
        worth, self._seen[expert] = self._seen[expert], step
        return worth, step


class LFU(Replacement):
    """Uses are counted of all experts, in a slot or not; a use weighs half as much every HALF_LIFE tokens."""

    name = "lfu"
    help = "least frequently used, with ageing"
    HALF_LIFE = 256

    def __init__(self, trace: Trace) -> None:
        self._score = [-math.inf] * num_expert_ids(trace)  # log2 of the weighted count, in weights of step 0
        self._half_life = self.HALF_LIFE * trace.header.num_layers

    def use(self, expert: int, step: int) -> tuple[float, float]:
        old, new = self._score[expert], step / self._half_life
        high, low = max(old, new), min(old, new)
        self._score[expert] = score = high + math.log2(1 + 2 ** (low - high))
        return score, score


class Belady(Replacement):
    """Evicts what is needed last. No policy that fills every miss has fewer misses; for a split it is no bound."""

    name = "belady"
    help = "the future known: no policy that fills all misses can do better"

    def __init__(self, trace: Trace) -> None:
        self._uses: list[list[int]] = [[] for _ in range(num_expert_ids(trace))]
        for step, (first, rows_of) in enumerate(layer_steps(trace), start=1):
            for expert in rows_of:
                self._uses[first + expert].append(step)
        for uses in self._uses:
            uses.reverse()

    def use(self, expert: int, step: int) -> tuple[float, float]:
        uses = self._uses[expert]
        uses.pop()
        priority = -uses[-1] if uses else -math.inf
        return priority, priority


POLICIES: dict[str, type[Replacement]] = {policy.name: policy for policy in (LRU, LFU, Belady)}


class ReplayCache:
    """The cache of step.py, for any policy: same slots, same counters, victims from a heap."""

    def __init__(self, num_expert_ids: int, live_slots: int, policy: Replacement) -> None:
        self.policy = policy
        self.live_slots = live_slots
        self.step_number = 0
        self.counters = Counters()
        self.slot_of = [NONE] * num_expert_ids
        self.expert_of: list[int] = []  # slots are taken from 0 upwards and never freed
        self._priority: list[float] = []
        # (priority, slot) of every use; what is outdated is dropped when it comes up.
        self._heap: list[tuple[float, int]] = []

    def step(self, rows_of: Mapping[int, int], first_expert_id: int, split: Sequence[Split]) -> int:
        """One layer step; `rows_of` gives the rows of each routed expert of the layer. Returns the misses."""
        self.step_number += 1
        used: dict[int, float] = {}  # slot -> priority
        misses = []
        for expert, rows in rows_of.items():
            worth, priority = self.policy.use(first_expert_id + expert, self.step_number)
            slot = self.slot_of[first_expert_id + expert]
            if slot == NONE:
                misses.append((-rows, -worth, expert, priority))
            else:
                used[slot] = priority
        hits = len(used)
        chosen = self._split(split, len(misses), hits)
        misses.sort()
        for _, _, expert, priority in misses[: chosen.fills]:
            used[self._fill(first_expert_id + expert, used)] = priority
        self._refresh(used)
        self._count(hits, len(misses), chosen)
        return len(misses)

    def _split(self, split: Sequence[Split], misses: int, hits: int) -> Split:
        wanted = split[min(misses, len(split) - 1)]
        free = self.live_slots - len(self.expert_of)
        fills = min(max(wanted.fills, free), misses, self.live_slots - hits)
        return wanted if fills == wanted.fills > 0 else Split(fills)

    def _fill(self, expert: int, used: Mapping[int, float]) -> int:
        """Puts an expert into a free slot or that of a victim, never one of `used`."""
        if len(self.expert_of) < self.live_slots:
            slot = len(self.expert_of)
            self.expert_of.append(expert)
            self._priority.append(0.0)
        else:
            slot = self._victim(used)
            self.slot_of[self.expert_of[slot]] = NONE
            self.expert_of[slot] = expert
            self.counters.evictions += 1
        self.slot_of[expert] = slot
        return slot

    def _victim(self, used: Mapping[int, float]) -> int:
        while True:
            priority, slot = heapq.heappop(self._heap)
            if slot not in used and priority == self._priority[slot]:
                return slot

    def _refresh(self, used: Mapping[int, float]) -> None:
        for slot, priority in used.items():
            self._priority[slot] = priority
            heapq.heappush(self._heap, (priority, slot))
        if len(self._heap) > 16 * self.live_slots:
            self._heap = [(priority, slot) for slot, priority in enumerate(self._priority)]
            heapq.heapify(self._heap)

    def _count(self, hits: int, misses: int, chosen: Split) -> None:
        shared = chosen.features > 0
        job = misses - chosen.fills + shared
        c = self.counters
        c.steps += 1
        c.hits += hits
        c.misses += misses
        c.fills += chosen.fills
        c.jobs += job > 0
        c.job_experts += job
        c.shared += shared


def num_expert_ids(trace: Trace) -> int:
    """Experts of all layers."""
    return trace.header.num_layers * trace.header.num_experts


def layer_steps(trace: Trace) -> Iterator[tuple[int, Counter[int]]]:
    """(first expert id, rows of each routed expert) of every layer of every step, in order of execution."""
    for routes in trace:
        layers = routes.swapaxes(0, 1).reshape(trace.header.num_layers, -1).tolist()
        for layer, experts in enumerate(layers):
            rows_of = Counter(experts)
            rows_of.pop(-1, None)
            yield layer * trace.header.num_experts, rows_of


def replay(
    trace: Trace, slots: int, policy: str = "lru", split: Sequence[Split] | None = None, warmup: int = 0
) -> Replay:
    """Runs a trace through a cache that starts empty. The first `warmup` steps are not counted.

    `policy`: a key of POLICIES. `split`: as in StepCache.step; by default every miss is filled. Raises TraceError for
    a pool that holds no expert and a warm-up that leaves no step.
    """
    _check(trace, slots, warmup)
    split = split or fills_only(trace.header.num_experts)
    cache = ReplayCache(num_expert_ids(trace), slots, POLICIES[policy](trace))
    misses: list[int] = []
    for first_expert_id, rows_of in layer_steps(trace):
        if cache.step_number == warmup * trace.header.num_layers:
            cache.counters = Counters()
            misses = []
        misses.append(cache.step(rows_of, first_expert_id, split))
    return Replay(policy, slots, cache.counters, _distribution(misses))


def replay_reference(trace: Trace, slots: int, split: Sequence[Split] | None = None) -> Replay:
    """The same with step.py itself, LRU only: slow, for tests."""
    _check(trace, slots, warmup=0)
    split = split or fills_only(trace.header.num_experts)
    cache = StepCache(num_expert_ids(trace), slots)
    misses = []
    num_experts = trace.header.num_experts
    for routes in trace:
        for layer in range(trace.header.num_layers):
            before = cache.counters.misses
            rows = torch.from_numpy(routes[:, layer].copy())
            cache.step(rows, layer * num_experts, num_experts, split)
            misses.append(cache.counters.misses - before)
    return Replay("reference", slots, cache.counters, _distribution(misses))


def _check(trace: Trace, slots: int, warmup: int) -> None:
    if slots < 1:
        raise TraceError(f"a cache of {slots} slots holds no expert")
    if not 0 <= warmup < trace.num_steps:
        raise TraceError(f"a warm-up of {warmup} steps leaves nothing of a trace of {trace.num_steps} steps")


def _distribution(misses: list[int]) -> list[int]:
    count = Counter(misses)
    return [count[m] for m in range(max(count) + 1)]


def find_locality(
    num_layers: int,
    num_experts: int,
    top_k: int,
    share: float,
    miss_rate: float,
    steps: int = 400,
    seed: int = 0,
    split: Sequence[Split] | None = None,
) -> float:
    """The locality of `synthetic_trace` that gives LRU this miss rate when `share` of all experts have a slot.

    By default every miss is filled; a split that fills fewer misses less, since what is routed once stays out.
    Bisection to 0.001 over traces of `steps` steps, the first half of them warm-up. Raises TraceError where even
    uniform routes miss less, or routes of locality 4 more.
    """
    slots = round(share * num_layers * num_experts)

    def rate(locality: float) -> float:
        trace = synthetic_trace(num_layers, num_experts, top_k, steps, locality, seed)
        return replay(trace, slots, "lru", split, warmup=steps // 2).miss_rate

    low, high = 0.0, 4.0
    if not rate(high) <= miss_rate <= rate(low):
        raise TraceError(
            f"with {slots} slots of {num_layers * num_experts} experts, {rate(high):.1%} to {rate(low):.1%} of the "
            f"routes miss, never {miss_rate:.1%}"
        )
    while high - low > 0.001:
        middle = (low + high) / 2
        low, high = (middle, high) if rate(middle) > miss_rate else (low, middle)
    return round((low + high) / 2, 3)
