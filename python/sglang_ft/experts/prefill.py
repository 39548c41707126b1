"""Long prompts on the GPU when the experts do not fit: all of them pass through two buffers, group by group.

The buffers are the last slots of the cache, borrowed from the first long prompt on until only decode steps are left.
A group is a layer's experts, or a part of them where memory is short. What lies in a slot comes from there, the rest
over the link, one group ahead of the work: so a chunk takes as long as the link needs for the experts that are not
cached, or as its computing does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

if TYPE_CHECKING:
    from sglang_ft.experts.decode import ExpertCache
    from sglang_ft.worker.protocol import Role

_STALE_STEPS = 64
"""After so many decode steps since it was asked what is cached, enough has changed to ask again."""
_KEPT_AT_ONCE = 8
"""Experts that are copied through memory of their own."""


class Lanes(Protocol):
    """Two queues of work on the device: `main`, the current stream, and one for copies."""

    def event(self) -> Any:
        """Something to record in a queue and to wait for in the other; waiting before that waits for nothing."""

    def record(self, event: Any, copies: bool) -> None: ...

    def wait(self, event: Any, copies: bool) -> None: ...

    def copy(self, cache: Any, copies: Sequence[tuple[int, int, int]]) -> None:
        """Enqueues ExpertCache.copy behind the copies before."""


class CudaLanes:
    """The current stream and a stream of its own."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)

    def _of(self, copies: bool) -> torch.cuda.Stream:
        return self._stream if copies else torch.cuda.current_stream()

    def event(self) -> torch.cuda.Event:
        return torch.cuda.Event()

    def record(self, event: torch.cuda.Event, copies: bool) -> None:
        event.record(self._of(copies))

    def wait(self, event: torch.cuda.Event, copies: bool) -> None:
        self._of(copies).wait_event(event)

    def copy(self, cache: ExpertCache, copies: Sequence[tuple[int, int, int]]) -> None:
        cache.copy(copies, self._stream)


@dataclass(frozen=True)
class Group:
    """Experts [first, first + count) of a layer, that are together in a buffer: [count, ...] a role."""

    first: int
    count: int
    experts: dict[Role, torch.Tensor]


@dataclass
class _Unit:
    """What brings one group into a buffer: local experts over the link, and those in slots (on the device)."""

    layer: int
    first: int
    count: int
    missing: list[int]
    present: torch.Tensor


