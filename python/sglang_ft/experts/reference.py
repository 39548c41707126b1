"""The readable reference of one MoE layer: plain PyTorch, any precision, no cleverness.

It is the oracle of the tests of every format and instruction set.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F

from sglang_ft.worker.protocol import Activation, Role

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sglang_ft.experts.formats import LayerSpec


class SharedExpert(NamedTuple):
    """The worker computes intermediate features [begin, I) of local expert `expert`, a GPU the others."""

    expert: int
    begin: int


def activate(up_out: torch.Tensor, layer: LayerSpec) -> torch.Tensor:
    """[n, up_rows] -> [n, I]: the activation of ring.h's ft_activation."""
    if not layer.gated:
        return _act(up_out, layer)
    if layer.interleaved:
        gate, up = up_out[:, 0::2], up_out[:, 1::2]
    else:
        gate, up = up_out.chunk(2, dim=1)
    if layer.act_limit > 0:
        gate, up = gate.clamp(max=layer.act_limit), up.clamp(-layer.act_limit, layer.act_limit)
    if layer.activation is Activation.SWIGLU_OAI:
        return gate * torch.sigmoid(layer.act_alpha * gate) * (up + 1)
    return _act(gate, layer) * up


def _act(x: torch.Tensor, layer: LayerSpec) -> torch.Tensor:
    match layer.activation:
        case Activation.SILU:
            return F.silu(x)
        case Activation.GELU:
            return F.gelu(x)
        case Activation.GELU_TANH:
            return F.gelu(x, approximate="tanh")
        case Activation.RELU2:
            return F.relu(x).square()
    raise ValueError(f"{layer.activation!r} needs a gate")


def moe_layer(
    rows: torch.Tensor,
    expert_ids: torch.Tensor,
    router_weights: torch.Tensor,
    layer: LayerSpec,
    banks: Mapping[Role, torch.Tensor],
    dtype: torch.dtype = torch.float64,
    shared: SharedExpert | None = None,
) -> torch.Tensor:
    """Every routed expert of every row, summed with the router's weights, computed in `dtype`.

    rows [T, H]; expert_ids [T, k], -1 for a route that is not ours; router_weights [T, k]. Returns [T, H].
    `shared`: the expert that a GPU computes in part; the result is the worker's part, without its down bias.
    """
    x = rows.to(dtype)
    out = torch.zeros(rows.shape[0], layer.hidden, dtype=dtype)
    for expert in expert_ids[expert_ids >= 0].unique().tolist():
        row, slot = (expert_ids == expert).nonzero(as_tuple=True)
        weight = router_weights[row, slot].to(dtype).unsqueeze(1)
        value = x[row] * weight if layer.weight_on_input else x[row]
        value = value @ layer.format.weight(banks, Role.GATE_UP, expert, dtype).T
        if layer.bias:
            value = value + banks[Role.GATE_UP_BIAS][expert].to(dtype)
        begin = shared.begin if shared and shared.expert == expert else 0
        h = activate(value, layer)[:, begin:]
        value = h @ layer.format.weight(banks, Role.DOWN, expert, dtype)[:, begin:].T
        if layer.bias and not (shared and shared.expert == expert):
            value = value + banks[Role.DOWN_BIAS][expert].to(dtype)
        out.index_add_(0, row, value if layer.weight_on_input else value * weight)
    return out * layer.output_scale
