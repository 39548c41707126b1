"""What this platform puts in the place of SGLang's Triton kernels and GPU decisions, as a list of hooks.

Each function has the parameters of what it replaces. Hooks aim at the module that defines a name: modules that
imported it before are pointed anew by SGLang's HookRegistry, later ones import the replacement. Padded rows
(slot -1) occur only with CUDA graphs and data parallelism, neither of which this platform has.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.plugins.hook_registry import HookType

from sglang_ft.engine.cpu_platform import memory
from sglang_ft.engine.cpu_platform.defaults import ATTENTION_BACKEND
from sglang_ft.engine.cpu_platform.ops import conv, delta_rule, gated
from sglang_ft.engine.hook import Hook


def causal_conv1d_fn(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    conv_states: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens_cpu: list[int],
    cache_indices: torch.Tensor,
    has_initial_state: torch.Tensor,
    activation: str | None = "silu",
    **unused: Any,
) -> torch.Tensor:
    """x [C, T] -> [C, T]; the states [slots, C, W - 1] at `cache_indices` are read where there is one, and written."""
    slots = cache_indices.long()
    before = conv_states[slots] * has_initial_state.view(-1, 1, 1).to(conv_states.dtype)
    silu = activation in ("silu", "swish", True)
    out, after = conv.causal_conv(x.T, weight, bias, before, query_start_loc.long(), silu)
    conv_states[slots] = after.to(conv_states.dtype)
    return out.T


def causal_conv1d_update(
    x: torch.Tensor,
    conv_state: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    cache_seqlens: torch.Tensor | None = None,
    conv_state_indices: torch.Tensor | None = None,
    **unused: Any,
) -> torch.Tensor:
    """x [B, C] -> [B, C]; one token a request."""
    assert x.dim() == 2 and conv_state_indices is not None, "several tokens a step need speculative decoding"
    slots = conv_state_indices.long()
    silu = activation in ("silu", "swish", True)
    out, after = conv.causal_conv_step(x, weight, bias, conv_state[slots], silu)
    conv_state[slots] = after.to(conv_state.dtype)
    return out


def fused_gdn_gating(
    A_log: torch.Tensor, a: torch.Tensor, b: torch.Tensor, dt_bias: torch.Tensor, *unused: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """a, b [T, H] -> log decay and strength [1, T, H]."""
    decay, strength = delta_rule.decay_and_strength(a, b, A_log, dt_bias)
    return decay.unsqueeze(0), strength.unsqueeze(0)


def chunk_gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    initial_state_indices: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    head_first: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
) -> tuple[torch.Tensor, None, torch.Tensor]:
    """q, k [1, T, H, K], v [1, T, Hv, V] -> output [1, T, Hv, V], None, states before each chunk [1, N, Hv, V, K].

    The states [slots, Hv, V, K] at `initial_state_indices` are read and written.
    """
    assert initial_state is not None and initial_state_indices is not None and cu_seqlens is not None
    slots = initial_state_indices.long()
    q, k = _ready_qk(q[0], k[0], v.shape[2], scale, use_qk_l2norm_in_kernel)
    result = delta_rule.delta_rule_chunked(q, k, v[0], g[0], beta[0], initial_state[slots], cu_seqlens.long())
    initial_state[slots] = result.states.to(initial_state.dtype)
    return result.output.to(v.dtype).unsqueeze(0), None, result.chunk_states.unsqueeze(0)


def fused_recurrent_gated_delta_rule_packed_decode(
    mixed_qkv: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    scale: float,
    initial_state: torch.Tensor,
    out: torch.Tensor,
    ssm_state_indices: torch.Tensor,
    use_qk_l2norm_in_kernel: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """mixed_qkv [B, all q | all k | all v] -> `out` [B, 1, Hv, V]; the states [slots, Hv, V, K] are updated."""
    v_heads, v_dim, k_dim = initial_state.shape[1:]
    qk_width = (mixed_qkv.shape[1] - v_heads * v_dim) // 2
    q, k, v = mixed_qkv.split([qk_width, qk_width, v_heads * v_dim], dim=1)
    q, k = q.unflatten(1, (-1, k_dim)), k.unflatten(1, (-1, k_dim))
    q, k = _ready_qk(q, k, v_heads, scale, use_qk_l2norm_in_kernel)
    decay, strength = delta_rule.decay_and_strength(a, b, A_log, dt_bias)
    slots = ssm_state_indices.long()
    step, states = delta_rule.delta_rule_step(
        q, k, v.unflatten(1, (v_heads, v_dim)), decay, strength, initial_state[slots]
    )
    initial_state[slots] = states.to(initial_state.dtype)
    out[:, 0] = step.to(out.dtype)
    return out, initial_state


def _ready_qk(
    q: torch.Tensor, k: torch.Tensor, v_heads: int, scale: float | None, normalize: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Normalizes, scales q, and repeats the key heads [..., H, K] for the value heads that share them."""
    if normalize:
        q, k = delta_rule.l2_normalize(q), delta_rule.l2_normalize(k)
    q = q * (q.shape[-1] ** -0.5 if scale is None else scale)
    ratio = v_heads // q.shape[-2]
    return q.repeat_interleave(ratio, dim=-2), k.repeat_interleave(ratio, dim=-2)


