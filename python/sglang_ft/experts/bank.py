"""Banks: host memory of all experts, one bank a weight role of a layer group, leading dimension = expert.

`plan_banks` decides offsets (pure); `ExpertPool` owns the memory file. The pool is the only copy of the
experts: the loader writes into its views, the worker maps it read-only.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from sglang_ft.experts.formats import LayerSpec
from sglang_ft.worker.memory import MemoryFile
from sglang_ft.worker.protocol import Role

BANK_ALIGN = 2 << 20
"""Banks start on a 2 MiB border: huge pages, and O_DIRECT, which needs 4 KiB."""


@dataclass(frozen=True)
class RoleView:
    """Where the experts of one layer lie in one role: expert e starts at offset + e * stride bytes."""

    offset: int
    stride: int
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class LayerBanks:
    """One layer's part of its group's banks."""

    spec: LayerSpec
    first_expert_id: int
    roles: dict[Role, RoleView]


@dataclass(frozen=True)
class BankPlan:
    """Offsets of every layer and the size of the pool in bytes."""

    layers: tuple[LayerBanks, ...]
    nbytes: int


def plan_banks(specs: list[LayerSpec]) -> BankPlan:
    """Lays out the banks of `specs` (one a MoE layer, in model order).

    Layers of equal format and shape form a group; a group has one bank a role, so that an expert's row in
    a bank is the same in all of the group's banks.
    """
    groups: dict[tuple, list[int]] = {}
    for index, spec in enumerate(specs):
        roles = spec.format.roles(spec)
        key = (spec.format.name, spec.num_experts, *roles.items())
        groups.setdefault(key, []).append(index)

    views: list[dict[Role, RoleView]] = [{} for _ in specs]
    offset = 0
    for members in groups.values():
        spec = specs[members[0]]
        for role, one in spec.format.roles(spec).items():
            for position, index in enumerate(members):
                start = offset + position * spec.num_experts * one.nbytes
                views[index][role] = RoleView(start, one.nbytes, (spec.num_experts, *one.shape), one.dtype)
            end = offset + len(members) * spec.num_experts * one.nbytes
            offset = math.ceil(end / BANK_ALIGN) * BANK_ALIGN

    layers = []
    expert_id = 0
    for spec, view in zip(specs, views, strict=True):
        layers.append(LayerBanks(spec, expert_id, view))
        expert_id += spec.num_experts
    return BankPlan(tuple(layers), offset)


class ExpertPool:
    """The memory file that holds all banks of a plan."""

    def __init__(self, plan: BankPlan, file: MemoryFile | None = None) -> None:
        """`file` (at least plan.nbytes long) instead of fresh memory."""
        self.plan = plan
        self.file = file or MemoryFile("sglang-ft-pool", max(plan.nbytes, BANK_ALIGN))

    def bank(self, layer: int, role: Role) -> torch.Tensor:
        """The experts of `layer` in `role`, [E, ...], sharing the pool's memory."""
        view = self.plan.layers[layer].roles[role]
        return self.file.view(view.offset, view.shape, view.dtype)

    def banks(self, layer: int) -> dict[Role, torch.Tensor]:
        """All roles of `layer`."""
        return {role: self.bank(layer, role) for role in self.plan.layers[layer].roles}

    def seal(self) -> None:
        """To be called once every expert is in place; nobody can map the pool writable afterwards."""
        self.file.seal_writes()
