"""What a model keeps beside its weights, from config.json alone: KV cache, recurrent states, activations of a chunk.

Sources: the model files of SGLang 0.5.17 and the papers of the architectures. Sizes in bytes; element sizes are those
of SGLang's defaults (states in float32, short convolutions in 16 bits).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

ROW_BYTES = 2  # activations are 16-bit
_STATE_BYTES = 4
_WINDOW_SHARE = 0.8  # SGLang's --swa-full-tokens-ratio: tokens of window layers over those of full ones
_V4_TOKEN_BYTES = 584  # DeepSeek-V4: one compressed FP8 entry with its scales
_SCAN_BLOCK = 64  # tokens between two states that a chunked scan writes down


@dataclass(frozen=True)
class Kinds:
    """Numbers of layers by what they remember of the tokens before."""

    full: int
    window: int
    linear: int


@dataclass(frozen=True)
class ModelMemory:
    """Bytes that serving takes beside the weights."""

    kinds: Kinds
    kv_token: float
    """Of one token of context in all layers."""
    state: int
    """Recurrent state of one sequence in all layers."""
    chunk_token: int
    """Most bytes of activations of one token while a chunk passes a layer."""
    logits_row: int


def describe(text: Mapping[str, Any], kv_element_bytes: float = 2) -> ModelMemory:
    """Of the language model that `text`, its part of config.json, describes."""
    kinds = count_layers(text)
    return ModelMemory(
        kinds=kinds,
        kv_token=_kv_token(text, kinds, kv_element_bytes),
        state=kinds.linear * _layer_state(text),
        chunk_token=_chunk_token(text, kinds),
        logits_row=_int(text, "vocab_size") * 4,
    )


def count_layers(text: Mapping[str, Any]) -> Kinds:
    """By the ways in which configs name layers; all full where nothing is said."""
    layers = _int(text, "num_hidden_layers")
    types = text.get("layer_types")
    if isinstance(types, list):
        full = sum(kind in ("full_attention", "attention") for kind in types)
        window = sum("sliding" in kind or "chunked" in kind for kind in types)
        return Kinds(full, window, len(types) - full - window)
    if isinstance(pattern := text.get("hybrid_override_pattern"), str):
        return Kinds(pattern.count("*"), 0, pattern.count("M"))
    if isinstance(linear := text.get("linear_attn_config"), dict):
        count = len(linear.get("kda_layers") or [])
        return Kinds(layers - count, 0, count)
    if interval := _int(text, "full_attention_interval"):
        return Kinds(layers // interval, 0, layers - layers // interval)
    return Kinds(layers, 0, 0)


def _kv_token(text: Mapping[str, Any], kinds: Kinds, element: float) -> float:
    if isinstance(ratios := text.get("compress_ratios"), list):  # DeepSeek-V4
        return sum(_V4_TOKEN_BYTES / ratio for ratio in ratios if ratio)
    if latent := _int(text, "kv_lora_rank"):
        one = (latent + _int(text, "qk_rope_head_dim")) * element
        if indexer := _int(text, "index_head_dim"):  # FP8 keys and a scale for each 128
            one += indexer + 4 * max(1, indexer // 128)
        return kinds.full * one
    one = 2 * _kv_heads(text) * _head_dim(text) * element
    return (kinds.full + _WINDOW_SHARE * kinds.window) * one


def _layer_state(text: Mapping[str, Any]) -> int:
    """Of one linear layer: its state and the last inputs of its short convolution."""
    if key_heads := _int(text, "linear_num_key_heads"):  # gated delta net
        value_heads = _int(text, "linear_num_value_heads")
        key, value = _int(text, "linear_key_head_dim"), _int(text, "linear_value_head_dim")
        channels = 2 * key_heads * key + value_heads * value
        convolution = channels * (_int(text, "linear_conv_kernel_dim") - 1) * ROW_BYTES
        return value_heads * key * value * _STATE_BYTES + convolution
    if isinstance(linear := text.get("linear_attn_config"), dict):  # Kimi delta attention
        heads, dim = _int(linear, "num_heads"), _int(linear, "head_dim")
        convolution = 3 * heads * dim * (_int(linear, "short_conv_kernel_size") - 1) * ROW_BYTES
        return heads * dim * dim * _STATE_BYTES + convolution
    if heads := _int(text, "mamba_num_heads") or _int(text, "mamba_n_heads"):  # Mamba-2
        dim = _int(text, "mamba_head_dim") or _int(text, "mamba_d_head")
        state = _int(text, "ssm_state_size") or _int(text, "mamba_d_state")
        groups = _int(text, "n_groups") or _int(text, "mamba_n_groups") or 1
        kernel = _int(text, "conv_kernel") or _int(text, "mamba_d_conv") or 4
        channels = heads * dim + 2 * groups * state
        return heads * dim * state * _STATE_BYTES + channels * (kernel - 1) * ROW_BYTES
    return _int(text, "hidden_size") * max(_int(text, "conv_L_cache") - 1, 0) * ROW_BYTES  # LFM2


def _chunk_token(text: Mapping[str, Any], kinds: Kinds) -> int:
    """The widest part of a layer, beside the residual and what is normalised of it."""
    hidden = _int(text, "hidden_size")
    parts = [_attention_chunk(text), _dense_chunk(text), _moe_chunk(text)]
    if kinds.linear:
        parts.append(_linear_chunk(text))
    return 4 * hidden * ROW_BYTES + max(parts)


def _attention_chunk(text: Mapping[str, Any]) -> int:
    heads, kv = _int(text, "num_attention_heads"), _kv_heads(text)
    dim = _head_dim(text)
    if latent := _int(text, "kv_lora_rank"):  # queries and outputs in the latent space
        dim, kv = latent + _int(text, "qk_rope_head_dim"), 1
    return 2 * (2 * heads + 2 * kv) * dim * ROW_BYTES


def _dense_chunk(text: Mapping[str, Any]) -> int:
    return 3 * _int(text, "intermediate_size") * ROW_BYTES


def _moe_chunk(text: Mapping[str, Any]) -> int:
    """SGLang's Triton kernels: gate and up, their activation and the output, of every route."""
    inner = _int(text, "moe_intermediate_size") or _int(text, "intermediate_size")
    return _top_k(text) * (3 * inner + _int(text, "hidden_size")) * ROW_BYTES


def _linear_chunk(text: Mapping[str, Any]) -> int:
    state = _layer_state(text) // _SCAN_BLOCK
    keys = _int(text, "linear_num_key_heads") * _int(text, "linear_key_head_dim")
    values = _int(text, "linear_num_value_heads") * _int(text, "linear_value_head_dim")
    return state + 3 * (2 * keys + 2 * values) * ROW_BYTES


def _top_k(text: Mapping[str, Any]) -> int:
    names = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts")
    return next((_int(text, name) for name in names if _int(text, name)), 0)


def _kv_heads(text: Mapping[str, Any]) -> int:
    return _int(text, "num_key_value_heads") or _int(text, "num_attention_heads")


def _head_dim(text: Mapping[str, Any]) -> int:
    return _int(text, "head_dim") or _int(text, "hidden_size") // max(_int(text, "num_attention_heads"), 1)


def _int(config: Mapping[str, Any], name: str) -> int:
    value = config.get(name)
    return value if isinstance(value, int) else 0