def track_mamba_states_if_needed(
    conv_states: torch.Tensor,
    ssm_states: torch.Tensor,
    cache_indices: torch.Tensor,
    mamba_track_mask: torch.Tensor,
    mamba_track_indices: torch.Tensor,
    batch_size: int,
    check_freed_slots: bool = False,
) -> None:
    """Copies the states [slots, ...] of the masked requests to their checkpoint slots."""
    mask = mamba_track_mask[:batch_size]
    source, target = cache_indices[:batch_size][mask].long(), mamba_track_indices[:batch_size][mask].long()
    for states in (conv_states, ssm_states):
        states[target] = states[source]


def track_mamba_states_all_layers(
    conv_states: torch.Tensor,
    ssm_states: torch.Tensor,
    cache_indices: torch.Tensor,
    mamba_track_mask: torch.Tensor,
    mamba_track_indices: torch.Tensor,
    batch_size: int,
    *args: Any,
    **kwargs: Any,
) -> None:
    """The same for the pools of all layers [layers, slots, ...]."""
    mask = mamba_track_mask[:batch_size]
    source, target = cache_indices[:batch_size][mask].long(), mamba_track_indices[:batch_size][mask].long()
    for states in (conv_states, ssm_states):
        states[:, target] = states[:, source]


def layernorm_fn(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    z: torch.Tensor | None = None,
    eps: float = 1e-6,
    group_size: int | None = None,
    norm_before_gate: bool = True,
    is_rms_norm: bool = False,
    activation: str = "swish",
) -> torch.Tensor:
    """Gated norm of x [..., D]."""
    return gated.gated_norm(
        x, weight, bias, z, eps, group_size, norm_before_gate, not is_rms_norm, activation == "sigmoid"
    )


def rms_norm_gated(
    x: torch.Tensor,
    g: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str = "swish",
    residual: torch.Tensor | None = None,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    eps: float = 1e-6,
) -> torch.Tensor:
    """RMS norm of x [..., D], times silu(g) or sigmoid(g)."""
    assert residual is None and not prenorm, "no recurrent layer of SGLang's models passes a residual here"
    return gated.gated_norm(x, weight, bias, g, eps, None, True, False, activation == "sigmoid")


def fused_gate_sigmoid_mul_add(
    hidden_states: torch.Tensor,
    gate_weight: torch.Tensor,
    shared_output: torch.Tensor,
    final_hidden_states: torch.Tensor,
) -> None:
    """Adds the shared expert's output [T, D], weighted by sigmoid(hidden_states @ gate_weight), in place."""
    gate = (hidden_states.float() @ gate_weight.float()).sigmoid().unsqueeze(1)
    final_hidden_states += (gate * shared_output.float()).to(final_hidden_states.dtype)


def fused_sigmoid_mul(attn_output: torch.Tensor, gate: torch.Tensor, inplace: bool = False) -> torch.Tensor:
    """attn_output * sigmoid(gate), [T, H * D] or of the gate's shape."""
    product = (attn_output.float() * gate.reshape(attn_output.shape).float().sigmoid()).to(attn_output.dtype)
    return attn_output.copy_(product) if inplace else product


def support_triton(backend: str) -> bool:
    """Whether helpers around attention may launch Triton kernels: never here."""
    return False


def resolved_attention_backends(original: Callable, server_args: Any) -> tuple[str, str]:
    """Lets our backend pass for Triton's in SGLang's lists of backends that a model accepts.

    The lists are written into ServerArgs, model by model; ours serves whatever Triton's serves.
    """
    prefill, decode = original(server_args)
    return tuple("triton" if name == ATTENTION_BACKEND else name for name in (prefill, decode))  # type: ignore[return-value]


def get_rope_wrapper(original: Callable, *args: Any, device: str | None = None, **kwargs: Any) -> Any:
    """Rotary embeddings of DeepSeek models: for device "cpu" SGLang knows one kind only, without it all of them."""
    return original(*args, **kwargs)


