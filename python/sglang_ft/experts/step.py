"""One cache step of one MoE layer, in plain Python: the oracle of the plan kernel.

A step takes the routes of one layer and decides, for each routed expert, whether it is a hit (in a slot already), a
fill (copied into a slot now) or part of the job (run by the cpu_worker), and which slots the fills take. The kernel
(sgl-ft-kernel/include/sgl_ft_kernel/plan.h) must agree in every slot, victim, order and counter.

Rules
- Experts of a step are taken in ascending expert order; a row that is routed twice to one expert counts twice.
- `split[m]` says for m misses how many are filled. While slots are free, everything that fits them is filled. No
  step evicts a slot that it uses itself, so never more fills than slots that are not hit.
- Filled first: experts with more rows, then those routed more recently (a hit or not), then the lower expert id.
- Slots are taken free ones first, then the least recently used; the lower slot on a tie. The first fill gets the
  first slot.
- A transient step (part of a short prompt) keeps the cache as it is: what it fills into a slot that it had to empty is
  older than all else, so that the next step takes that slot again. Free slots it fills for good.
- The last fill may be shared: the link carries its first `features` intermediate features in time, the worker
  computes the others, and the rest of its weights follows later. A shared expert is in the job and in a slot.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

NONE = 0xFFFFFFFF
_MASK = 0xFFFFFFFF
TRANSIENT_AGE = 0x80000000
"""Age of a transient fill in its own step; nothing else grows so old."""
FEATURE_STEP = 64
"""A shared expert is cut at a multiple of so many intermediate features."""


class Split(NamedTuple):
    """What is done with m misses: `fills` of them take the link.

    `features`: of the last fill, how many intermediate features are computed on the GPU in this step; 0: all.
    """

    fills: int
    features: int = 0


@dataclass
class Counters:
    """Sums over steps. Experts are counted once a step, however many rows they have."""

    steps: int = 0
    hits: int = 0
    misses: int = 0
    fills: int = 0
    evictions: int = 0
    jobs: int = 0
    job_experts: int = 0
    shared: int = 0


class Fill(NamedTuple):
    expert: int
    slot: int


@dataclass
class StepPlan:
    """What one step does. Experts are local to the layer, in the order in which the kernel lists them.

    `slots` [T, k]: the slot of each route, -1 for one that the worker runs or that is not ours; the shared expert has
    its slot here. `job_routes` [T, k]: local expert of each route that the worker runs, else -1.
    """

    hits: list[Fill]
    fills: list[Fill]
    job: list[int]
    features: int
    slots: torch.Tensor
    job_routes: torch.Tensor


@dataclass
class StepCache:
    """State of the expert cache: which expert lies in which slot, and when it was last used.

    `num_experts` counts the experts of all layers; an expert id is `first_expert_id + local expert`.
    """

    num_experts: int
    live_slots: int
    step_number: int = 0
    counters: Counters = field(default_factory=Counters)

    def __post_init__(self) -> None:
        self.slot_of = [NONE] * self.num_experts
        self.seen = [0] * self.num_experts
        self.expert_of = [NONE] * self.live_slots
        self.used = [0] * self.live_slots

    def step(
        self,
        routes: torch.Tensor,
        first_expert_id: int,
        num_experts: int,
        split: Sequence[Split],
        rows: int | None = None,
        cacheable: bool = True,
        transient: bool = False,
    ) -> StepPlan:
        """Decides one step and updates the state.

        routes [T, k]: local experts, anything outside 0 .. num_experts - 1 is no route. `split` is indexed by the
        number of misses; its last entry stands for all beyond. Rows from `rows` on are padding. The experts of a layer
        that is not `cacheable` (the link cannot reach them) all go to the job.
        """
        ours = (routes >= 0) & (routes < num_experts)
        if rows is not None:
            ours[rows:] = False
        count = Counter(routes[ours].tolist())
        self.step_number = (self.step_number + 1) & _MASK
        hits, misses = [], []
        for expert in sorted(count):
            slot = self.slot_of[first_expert_id + expert]
            if slot == NONE:
                misses.append(expert)
            else:
                hits.append(Fill(expert, slot))
        chosen = self._split(split, len(misses), len(hits)) if cacheable else Split(0)

        def recency(expert: int) -> tuple[int, int, int]:
            return -count[expert], self._age(self.seen[first_expert_id + expert]), expert

        ranked = sorted(misses, key=recency)
        for expert in count:
            self.seen[first_expert_id + expert] = self.step_number
        for hit in hits:
            self.used[hit.slot] = self.step_number
        fills = self._fill(ranked[: chosen.fills], first_expert_id, transient)
        shared = [ranked[chosen.fills - 1]] if chosen.features else []
        job = sorted(ranked[chosen.fills :] + shared)
        self._count(len(hits), len(misses), len(fills), len(job), len(shared))
        slots = dict([*hits, *fills])
        return StepPlan(
            hits=hits,
            fills=fills,
            job=job,
            features=chosen.features,
            slots=_map(routes, ours, slots),
            job_routes=_map(routes, ours, {expert: expert for expert in job}),
        )

    def reset(self) -> None:
        """Forgets everything that is in the slots, as after a warm-up."""
        self.__post_init__()
        self.step_number = 0
        self.counters = Counters()

    def _split(self, split: Sequence[Split], misses: int, hits: int) -> Split:
        wanted = split[min(misses, len(split) - 1)]
        free = sum(expert == NONE for expert in self.expert_of)
        fills = min(max(wanted.fills, min(misses, free)), misses, self.live_slots - hits)
        return wanted if fills == wanted.fills and fills > 0 else Split(fills)

    def _age(self, stamp: int) -> int:
        return (self.step_number - stamp) & _MASK

    def _fill(self, experts: list[int], first_expert_id: int, transient: bool) -> list[Fill]:
        def order(slot: int) -> tuple[int, int]:
            return -(NONE if self.expert_of[slot] == NONE else self._age(self.used[slot])), slot

        victims = sorted(range(self.live_slots), key=order)[: len(experts)]
        fills = []
        for expert, slot in zip(experts, victims, strict=True):
            self.used[slot] = self.step_number
            if self.expert_of[slot] != NONE:
                self.slot_of[self.expert_of[slot]] = NONE
                self.counters.evictions += 1
                if transient:
                    self.used[slot] = (self.step_number - TRANSIENT_AGE) & _MASK
            self.expert_of[slot] = first_expert_id + expert
            self.slot_of[first_expert_id + expert] = slot
            fills.append(Fill(expert, slot))
        return fills

    def _count(self, hits: int, misses: int, fills: int, job: int, shared: int) -> None:
        c = self.counters
        c.steps += 1
        c.hits += hits
        c.misses += misses
        c.fills += fills
        c.jobs += job > 0
        c.job_experts += job
        c.shared += shared


def _map(routes: torch.Tensor, ours: torch.Tensor, values: dict[int, int]) -> torch.Tensor:
    flat = [
        values.get(route, -1) if mine else -1
        for route, mine in zip(routes.flatten().tolist(), ours.flatten().tolist(), strict=True)
    ]
    return torch.tensor(flat, dtype=torch.int32).view(routes.shape)
