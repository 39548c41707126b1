"""States that belong to a request until they go into the tree, and the slots that they live in.

A slot is one index of SGLang's pool of recurrent states, as an int64 tensor [1] on the pool's device: its number is
never asked for, which would wait for a GPU.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from sglang.srt.mem_cache.base_prefix_cache import EvictParams

from sglang_ft.anchors.rules import Anchor, Kind


class Pass:
    """What a forward pass was asked to store; `done` once its layers, or the copy after it, have been told to."""

    done = False


class Held(NamedTuple):
    """The state after the first `position` tokens of its request."""

    position: int
    slot: torch.Tensor
    kind: Kind
    source: Pass | None = None  # whose pass stores it; None: it is there


class Step(NamedTuple):
    """A decode step that the host has not processed yet."""

    slot: torch.Tensor | None
    source: Pass


@dataclass
class Kept:
    """What anchors know of one request."""

    anchors: list[Anchor] = field(default_factory=list)
    held: list[Held] = field(default_factory=list)
    maybe: list[Held] = field(default_factory=list)  # sampled tokens may yet become a marker
    main: Held | None = None  # what the tree is given as the request's state in the caching at hand
    spare: list[torch.Tensor | None] = field(default_factory=list)  # targets of decode steps, taken in turn
    steps: deque[Step] = field(default_factory=deque)
    launched: int = 0
    length: int = 0  # tokens of the prompt that the anchors are of


def kept_of(req: Any) -> Kept | None:
    return getattr(req, "ft_kept", None)


class StatePool:
    """Slots for held states: at most `budget` at once, so that running requests always find theirs."""

    def __init__(self, cache: Any, budget: int) -> None:
        self.cache = cache
        self.budget = budget
        self.outstanding = 0

    @property
    def _allocator(self) -> Any:
        return self.cache.req_to_token_pool.mamba_allocator

    def take(self, count: int) -> list[torch.Tensor]:
        """Up to `count` slots; makes room in the tree for them."""
        count = min(count, self.budget - self.outstanding)
        if count <= 0:
            return []
        short = count - self._allocator.available_size()
        if short > 0:
            self.cache.evict(EvictParams(num_tokens=0, mamba_num=short))
            count = min(count, self._allocator.available_size())
        slots = self._allocator.alloc(count) if count else None
        if slots is None:
            return []
        self.outstanding += count
        return list(slots.split(1))

    def handed_over(self) -> None:
        """A held state became the tree's."""
        self.outstanding -= 1

    def give_back(self, slot: torch.Tensor) -> None:
        self.outstanding -= 1
        self._allocator.free(slot)

    def release(self, kept: Kept) -> None:
        """Everything that a request still holds."""
        slots = [h.slot for h in (*kept.held, *kept.maybe)] + [s for s in kept.spare if s is not None]
        if kept.main is not None:
            slots.append(kept.main.slot)
        for slot in slots:
            self.give_back(slot)
        kept.held, kept.maybe, kept.spare, kept.main = [], [], [], None
        kept.steps.clear()


def finite(pool: Any, slot: torch.Tensor) -> bool:
    """Whether a state holds neither NaN nor infinity: both survive in a sum. Waits for a GPU."""
    states = [pool.mamba_cache.temporal, *pool.mamba_cache.conv]
    sums = torch.stack([s[:, slot].sum(dtype=torch.float32) for s in states if s.numel()])
    return bool(sums.isfinite().all())