class ExpertStream:
    """Brings the experts of one layer after the other, the next while the one before computes."""

    def __init__(self, cache: ExpertCache, group: int, lanes: Lanes) -> None:
        """`group`: experts of a buffer at most. Layers that the link does not reach are left out."""
        self._cache, self._lanes = cache, lanes
        self.group = group
        self._experts = cache.spec.num_experts
        self._slots = cache.live
        self.active = False
        """Whether the buffers are borrowed."""
        self.ahead = True
        """False copies a group only when it is its turn: what the buffers gain, for measurements."""
        self.bytes = 0
        """Copied over the link so far, as far as known when it was asked what is cached."""
        self._views = [cache.slot_views(self._slots - (2 - side) * group, group) for side in range(2)]
        self._copied, self._free = ([lanes.event() for _ in range(2)] for _ in range(2))
        self._holds: list[int | None] = [None, None]
        self._turn = 0
        self._order = [
            (layer, first)
            for layer in range(len(cache.layers))
            if not cache.layers[layer].uncached
            for first in range(0, self._experts, group)
        ]
        self._place = {unit: i for i, unit in enumerate(self._order)}
        self._units: list[_Unit] = []
        self._decoded = 0
        self._next_free, self._each = 0, 0

    def begin(self) -> None:
        """A pass of many rows follows: borrows the buffers and starts to copy. Waits for the device now and then."""
        if not self.active:
            self._cache.shrink(self._slots - 2 * self.group)
            self._units = []
            self.active = True
        if not self._units or self._decoded > _STALE_STEPS:
            self._look()
        if self.ahead:
            self._fetch(0)

    def decoded(self) -> None:
        """A decode step was launched in between."""
        self._decoded += 1
        self._each = 0  # it fills free slots itself

    def end(self) -> None:
        """Only decode steps follow: gives the buffers back."""
        for event in self._copied:
            self._lanes.wait(event, copies=False)
        self._cache.grow(self._slots)
        self.active = False

    def firsts(self) -> range:
        """First expert of each group of a layer."""
        return range(0, self._experts, self.group)

    def acquire(self, layer: int, first: int) -> Group:
        """A group, ready for work enqueued on the current stream from now on."""
        place = self._place[layer, first]
        side = self._fetch(place)
        self._lanes.wait(self._copied[side], copies=False)
        unit = self._units[place]
        if len(unit.present):
            self._cache.gather(layer, unit.present, first, self._slots - (2 - side) * self.group)
        views = self._views[side]
        if unit.count < self.group:
            views = {role: view[: unit.count] for role, view in views.items()}
        return Group(first, unit.count, views)

    def release(self, layer: int, group: Group, routes: torch.Tensor, more: bool) -> None:
        """To be called once the work on a group is enqueued; starts the copies of the one after next.

        `routes` [T, k]: local experts of the layer, to see which are worth a free slot; `more`: another pass of many
        rows follows this one, so the first group may be copied after the last.
        """
        place = self._place[layer, group.first]
        side = self._holds.index(place)
        if count := min(self._each, group.count):
            self._keep(layer, group, routes, self._next_free, count)
            self._next_free += count
        self._lanes.record(self._free[side], copies=False)
        last = place + 1 == len(self._order)
        if last:
            self._each = 0  # one pass fills them
        if self.ahead and (more or not last):
            self._fetch(0 if last else place + 1)

    def _fetch(self, place: int) -> int:
        """Enqueues the copies of a group unless that was done; the side it goes to."""
        if place in self._holds:
            return self._holds.index(place)
        side, self._turn = self._turn, 1 - self._turn
        self._holds[side] = place
        unit = self._units[place]
        self._lanes.wait(self._free[side], copies=True)
        to = self._slots - (2 - side) * self.group
        self._lanes.copy(self._cache, self._cache.fetch(unit.layer, unit.missing, unit.first, to))
        self._lanes.record(self._copied[side], copies=True)
        self.bytes += len(unit.missing) * self._cache.spec.expert_bytes
        return side

    def _look(self) -> None:
        """Asks the device what is in slots, and lists what each group takes from where."""
        tables = self._cache.state.tables()
        present: list[list[int]] = []
        units: list[_Unit] = []
        slot_of = tables.slot_of.tolist()
        nothing = torch.empty(0, dtype=torch.int32)
        for layer, first in self._order:
            count = min(self.group, self._experts - first)
            base = self._cache.layers[layer].first_expert_id
            here = [e for e in range(first, first + count) if slot_of[base + e] >= 0]
            missing = sorted(set(range(first, first + count)) - set(here))
            units.append(_Unit(layer, first, count, missing, nothing))
            present.append(here)
        flat = torch.tensor([e for here in present for e in here], dtype=torch.int32)
        there = flat.to(self._cache.device)
        for unit, part in zip(units, there.split([len(here) for here in present]), strict=True):
            unit.present = part
        self._units = units
        self._holds = [None, None]  # what was copied in advance went by the old lists
        self._decoded = 0
        self._plan_keeping(tables.expert_of[: tables.live] >= 0, len(flat))

    def _plan_keeping(self, occupied: torch.Tensor, cached: int) -> None:
        """While the cache is cold, each group leaves the experts with the most rows in the free slots."""
        count = int(occupied.sum())
        in_line = bool(occupied[:count].all())  # the free ones are the last: nothing was evicted yet
        self._next_free = count
        self._each = (len(occupied) - count) // len(self._order) if in_line and not cached else 0

    def _keep(self, layer: int, group: Group, routes: torch.Tensor, slot: int, count: int) -> None:
        """Enqueues copies of the `count` experts of a group with the most rows into the empty slots from `slot` on."""
        local = routes.flatten().long() - group.first
        local = torch.where((local >= 0) & (local < group.count), local, group.count)
        rows = torch.zeros(group.count + 1, dtype=torch.int32, device=routes.device)
        rows.scatter_add_(0, local, torch.ones_like(local, dtype=torch.int32))
        chosen = rows[: group.count].topk(count).indices
        for role, kept in self._cache.slot_views(slot, count).items():
            for to, which in zip(kept.split(_KEPT_AT_ONCE), chosen.split(_KEPT_AT_ONCE), strict=True):
                to.copy_(group.experts[role][which])
        base = self._cache.layers[layer].first_expert_id + group.first
        self._cache.state.take_slots(slot, base + chosen)
