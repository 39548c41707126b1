"""Gated norms and the splitting of fused projections."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / rms(x) * weight over the last dimension, float32."""
    x = x.float()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.float()


def gated_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    gate: torch.Tensor | None,
    eps: float,
    group_size: int | None,
    norm_before_gate: bool,
    subtract_mean: bool,
    sigmoid_gate: bool,
) -> torch.Tensor:
    """Layer norm or RMS norm over groups of the last dimension, times silu(gate) or sigmoid(gate) after or before.

    Returns a tensor of x's shape and dtype.
    """
    y = x.float()
    factor = None if gate is None else (gate.float().sigmoid() if sigmoid_gate else F.silu(gate.float()))
    if factor is not None and not norm_before_gate:
        y = y * factor
    groups = y.unflatten(-1, (-1, group_size or y.shape[-1]))
    if subtract_mean:
        groups = groups - groups.mean(-1, keepdim=True)
    groups = groups * torch.rsqrt(groups.square().mean(-1, keepdim=True) + eps)
    y = groups.flatten(-2) * weight.float()
    if bias is not None:
        y = y + bias.float()
    if factor is not None and norm_before_gate:
        y = y * factor
    return y.to(x.dtype)


def split_by_head(
    qkvz: torch.Tensor, ba: torch.Tensor, k_heads: int, v_heads: int, k_dim: int, v_dim: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Takes apart projections that are interleaved by key head (Qwen3-Next).

    Each key head holds q, k, then v and z of its value heads; in `ba` b, then a of its value heads.

    Returns: qkv [T, all q | all k | all v], z [T, Hv, V], b [T, Hv], a [T, Hv].
    """
    tokens, ratio = qkvz.shape[0], v_heads // k_heads
    q, k, v, z = qkvz.view(tokens, k_heads, -1).split([k_dim, k_dim, ratio * v_dim, ratio * v_dim], dim=2)
    b, a = ba.view(tokens, k_heads, -1).split([ratio, ratio], dim=2)
    qkv = torch.cat([q.flatten(1), k.flatten(1), v.flatten(1)], dim=1)
    return qkv, z.reshape(tokens, v_heads, v_dim), b.flatten(1), a.flatten(1)


def split_in_blocks(
    qkvz: torch.Tensor, ba: torch.Tensor, k_heads: int, v_heads: int, k_dim: int, v_dim: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Takes apart projections that hold all q, all k, all v, all z and all b, all a (Qwen3.5). Returns as above."""
    qkv, z = qkvz.split([2 * k_heads * k_dim + v_heads * v_dim, v_heads * v_dim], dim=1)
    b, a = ba.chunk(2, dim=1)
    return qkv.contiguous(), z.reshape(-1, v_heads, v_dim), b.contiguous(), a.contiguous()
