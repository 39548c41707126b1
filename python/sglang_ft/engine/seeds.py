"""Makes a request's `seed` count: the same seed and prompt give the same tokens, whatever else is in the batch.

SGLang itself reads seeds only with --enable-deterministic-inference, and then gives every other request one
fixed seed. Here rows without a seed are drawn by SGLang as always. A draw depends on the seed and the token's
position alone; the probabilities may still differ in their last bits between batches.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.plugins.hook_registry import HookType

from sglang_ft.engine.hook import Hook

NO_SEED = -(2**63)


def hooks() -> list[Hook]:
    """Hooks for the scheduler process."""
    return [
        Hook(
            "sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo.adjusted_from_schedule_batch",
            HookType.BEFORE,
            _note_seeds,
            "(self, batch, vocab_size)",
        ),
        Hook(
            "sglang.srt.layers.sampler.Sampler._sample_from_probs",
            HookType.AROUND,
            _sample,
            "(self, probs, sampling_info, positions, simple_sampling_case)",
        ),
    ]


def _note_seeds(info: Any, batch: Any, vocab_size: int) -> None:
    """Fills the field that SGLang keeps in step with the batch: int64 [B], NO_SEED where there is none."""
    del vocab_size
    if info.sampling_seed is None:
        seeds = [request.sampling_params.sampling_seed for request in batch.reqs]
        info.sampling_seed = torch.tensor(
            [NO_SEED if seed is None else seed for seed in seeds], device=info.device
        )


def _sample(
    original: Callable, sampler: Any, probs: torch.Tensor, info: Any, positions: torch.Tensor, simple: bool
) -> torch.Tensor:
    """probs [B, V] -> token ids int32 or int64 [B]."""
    seeds = info.sampling_seed
    if seeds is None or sampler.enable_deterministic:
        return original(sampler, probs, info, positions, simple)
    info.sampling_seed = None
    try:
        tokens = original(sampler, probs, info, positions, simple)
    finally:
        info.sampling_seed = seeds
    for row in (seeds != NO_SEED).nonzero().flatten().tolist():
        limits = (info.top_ks[row], info.top_ps[row], info.min_ps[row])
        tokens[row] = draw(probs[row], int(seeds[row]), int(positions[row]), *map(float, limits))
    return tokens


def draw(probs: torch.Tensor, seed: int, position: int, top_k: float, top_p: float, min_p: float) -> int:
    """One token id from probs [V], of the tokens that top-k, top-p and min-p leave."""
    sorted_probs, ids = probs.double().sort(descending=True, stable=True)
    before = sorted_probs.cumsum(0) - sorted_probs
    ranks = torch.arange(len(ids), device=ids.device)
    kept = (ranks < top_k) & (before <= top_p) & (sorted_probs >= min_p * sorted_probs[0])
    mass = torch.where(kept, sorted_probs, 0).cumsum(0)
    generator = torch.Generator().manual_seed(_mix(seed, position))
    point = torch.rand((), dtype=torch.float64, generator=generator) * mass[-1].item()
    index = torch.searchsorted(mass, point.to(mass.device), right=True)
    return int(ids[index.clamp_max(int(kept.sum()) - 1)])


def _mix(seed: int, position: int) -> int:
    """One 64-bit seed of both (a step of the generator SplitMix64)."""
    mask = 2**64 - 1
    x = (seed + (position + 1) * 0x9E3779B97F4A7C15) & mask
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
    return (x ^ (x >> 31)) - 2**63
