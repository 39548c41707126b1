"""Softmax attention over gathered keys and values, in torch.

One function for decode and prefill, grouped heads, sliding windows, attention sinks and capped logits, and the
grouping of requests that decode together. Scores and sums are float32 whatever the inputs are.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F

# Scores of one prefill block: query rows times keys stay below this, so that memory is bounded.
MAX_BLOCK_SCORES = 1 << 24


class Scoring(NamedTuple):
    """How one attention layer turns products of queries and keys into weights."""

    scale: float
    # A key is seen when it is at most `window` positions before the query; None: no window.
    window: int | None = None
    # Logits become cap * tanh(logits / cap); None: no cap.
    cap: float | None = None
    # [H] logits of a sink that takes weight and gives no value; None: no sink.
    sinks: torch.Tensor | None = None
    causal: bool = True


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, scoring: Scoring
) -> torch.Tensor:
    """Attention of every query of a batch over the same number of keys.

    Args:
        q: [B, M, H, D]; k: [B, N, G, D]; v: [B, N, G, E]; heads h // (H // G) share a key head.
        mask: bool, broadcastable to [B, M, N]; True where the key is seen.

    Returns: [B, M, H, E] of q's dtype.
    """
    batch, rows, heads, _ = q.shape
    groups = k.shape[2]
    # Heads of one group become further query rows: no copy of keys and values for grouped heads.
    folded = q.unflatten(2, (groups, heads // groups)).permute(0, 2, 3, 1, 4).flatten(2, 3)
    mask = mask.expand(batch, rows, -1).repeat(1, heads // groups, 1).unsqueeze(1)
    keys, values = k.transpose(1, 2), v.transpose(1, 2)
    if scoring.sinks is None and scoring.cap is None:
        out = F.scaled_dot_product_attention(folded, keys, values, attn_mask=mask, scale=scoring.scale)
    else:
        out = _attend_explicitly(folded, keys, values, mask, scoring)
    return out.unflatten(2, (heads // groups, rows)).permute(0, 3, 1, 2, 4).flatten(2, 3)


def _attend_explicitly(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, scoring: Scoring
) -> torch.Tensor:
    """What scaled_dot_product_attention does not know: caps and sinks. q [B, G, R, D], R = heads of a group x rows."""
    scores = (q.float() * scoring.scale) @ k.float().transpose(-1, -2)
    if scoring.cap is not None:
        scores = scoring.cap * torch.tanh(scores / scoring.cap)
    scores = scores.masked_fill(~mask, float("-inf"))
    if scoring.sinks is not None:
        groups, rows = q.shape[1], q.shape[2]
        per_row = (
            scoring.sinks.float()
            .view(groups, -1)
            .repeat_interleave(rows * groups // len(scoring.sinks), dim=1)
        )
        sink = per_row.view(1, groups, rows, 1).expand(q.shape[0], -1, -1, -1)
        weights = torch.cat([scores, sink], dim=-1).softmax(dim=-1)[..., :-1]
    else:
        weights = scores.softmax(dim=-1)
    return (weights @ v.float()).to(q.dtype)


def attend_sequence(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scoring: Scoring) -> torch.Tensor:
    """Attention of the last M positions of one sequence over all its N positions, block by block.

    Args:
        q: [M, H, D]; k: [N, G, D]; v: [N, G, E].

    Returns: [M, H, E].
    """
    rows, total = q.shape[0], k.shape[0]
    first = total - rows
    out = q.new_empty(rows, q.shape[1], v.shape[2])
    step = max(1, MAX_BLOCK_SCORES // (q.shape[1] * total))
    for start in range(0, rows, step):
        stop = min(start + step, rows)
        # Only keys that some query of the block can see.
        high = first + stop if scoring.causal else total
        low = max(0, first + start - scoring.window) if scoring.window is not None else 0
        positions = torch.arange(first + start, first + stop).unsqueeze(1)
        mask = visible(positions, torch.arange(low, high).unsqueeze(0), scoring)
        block = attend(q[None, start:stop], k[None, low:high], v[None, low:high], mask[None], scoring)
        out[start:stop] = block[0]
    return out


def visible(query: torch.Tensor, key: torch.Tensor, scoring: Scoring) -> torch.Tensor:
    """bool: whether the key position is seen from the query position."""
    seen = key <= query if scoring.causal else torch.ones_like(key <= query)
    return seen & (key >= query - scoring.window) if scoring.window is not None else seen


class DecodeGroup(NamedTuple):
    """Requests of similar length that decode together."""

    rows: torch.Tensor  # [b] rows of the batch
    slots: torch.Tensor  # [b, n] KV slots, right-aligned: the newest token is the last column
    mask: torch.Tensor  # [b, 1, n] bool


def decode_groups(
    lengths: torch.Tensor, req_to_token: torch.Tensor, requests: torch.Tensor, window: int | None
) -> list[DecodeGroup]:
    """Groups requests whose visible lengths [B] share a power of two: at most half of what is read is padding."""
    seen = lengths if window is None else lengths.clamp(max=window + 1)
    buckets = torch.log2(seen.double()).floor().long()
    groups = []
    for bucket in buckets.unique().tolist():
        rows = (buckets == bucket).nonzero().squeeze(1)
        width = int(seen[rows].max())
        # Columns count back from the newest token, which every request has.
        back = torch.arange(width - 1, -1, -1)
        mask = back < seen[rows].unsqueeze(1)
        columns = (lengths[rows].unsqueeze(1) - 1 - back).clamp(min=0)
        slots = req_to_token[requests[rows].unsqueeze(1), columns].long()
        groups.append(DecodeGroup(rows, slots, mask.unsqueeze(1)))
    return groups
