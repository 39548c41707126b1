"""The gated delta rule (Yang et al., "Gated Delta Networks", arXiv 2412.06464): one step, and whole chunks.

For each head a state S [V, K] maps keys to values. A token with key k, value v, log decay g and strength b does

    S <- exp(g) S,    S <- S + b (v - S k) k^T,    o = S q

The chunked form processes CHUNK tokens with matrix products. With G the running sum of g within the chunk and
D[i, j] = exp(G_i - G_j) for i >= j, the corrections u_i = b_i (v_i - (S k)_i) of all its tokens solve

    (I + A) u = b v - b exp(G) (k S0^T),    A[i, j] = b_i (k_i . k_j) D[i, j] for i > j

with S0 the state before the chunk; then

    o = exp(G) (q S0^T) + tril((q k^T) D) u,    S <- exp(G_last) S0 + sum_i exp(G_last - G_i) u_i k_i^T

All arithmetic is float32 (float64 for float64 inputs), the state too.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F

CHUNK = 64


class DeltaRuleResult(NamedTuple):
    """What a chunked pass gives."""

    output: torch.Tensor  # [T, H, V]
    states: torch.Tensor  # [S, H, V, K], after each sequence
    chunk_states: torch.Tensor  # [N, H, V, K], before each chunk of each sequence, in order


def delta_rule_step(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    states: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token of each sequence.

    Args:
        q (already scaled), k: [S, H, K]; v: [S, H, V]; g, beta: [S, H]; states: [S, H, V, K].

    Returns: output [S, H, V] and the new states, in the states' working precision.
    """
    work = _working_dtype(v)
    q, k, v, states = q.to(work), k.to(work), v.to(work), states.to(work)
    states = states * g.to(work).exp()[..., None, None]
    correction = beta.to(work).unsqueeze(-1) * (v - (states @ k.unsqueeze(-1)).squeeze(-1))
    states = torch.addcmul(states, correction.unsqueeze(-1), k.unsqueeze(-2))
    return (states @ q.unsqueeze(-1)).squeeze(-1), states


def delta_rule_chunked(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    states: torch.Tensor,
    starts: torch.Tensor,
) -> DeltaRuleResult:
    """All tokens of sequences that lie one after another.

    Args:
        q (already scaled), k: [T, H, K]; v: [T, H, V]; g, beta: [T, H].
        states: [S, H, V, K], before each sequence.
        starts: [S + 1] int64, first token of each sequence, then T.
    """
    work = _working_dtype(v)
    layout = _ChunkLayout.of(starts)
    q, k, v, g, beta = (layout.split(x.to(work)) for x in (q, k, v, g, beta))
    decay = g.cumsum(-1)
    # exp only of differences that are at most zero: far above the diagonal it would overflow.
    between = (decay.unsqueeze(-1) - decay.unsqueeze(-2)).tril().exp().tril()
    strong_k = k * beta.unsqueeze(-1)
    system = ((strong_k @ k.transpose(-1, -2)) * between).tril(-1)
    right = torch.cat([v * beta.unsqueeze(-1), strong_k * decay.exp().unsqueeze(-1)], dim=-1)
    # unitriangular: the diagonal of ones need not be written.
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    fresh, recalled = solved.split([v.shape[-1], k.shape[-1]], dim=-1)
    within = (q @ k.transpose(-1, -2)) * between
    decayed_q = q * decay.exp().unsqueeze(-1)
    last = decay[..., -1:]
    kept_k = k * (last - decay).exp().unsqueeze(-1)

    states = states.to(work).clone()
    output = torch.empty_like(v)
    chunk_states = states.new_empty(layout.num_chunks, *states.shape[1:])
    for sequences, chunks in layout.steps():
        state = states[sequences]
        chunk_states[chunks] = state
        correction = fresh[chunks] - recalled[chunks] @ state.transpose(-1, -2)
        output[chunks] = decayed_q[chunks] @ state.transpose(-1, -2) + within[chunks] @ correction
        states[sequences] = (
            state * last[chunks].exp().unsqueeze(-1) + correction.transpose(-1, -2) @ kept_k[chunks]
        )
    return DeltaRuleResult(layout.join(output), states, chunk_states)


def l2_normalize(x: torch.Tensor) -> torch.Tensor:
    """x / sqrt(sum of squares + 1e-6) along the last dimension, in working precision."""
    x = x.to(_working_dtype(x))
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def decay_and_strength(
    a: torch.Tensor, b: torch.Tensor, a_log: torch.Tensor, dt_bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gates of a layer: log decay -exp(A_log) softplus(a + dt_bias) and strength sigmoid(b), float32."""
    decay = -a_log.float().exp() * F.softplus(a.float() + dt_bias.float())
    return decay, b.float().sigmoid()


def _working_dtype(x: torch.Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


class _ChunkLayout(NamedTuple):
    """Where the tokens of each sequence lie in chunks of CHUNK rows, the last chunk of each filled with zeros.

    A token of zeros changes nothing: its strength is zero and its decay one.
    """

    row: torch.Tensor  # [T] row of each token among num_chunks * CHUNK
    first: torch.Tensor  # [S] first chunk of each sequence
    counts: torch.Tensor  # [S] chunks of each sequence
    num_chunks: int

    @classmethod
    def of(cls, starts: torch.Tensor) -> _ChunkLayout:
        lengths = starts.diff()
        counts = (lengths + CHUNK - 1) // CHUNK
        first = counts.cumsum(0) - counts
        shift = torch.repeat_interleave(first * CHUNK - starts[:-1], lengths)
        return cls(torch.arange(int(lengths.sum())) + shift, first, counts, int(counts.sum()))

    def split(self, x: torch.Tensor) -> torch.Tensor:
        """[T, H, ...] -> [N, H, CHUNK, ...]."""
        rows = x.new_zeros(self.num_chunks * CHUNK, *x.shape[1:])
        rows[self.row] = x
        return rows.unflatten(0, (self.num_chunks, CHUNK)).transpose(1, 2).contiguous()

    def join(self, x: torch.Tensor) -> torch.Tensor:
        """[N, H, CHUNK, V] -> [T, H, V]."""
        return x.transpose(1, 2).flatten(0, 1)[self.row]

    def steps(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """For i = 0, 1, ...: the sequences that have an i-th chunk, and that chunk of each."""
        longest = int(self.counts.max()) if len(self.counts) else 0
        sequences = [(self.counts > i).nonzero().squeeze(1) for i in range(longest)]
        return [(s, self.first[s] + i) for i, s in enumerate(sequences)]
