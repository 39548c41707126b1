"""Which experts stay when the cache gets fewer slots: the ones used last, moved out of the slots that go."""

from __future__ import annotations

from dataclasses import dataclass

import torch

NONE = -1
_MASK = 0xFFFFFFFF


@dataclass(frozen=True)
class Compaction:
    """The tables of a smaller cache, and the copies that make its slots hold what they say.

    `moves`: (from, to) slots; no slot is in it twice, so they may run in any order. `kept`: experts that stay.
    """

    moves: list[tuple[int, int]]
    slot_of: torch.Tensor
    expert_of: torch.Tensor
    used: torch.Tensor
    kept: int


def keep_latest(
    slot_of: torch.Tensor, expert_of: torch.Tensor, used: torch.Tensor, step: int, live: int, wanted: int
) -> Compaction:
    """Keeps the experts used last in the first `wanted` of `live` slots; those that lie there stay where they are.

    int32 on the host: slot_of [experts], expert_of and used [slots], -1 for none. The lower slot goes first among
    experts that were used in the same step.
    """
    slot_of, expert_of, used = slot_of.clone(), expert_of.clone(), used.clone()
    occupied = torch.nonzero(expert_of[:live] != NONE).flatten()
    age = (step - used[occupied].long()) & _MASK
    latest = occupied[torch.sort(age, stable=True).indices]
    stay, go = latest[:wanted], latest[wanted:]
    slot_of[expert_of[go].long()] = NONE
    expert_of[go], used[go] = NONE, 0
    movers = stay[stay >= wanted].sort().values
    places = torch.nonzero(expert_of[:wanted] == NONE).flatten()[: len(movers)]
    slot_of[expert_of[movers].long()] = places.int()
    expert_of[places], used[places] = expert_of[movers], used[movers]
    expert_of[movers], used[movers] = NONE, 0
    moves = list(zip(movers.tolist(), places.tolist(), strict=True))
    return Compaction(moves, slot_of, expert_of, used, len(stay))
