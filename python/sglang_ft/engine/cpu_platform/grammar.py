"""Constrained output without a GPU: SGLang's xgrammar backend allocates pinned memory and masks on a device only."""

from __future__ import annotations

from typing import Any

import torch
import xgrammar
from sglang.srt.plugins.hook_registry import HookType

from sglang_ft.engine.hook import Hook


def _allocate_token_bitmask(vocab_size: int, batch_size: int) -> torch.Tensor:
    """int32 [B, words], every token allowed."""
    return torch.full(xgrammar.get_bitmask_shape(batch_size, vocab_size), -1, dtype=xgrammar.bitmask_dtype)


def _apply_vocab_mask(grammar: Any, logits: torch.Tensor, vocab_mask: torch.Tensor) -> None:
    """Sets the logits [B, V] of forbidden tokens to -inf, in place."""
    del grammar
    xgrammar.apply_token_bitmask_inplace(logits, vocab_mask)


_MODULE = "sglang.srt.constrained.xgrammar_backend"
HOOKS = (
    Hook(
        f"{_MODULE}._allocate_token_bitmask",
        HookType.REPLACE,
        _allocate_token_bitmask,
        "(vocab_size, batch_size)",
    ),
    Hook(
        f"{_MODULE}.XGrammarGrammar.apply_vocab_mask",
        HookType.REPLACE,
        _apply_vocab_mask,
        "(self, logits, vocab_mask)",
    ),
)
