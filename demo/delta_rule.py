"""The gated delta rule on GPU: flash-linear-attention's Triton kernels, with one step of the backward pass in torch.

flash-linear-attention refuses its own kernel for that step (gradients of queries, keys and gates inside a chunk)
on Hopper GPUs with Triton 3.4 to 3.7.0, where the compiler gives wrong results. Documents must be a multiple of
CHUNK tokens long.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

from demo.data import CHUNK


def inner_gradients(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    do: Tensor,
    h: Tensor,
    dh: Tensor,
    w: Tensor,
    g: Tensor,
    dv: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, w and the log gate g within chunks.

    q, k [1, T, H, K]; v, do, dv [1, T, HV, V]; w [1, T, HV, K]; g [1, T, HV] is the running sum of log2 gates in
    each chunk; h and dh [1, T / CHUNK, HV, K, V] are each chunk's first state and the gradient of its last one.
    """
    heads, tokens = v.shape[2], v.shape[1]

    def chunks(t: Tensor) -> Tensor:
        t = t.repeat_interleave(heads // t.shape[2], 2) if t.shape[2] != heads else t
        return t.view(tokens // CHUNK, CHUNK, heads, -1).transpose(1, 2)

    qc, kc, vc, doc, dvc = (chunks(t) for t in (q, k, v, do, dv))
    hc, dhc = h[0].to(vc.dtype), dh[0].to(vc.dtype)
    gc = chunks(g[..., None]).squeeze(-1).float()
    last = gc[..., -1]
    dg_last = (hc.float() * dhc.float()).sum((-1, -2)) * torch.exp2(last)
    dq = (doc @ hc.mT).float() * torch.exp2(gc)[..., None] * scale
    dk = (vc @ dhc.mT).float() * torch.exp2(last[..., None] - gc)[..., None]
    dw = -(dvc.to(vc.dtype) @ hc.mT)
    dg_last = dg_last + (dk * kc.float()).sum((-1, -2))
    rows = torch.arange(CHUNK, device=q.device)
    gap = (gc[..., :, None] - gc[..., None, :]).masked_fill(rows[:, None] < rows, float("-inf"))
    ds = ((doc @ vc.mT).float() * torch.exp2(gap) * scale).to(kc.dtype)
    dq = dq + (ds @ kc).float()
    dk = dk + (ds.mT @ qc).float()
    dg = (dq * qc.float()).sum(-1) - (dk * kc.float()).sum(-1)
    dg = dg + dg_last[..., None] * (rows == CHUNK - 1)

    def flat(t: Tensor) -> Tensor:
        return t.transpose(1, 2).reshape(1, tokens, heads, -1)

    def grouped(t: Tensor) -> Tensor:
        return flat(t).view(1, tokens, q.shape[2], -1, t.shape[-1]).sum(3)

    return (
        grouped(dq).to(q.dtype),
        grouped(dk).to(k.dtype),
        flat(dw).to(w.dtype),
        flat(dg[..., None]).squeeze(-1),
    )


def chunk_delta_rule() -> Any:
    """flash-linear-attention's `chunk_gated_delta_rule`, with `inner_gradients` in its backward pass."""
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    compiled = torch.compile(inner_gradients)

    def step(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        do: Tensor,
        h: Tensor,
        dh: Tensor,
        w: Tensor,
        g: Tensor,
        dv: Tensor,
        scale: float,
        **_: Any,
    ) -> Any:
        return compiled(q, k, v, do, h, dh, w, g, dv, scale)

    sys.modules["fla.ops.gated_delta_rule.chunk"].chunk_bwd_dqkwg = step  # type: ignore[attr-defined]
    return chunk_gated_delta_rule


def largest_error(kernels: Any, reference: Any, device: str) -> float:
    """Largest relative error of output and gradients of the delta rule against a reference in float32."""
    torch.manual_seed(0)
    starts = torch.tensor([0, 64, 320, 512], dtype=torch.int32, device=device)
    shapes = [(512, 2, 64), (512, 2, 64), (512, 4, 64), (512, 4), (512, 4)]
    inputs = [torch.randn(s, device=device) for s in shapes]
    inputs[3], inputs[4] = -0.3 * inputs[3].sigmoid(), inputs[4].sigmoid()
    up = torch.randn(512, 4, 64, device=device)
    results = []
    for rule in (kernels.delta_rule, reference.delta_rule):
        leaves = [t.clone().requires_grad_() for t in inputs]
        out = rule(*leaves, starts)
        results.append([out, *torch.autograd.grad((out.float() * up).sum(), leaves)])
    return max(float((a.float() - b).norm() / b.norm()) for a, b in zip(*results, strict=True))
