"""Short causal convolutions along time, one filter a channel, with the state that precedes each sequence."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def causal_conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    states: torch.Tensor,
    starts: torch.Tensor,
    silu: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Convolves sequences that lie one after another.

    Args:
        x: [T, C], the tokens of all sequences.
        weight: [C, W]; bias: [C] or None.
        states: [S, C, W - 1], the inputs before each sequence, oldest first.
        starts: [S + 1] int64, first token of each sequence, then T.

    Returns: output [T, C] of x's dtype, and the new states [S, C, W - 1].
    """
    width = weight.shape[1]
    tail = width - 1
    lengths = starts.diff()
    sequence = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    # Every sequence is preceded by its state, so token t of sequence s lies at row t + (s + 1) * tail.
    begin = starts[:-1] + torch.arange(len(lengths)) * tail
    padded = x.new_empty(x.shape[0] + len(lengths) * tail, x.shape[1])
    padded[(begin.unsqueeze(1) + torch.arange(tail)).flatten()] = (
        states.transpose(1, 2).flatten(0, 1).to(x.dtype)
    )
    padded[torch.arange(x.shape[0]) + (sequence + 1) * tail] = x
    windows = padded.shape[0] - tail
    out = sum(padded[i : i + windows].float() * weight[:, i].float() for i in range(width))
    # Windows that reach over the border of two sequences belong to no token.
    out = out[torch.arange(x.shape[0]) + sequence * tail]
    end = begin + lengths
    new_states = (
        padded[(end.unsqueeze(1) + torch.arange(tail)).flatten()].unflatten(0, (-1, tail)).transpose(1, 2)
    )
    return _finish(out, bias, silu, x.dtype), new_states


def causal_conv_step(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, states: torch.Tensor, silu: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token of each sequence: x [S, C], states [S, C, W - 1] -> output [S, C], new states."""
    window = torch.cat([states.to(x.dtype), x.unsqueeze(2)], dim=2)
    out = (window.float() * weight.float()).sum(dim=2)
    return _finish(out, bias, silu, x.dtype), window[:, :, 1:]


def _finish(out: torch.Tensor, bias: torch.Tensor | None, silu: bool, dtype: torch.dtype) -> torch.Tensor:
    if bias is not None:
        out = out + bias.float()
    return (F.silu(out) if silu else out).to(dtype)
