"""The seam of weight formats: everything that depends on how an expert's weights are stored.

`LayerSpec` describes one MoE layer. `ExpertFormat` says which banks it needs, under which parameter names
a model layer holds them, and how to read them in the reference.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

from sglang_ft.worker.protocol import Activation, Format, Role

if TYPE_CHECKING:
    from collections.abc import Mapping


class RoleSpec(NamedTuple):
    """What one expert holds in one role."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class LayerSpec:
    """One MoE layer as the worker and the reference see it.

    `num_experts`, `hidden` and `intermediate` are element counts. `act_limit` 0 means no clamp. `output_scale` is
    the routed scaling factor that we apply ourselves; 1 when the model applies it.
    """

    format: ExpertFormat
    num_experts: int
    hidden: int
    intermediate: int
    activation: Activation = Activation.SILU
    gated: bool = True
    interleaved: bool = False
    bias: bool = False
    weight_on_input: bool = False
    output_scale: float = 1.0
    act_alpha: float = 0.0
    act_limit: float = 0.0

    @property
    def up_rows(self) -> int:
        """Output features of the first projection."""
        return self.intermediate * (2 if self.gated else 1)

    @property
    def expert_bytes(self) -> int:
        """Bytes of one complete expert, all roles."""
        return sum(role.nbytes for role in self.format.roles(self).values())


class ExpertFormat(ABC):
    """How the weights of one expert are stored. Stateless."""

    name: str
    wire: Format
    parameters: Mapping[Role, str]
    """Name of the fused MoE layer's parameter for each role."""

    @abstractmethod
    def matches(self, quantization: str | None, dtype: str) -> bool:
        """Whether experts with this quantization method and torch dtype name ('bfloat16', ...) are of this format."""

    @abstractmethod
    def roles(self, layer: LayerSpec) -> dict[Role, RoleSpec]:
        """Shape and dtype of one expert in each role that the layer has."""

    @abstractmethod
    def weight(
        self, banks: Mapping[Role, torch.Tensor], role: Role, expert: int, dtype: torch.dtype
    ) -> torch.Tensor:
        """The true weights of `expert` in `role`, [out, in], as `dtype`. For the reference."""


class DenseFormat(ExpertFormat):
    """Plain weights of one floating point dtype; biases are float32."""

    dtype: torch.dtype
    parameters = {
        Role.GATE_UP: "w13_weight",
        Role.DOWN: "w2_weight",
        Role.GATE_UP_BIAS: "w13_weight_bias",
        Role.DOWN_BIAS: "w2_weight_bias",
    }

    def matches(self, quantization: str | None, dtype: str) -> bool:
        return quantization is None and dtype == str(self.dtype).removeprefix("torch.")

    def roles(self, layer: LayerSpec) -> dict[Role, RoleSpec]:
        roles = {
            Role.GATE_UP: RoleSpec((layer.up_rows, layer.hidden), self.dtype),
            Role.DOWN: RoleSpec((layer.hidden, layer.intermediate), self.dtype),
        }
        if layer.bias:
            roles[Role.GATE_UP_BIAS] = RoleSpec((layer.up_rows,), torch.float32)
            roles[Role.DOWN_BIAS] = RoleSpec((layer.hidden,), torch.float32)
        return roles

    def weight(
        self, banks: Mapping[Role, torch.Tensor], role: Role, expert: int, dtype: torch.dtype
    ) -> torch.Tensor:
        return banks[role][expert].to(dtype)
