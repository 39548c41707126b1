"""The attention backend `ft_cpu`: SGLang's KV pools read and written by torch.

Decode gathers the keys of requests of similar length together, so that a batch is a few large products and
little padding; prefill goes request by request. Multi-head, grouped and latent (MLA, absorbed or not)
attention, sliding windows, sinks and capped logits; recurrent layers have their own backend in SGLang, whose
kernels replacements.py replaces.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS, register_attention_backend
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from sglang.srt.server_args import ATTENTION_BACKEND_CHOICES

from sglang_ft.engine.cpu_platform.attend import (
    DecodeGroup,
    Scoring,
    attend,
    attend_sequence,
    decode_groups,
)
from sglang_ft.engine.cpu_platform.defaults import ATTENTION_BACKEND


class TorchAttention(AttentionBackend):
    """Attention over SGLang's token pools, without page tables: page size one."""

    def __init__(self, model_runner: Any) -> None:
        super().__init__()
        self.req_to_token_pool = model_runner.req_to_token_pool
        self.token_to_kv_pool = model_runner.token_to_kv_pool
        self.kv_cache_dtype = model_runner.kv_cache_dtype
        self._groups: dict[int | None, list[DecodeGroup]] = {}

    @property
    def data_type(self) -> torch.dtype:
        """dtype of the KV cache, asked for by SGLang's hybrid wrapper."""
        return self.kv_cache_dtype

    def support_triton(self) -> bool:
        return False

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        self._groups = {}

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
        sinks: torch.Tensor | None = None,
        **unused: Any,
    ) -> torch.Tensor:
        """q [T, H * D], k [T, G, D], v [T, G, E] -> [T, H * E]; T tokens of all requests, one after another."""
        self._save(k, v, layer, forward_batch, save_kv_cache)
        q = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)
        out = q.new_empty(q.shape[0], layer.tp_q_head_num, layer.v_head_dim)
        scoring = scoring_of(layer, sinks)
        start = 0
        for i, (length, prefix) in enumerate(
            zip(forward_batch.extend_seq_lens_cpu, forward_batch.extend_prefix_lens_cpu, strict=True)
        ):
            stop = start + length
            if prefix == 0 and k is not None and v is not None:
                keys, values = k[start:stop], v[start:stop]
            else:
                request = forward_batch.req_pool_indices[i]
                keys, values = self._cached(
                    layer, self.req_to_token_pool.req_to_token[request, : prefix + length]
                )
            out[start:stop] = attend_sequence(q[start:stop], keys.to(q.dtype), values.to(q.dtype), scoring)
            start = stop
        return out.flatten(1)

    def forward_decode(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
        sinks: torch.Tensor | None = None,
        **unused: Any,
    ) -> torch.Tensor:
        """One token a request: q [B, H * D], k [B, G, D], v [B, G, E] -> [B, H * E]."""
        self._save(k, v, layer, forward_batch, save_kv_cache)
        q = q.reshape(-1, 1, layer.tp_q_head_num, layer.qk_head_dim)
        out = q.new_empty(q.shape[0], layer.tp_q_head_num, layer.v_head_dim)
        scoring = scoring_of(layer, sinks)
        for group in self._decode_groups(forward_batch, scoring.window):
            keys, values = self._cached(layer, group.slots)
            block = attend(q[group.rows], keys.to(q.dtype), values.to(q.dtype), group.mask, scoring)
            out[group.rows] = block[:, 0]
        return out.flatten(1)

    def _save(
        self,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool,
    ) -> None:
        if layer.is_cross_attention:
            raise NotImplementedError("cross attention needs a GPU")
        if save_kv_cache and k is not None:
            location = KVWriteLoc(forward_batch.out_cache_loc, None)
            self.token_to_kv_pool.set_kv_buffer(layer, location, k, v)

    def _cached(self, layer: RadixAttention, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys [..., G, D] and values [..., G, E] at `slots` [...]."""
        pool, index = self.token_to_kv_pool, layer.layer_id
        key_buffer, value_buffer = pool.get_key_buffer(index), pool.get_value_buffer(index)
        keys = key_buffer[slots]
        if value_buffer.data_ptr() == key_buffer.data_ptr():
            # Latent attention: a value is the first part of its key, so the rows need be read only once.
            return keys, keys[..., : layer.v_head_dim]
        return keys, value_buffer[slots]

    def _decode_groups(self, forward_batch: ForwardBatch, window: int | None) -> list[DecodeGroup]:
        """Groups for layers of this window, made once a forward pass."""
        if window not in self._groups:
            self._groups[window] = decode_groups(
                forward_batch.seq_lens.long(),
                self.req_to_token_pool.req_to_token,
                forward_batch.req_pool_indices,
                window,
            )
        return self._groups[window]


def scoring_of(layer: RadixAttention, sinks: torch.Tensor | None) -> Scoring:
    """What SGLang's attention layer asks for."""
    return Scoring(
        scale=layer.scaling,
        window=layer.sliding_window_size if layer.sliding_window_size > -1 else None,
        cap=layer.logit_cap or None,
        sinks=sinks,
        causal=layer.attn_type == AttentionType.DECODER,
    )


def register() -> None:
    """Makes SGLang know the backend's name."""
    if ATTENTION_BACKEND not in ATTENTION_BACKENDS:
        register_attention_backend(ATTENTION_BACKEND)(TorchAttention)
        ATTENTION_BACKEND_CHOICES.append(ATTENTION_BACKEND)