_OPS = "sglang.kernels.ops."
_FLA = _OPS + "attention.fla."
_CONV = _OPS + "mamba.causal_conv1d_triton."
_TRACK = _OPS + "mamba.mamba_state_scatter_triton."
_SPLIT = _OPS + "attention.triton_gdn_fused_proj."
_SPLIT_SIGNATURE = "(mixed_qkvz, mixed_ba, num_heads_qk, num_heads_v, head_qk, head_v)"


def _replace(target: str, function: Callable, signature: str) -> Hook:
    return Hook(target, HookType.REPLACE, function, signature)


HOOKS: list[Hook] = [
    _replace(
        _CONV + "causal_conv1d_fn",
        causal_conv1d_fn,
        "(x, weight, bias, conv_states, query_start_loc, seq_lens_cpu, cache_indices=None, "
        "has_initial_state=None, activation='silu', pad_slot_id=-1, validate_data=False, **kwargs)",
    ),
    _replace(
        _CONV + "causal_conv1d_update",
        causal_conv1d_update,
        "(x, conv_state, weight, bias=None, activation=None, cache_seqlens=None, conv_state_indices=None, "
        "num_accept_tokens=None, intermediate_conv_window=None, intermediate_state_indices=None, "
        "retrieve_next_token=None, retrieve_next_sibling=None, retrieve_parent_token=None, pad_slot_id=-1, "
        "metadata=None, validate_data=False)",
    ),
    _replace(
        _TRACK + "track_mamba_states_if_needed",
        track_mamba_states_if_needed,
        "(conv_states, ssm_states, cache_indices, mamba_track_mask, mamba_track_indices, batch_size, "
        "check_freed_slots=False)",
    ),
    _replace(
        _TRACK + "track_mamba_states_all_layers",
        track_mamba_states_all_layers,
        "(conv_states_pool, ssm_states_pool, cache_indices, mamba_track_mask, mamba_track_indices, batch_size, "
        "check_freed_slots=False)",
    ),
    _replace(
        _FLA + "fused_gdn_gating.fused_gdn_gating",
        fused_gdn_gating,
        "(A_log, a, b, dt_bias, beta=1.0, threshold=20.0)",
    ),
    _replace(
        _FLA + "chunk.chunk_gated_delta_rule",
        chunk_gated_delta_rule,
        "(q, k, v, g, beta, scale=None, initial_state=None, initial_state_indices=None, cu_seqlens=None, "
        "head_first=False, use_qk_l2norm_in_kernel=False)",
    ),
    _replace(
        _FLA + "fused_recurrent.fused_recurrent_gated_delta_rule_packed_decode",
        fused_recurrent_gated_delta_rule_packed_decode,
        "(mixed_qkv, a, b, A_log, dt_bias, scale, initial_state, out, ssm_state_indices, "
        "use_qk_l2norm_in_kernel=False)",
    ),
    _replace(
        _FLA + "layernorm_gated.layernorm_fn",
        layernorm_fn,
        "(x, weight, bias, z=None, eps=1e-06, group_size=None, norm_before_gate=True, is_rms_norm=False, "
        "activation='swish')",
    ),
    _replace(
        _FLA + "fused_norm_gate.rms_norm_gated",
        rms_norm_gated,
        "(x, g, weight, bias, activation='swish', residual=None, prenorm=False, residual_in_fp32=False, eps=1e-06)",
    ),
    _replace(_SPLIT + "fused_qkvzba_split_reshape_cat", gated.split_by_head, _SPLIT_SIGNATURE),
    _replace(_SPLIT + "fused_qkvzba_split_reshape_cat_contiguous", gated.split_in_blocks, _SPLIT_SIGNATURE),
    _replace(
        _OPS + "elementwise.elementwise.fused_sigmoid_mul",
        fused_sigmoid_mul,
        "(attn_output, gate, inplace=False)",
    ),
    _replace(
        _OPS + "elementwise.elementwise.fused_gate_sigmoid_mul_add",
        fused_gate_sigmoid_mul_add,
        "(hidden_states, gate_weight, shared_output, final_hidden_states)",
    ),
    _replace("sglang.srt.utils.common.support_triton", support_triton, "(backend)"),
    Hook(
        "sglang.srt.server_args.ServerArgs._resolved_attention_backends",
        HookType.AROUND,
        resolved_attention_backends,
        "(self)",
    ),
    Hook(
        "sglang.srt.layers.rotary_embedding.factory.get_rope_wrapper",
        HookType.AROUND,
        get_rope_wrapper,
        "(head_size, rotary_dim, max_position, base, is_neox_style=True, rope_scaling=None, dtype=None, "
        "partial_rotary_factor=1.0, device=None)",
    ),
    Hook(
        "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator._profile_available_bytes",
        HookType.AROUND,
        memory.profile_available_bytes,
        "(self, pre_model_load_memory)",
    ),
]
