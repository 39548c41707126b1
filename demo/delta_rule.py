"""The gated delta rule over packed documents, in chunks of CHUNK tokens, from matrix products alone.

It computes what transformers' `torch_chunk_gated_delta_rule` does, for all chunks at once: only the states between
chunks go step by step, each step over all documents that are long enough. Documents are a multiple of CHUNK long.
(flash-linear-attention 0.6 refuses its own backward kernel on Hopper GPUs with Triton 3.4 to 3.7.0.)
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from demo.data import CHUNK


class ChunkOrder(NamedTuple):
    """All chunks, sorted by their place in the document: first chunks, then second ones, and so on.

    `index` int64 [chunks]; `counts[j]` documents have more than j chunks, longest document first in each group.
    """

    index: Tensor
    counts: tuple[int, ...]


def chunk_order(starts: np.ndarray, device: str) -> ChunkOrder:
    """The order for documents that begin at `starts` [D + 1] (tokens)."""
    first = starts[:-1] // CHUNK
    sizes = np.diff(starts) // CHUNK
    by_size = np.argsort(-sizes, kind="stable")
    groups = [first[by_size[: int((sizes > j).sum())]] + j for j in range(int(sizes.max()))]
    index = torch.from_numpy(np.concatenate(groups).astype(np.int64)).to(device)
    return ChunkOrder(index, tuple(len(group) for group in groups))


class UnitLowerInverse(torch.autograd.Function):
    """Inverse of I + A for strictly lower triangular A [..., CHUNK, CHUNK], by doubling diagonal blocks.

    With X the inverse of the blocks of size s and A' the part of A between the two halves of each block of size
    2 s, X - X A' X is the inverse of the blocks of size 2 s. As stable as substitution.
    """

    @staticmethod
    def forward(ctx: Any, a: Tensor) -> Tensor:
        place = torch.arange(CHUNK, device=a.device)
        x = torch.eye(CHUNK, device=a.device, dtype=a.dtype).expand_as(a)
        size = 1
        while size < CHUNK:
            row, column = place[:, None] // size, place // size
            x = x - x @ ((a * ((row == column + 1) & (row % 2 == 1))) @ x)
            size *= 2
        ctx.save_for_backward(x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return -(x.mT @ grad @ x.mT)


class ChunkStates(torch.autograd.Function):
    """State before each chunk: S = M S' + B of the chunk before, 0 at the start of a document.

    M [chunks, heads, K, K] and B [chunks, heads, K, V] are in ChunkOrder's order, and so is the result.
    """

    @staticmethod
    def forward(ctx: Any, m: Tensor, b: Tensor, counts: tuple[int, ...]) -> Tensor:
        out = torch.zeros_like(b)
        at = 0
        for now, then in zip(counts[:-1], counts[1:], strict=True):
            rows, ahead = slice(at, at + then), slice(at + now, at + now + then)
            out[ahead] = m[rows] @ out[rows] + b[rows]
            at += now
        ctx.save_for_backward(m, out)
        ctx.counts = counts
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        m, states = ctx.saved_tensors
        total, after = grad.clone(), torch.zeros_like(grad)
        at = sum(ctx.counts) - ctx.counts[-1]
        for now, then in zip(ctx.counts[-2::-1], ctx.counts[:0:-1], strict=True):
            at -= now
            rows, ahead = slice(at, at + then), slice(at + now, at + now + then)
            after[rows] = total[ahead]
            total[rows] += m[rows].mT @ total[ahead]
        return after @ states.mT, after, None


def prepare(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, order: Tensor) -> tuple[Tensor, ...]:
    """Inputs per chunk in `order`, in float32: q, k, v, gated k, running log gate, and k k' inside the chunk."""
    heads = v.shape[1]

    def chunks(t: Tensor) -> Tensor:
        return t.float().view(-1, CHUNK, *t.shape[1:])[order].transpose(1, 2)

    def normed(t: Tensor) -> Tensor:
        t = t.float()
        t = t * torch.rsqrt(t.pow(2).sum(-1, keepdim=True) + 1e-6)
        return chunks(t.repeat_interleave(heads // t.shape[1], 1))

    qc, kc, vc, bc = normed(q) * q.shape[-1] ** -0.5, normed(k), chunks(v), chunks(beta)
    gc = chunks(g).cumsum(-1)
    kb = kc * bc[..., None]
    a = ((kb @ kc.mT) * decay(gc)).tril(-1)
    return qc, kc, vc * bc[..., None], kb * gc.exp()[..., None], gc, a


def decay(gc: Tensor) -> Tensor:
    """exp(g_i - g_j) on and below the diagonal, 0 above it."""
    place = torch.arange(CHUNK, device=gc.device)
    return (gc[..., :, None] - gc[..., None, :]).masked_fill(place[:, None] < place, float("-inf")).exp()


def transitions(x: Tensor, kc: Tensor, vb: Tensor, kb: Tensor, gc: Tensor) -> tuple[Tensor, ...]:
    """New values u, their dependence w on the state, and the state's way through the chunk: M and B."""
    u, w = x @ vb, x @ kb
    late = kc * (gc[..., -1:] - gc).exp()[..., None]
    eye = torch.eye(kc.shape[-1], device=kc.device)
    m = gc[..., -1].exp()[..., None, None] * eye - late.mT @ w
    return u, w, m, late.mT @ u


def read_out(
    qc: Tensor, kc: Tensor, gc: Tensor, u: Tensor, w: Tensor, states: Tensor, back: Tensor
) -> Tensor:
    """Outputs [N, heads, V]: from the state before the chunk and from the chunk itself; `back` undoes the order."""
    new = u - w @ states
    out = (qc * gc.exp()[..., None]) @ states + ((qc @ kc.mT) * decay(gc)) @ new
    return out.transpose(1, 2)[back].flatten(0, 1)


class DeltaRule:
    """The three compiled parts with the two steps between them."""

    def __init__(self, compile: bool) -> None:
        wrap = torch.compile if compile else (lambda f: f)
        self.prepare, self.transitions, self.read_out = wrap(prepare), wrap(transitions), wrap(read_out)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, order: ChunkOrder) -> Tensor:
        """q, k [N, H, D], v [N, HV, D], log gates g and beta [N, HV] -> [N, HV, D] in v's dtype."""
        with torch.autocast(v.device.type, enabled=False):
            qc, kc, vb, kb, gc, a = self.prepare(q, k, v, g, beta, order.index)
            u, w, m, b = self.transitions(UnitLowerInverse.apply(a), kc, vb, kb, gc)
            states = ChunkStates.apply(m, b, order.counts)
            out = self.read_out(qc, kc, gc, u, w, states, order.index.argsort())
        return out.to(v.dtype)


def largest_error(rule: Any, reference: Any, device: str) -> float:
    """Largest relative error of output and gradients of one delta rule against another, on random input."""
    torch.manual_seed(0)
    order = chunk_order(np.array([0, 64, 320, 512]), device)
    shapes = [(512, 2, 64), (512, 2, 64), (512, 4, 64), (512, 4), (512, 4)]
    inputs = [torch.randn(s, device=device) for s in shapes]
    inputs[3], inputs[4] = -0.3 * inputs[3].sigmoid(), inputs[4].sigmoid()
    up = torch.randn(512, 4, 64, device=device)
    results = []
    for one in (rule, reference):
        leaves = [t.clone().requires_grad_() for t in inputs]
        out = one(*leaves, order)
        results.append([out, *torch.autograd.grad((out.float() * up).sum(), leaves)])
    return max(float(((a - b).norm() / b.norm()).detach()) for a, b in zip(*results, strict=True))


def reference_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, order: ChunkOrder) -> Tensor:
    """transformers' own chunked delta rule, one document at a time."""
    from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import torch_chunk_gated_delta_rule

    groups = v.shape[1] // k.shape[1]
    q, k = q.repeat_interleave(groups, 1), k.repeat_interleave(groups, 1)
    starts = sorted(order.index[: order.counts[0]].tolist()) + [q.shape[0] // CHUNK]
    parts = []
    for begin, end in zip(starts[:-1], starts[1:], strict=True):
        one = [t[None, begin * CHUNK : end * CHUNK] for t in (q, k, v, g, beta)]
        parts.append(
            torch_chunk_gated_delta_rule(*one[:3], g=one[3], beta=one[4], use_qk_l2norm_in_kernel=True)[0][0]
        )
    return torch.cat(parts)
