"""States at markers that the model samples.

After each decode step the live state of a request covers all tokens but the one just sampled. When that token begins
a marker, the state before the marker is wanted: a copy is made right after sampling, on the device and only for such
requests, into a slot that waits for it. The host learns the token later and then takes the slot; with overlap
scheduling one more step is under way by then, so that steps use two slots in turn.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch

from sglang_ft.anchors.rules import AnchorRules, Kind
from sglang_ft.engine.anchors.held import Held, Kept, Pass, StatePool, Step, kept_of

MOST_HELD = 16  # states of one answer; then the oldest goes
_NOWHERE = 0  # SGLang's slot for writes that nobody reads


@dataclass
class DecodePlan(Pass):
    """Where the states of one decode step go, int64 [B]; nowhere for requests without a slot."""

    slots: torch.Tensor


class DecodeAnchors:
    """Slots of decode steps, and what becomes of them."""

    def __init__(
        self, rules: AnchorRules, ends: Collection[int], pool: StatePool, overlap: bool, device: Any
    ) -> None:
        """`ends`: tokens that end an answer."""
        self.rules = rules
        self.ends = frozenset(ends)
        self.pool = pool
        self.depth = 2 if overlap else 1
        self._first = frozenset(rules.first_ids.tolist()) | self.ends
        self.first_ids = torch.tensor(sorted(self._first), dtype=torch.int64, device=device)
        self._nowhere = torch.full((1,), _NOWHERE, dtype=torch.int64, device=device)

    def plan(self, batch: Any) -> DecodePlan | None:
        """Targets of the step that is about to run."""
        kept = [kept_of(req) for req in batch.reqs]
        slots = [None if k is None else self._next(k) for k in kept]
        if all(slot is None for slot in slots):
            return None
        plan = DecodePlan(torch.cat([self._nowhere if slot is None else slot for slot in slots]).long())
        for k, slot in zip(kept, slots, strict=True):
            if k is not None:
                k.steps.append(Step(slot, plan))
        return plan

    def _next(self, kept: Kept) -> torch.Tensor | None:
        if not kept.spare:
            kept.spare = [None] * self.depth
        turn = kept.launched % self.depth
        kept.launched += 1
        if kept.spare[turn] is None:
            kept.spare[turn] = next(iter(self.pool.take(1)), None)
        return kept.spare[turn]

    def processed(self, req: Any) -> None:
        """The host knows what a step sampled: the last of the request's output ids."""
        kept = kept_of(req)
        if kept is None or not kept.steps:
            return
        slot, source = kept.steps.popleft()
        if slot is not None and source.done and req.output_ids[-1] in self._first:
            # The state lacks the token just sampled.
            position = len(req.origin_input_ids) + len(req.output_ids) - 1
            kept.maybe.append(Held(position, slot, Kind.OTHER))
            kept.spare = [None if s is slot else s for s in kept.spare]
        self._settle(kept, req)

    def _settle(self, kept: Kept, req: Any) -> None:
        """Keeps states before tokens that have become a marker, drops those that cannot any more."""
        waiting = []
        for held in kept.maybe:
            since = tuple(req.output_ids[held.position - len(req.origin_input_ids) :])
            kind = self._kind(since)
            if kind is not None:
                kept.held.append(held._replace(kind=kind))
            elif any(m.ids[: len(since)] == since for m in self.rules.markers):
                waiting.append(held)
            else:
                self.pool.give_back(held.slot)
        kept.maybe = waiting
        sampled = [h for h in kept.held if h.position >= len(req.origin_input_ids)]
        for held in sampled[: max(0, len(sampled) - MOST_HELD)]:
            kept.held.remove(held)
            self.pool.give_back(held.slot)

    def _kind(self, ids: tuple[int, ...]) -> Kind | None:
        if len(ids) == 1 and ids[0] in self.ends:
            return Kind.ASSISTANT
        return next((m.kind for m in self.rules.markers if m.ids == ids), None)
