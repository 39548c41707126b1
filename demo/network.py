"""The network of the demo model, for training: the text part of Qwen3.5-MoE on packed documents.

Parameter names and meaning are those of transformers' `Qwen3_5MoeForCausalLM`, so the state dict is the
checkpoint. Documents lie one after the other in one row of N tokens; `Packed.starts` says where each begins and
nothing crosses a boundary. All experts are computed for all tokens and weighted (zero for those not routed to):
at this size that is faster on a GPU than sorting tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from demo.delta_rule import ChunkOrder, DeltaRule

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3_5MoeForCausalLM"],
    "model_type": "qwen3_5_moe_text",
    "dtype": "bfloat16",
    "vocab_size": 2048,
    "hidden_size": 128,
    "num_hidden_layers": 8,
    "full_attention_interval": 4,
    "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attn_output_gate": True,
    "linear_conv_kernel_dim": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "mamba_ssm_dtype": "float32",
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 128,
    "router_aux_loss_coef": 0.001,
    "output_router_logits": False,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "initializer_range": 0.02,
    "max_position_embeddings": 32768,
    "partial_rotary_factor": 0.5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000000, "partial_rotary_factor": 0.5},
    "tie_word_embeddings": True,
    "use_cache": True,
    "bos_token_id": None,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


class Packed(NamedTuple):
    """Documents in a row: `ids` and `position` int [N], `starts` int32 [D + 1], the longest one, chunks in order."""

    ids: Tensor
    position: Tensor
    starts: Tensor
    longest: int
    order: ChunkOrder


@dataclass(frozen=True)
class Kernels:
    """The two operations with an own implementation on GPU.

    `delta_rule(q, k, v, g, beta, order)`: see delta_rule.py.
    `attention(q, k, v, starts, longest)`: causal within documents, [N, heads, D] -> same as q.
    """

    delta_rule: Any
    attention: Any


def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    """RMS norm with a weight centred on 0, as in transformers' Qwen3_5MoeRMSNorm."""
    y = x.float()
    y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + eps)
    return (y * (1 + weight.float())).to(x.dtype)


def causal_conv(x: Tensor, weight: Tensor, position: Tensor) -> Tensor:
    """Depthwise causal convolution and SiLU; x [N, C], weight [C, 1, K]; reads zeros before a document."""
    taps = weight.shape[-1]
    out = x * weight[:, 0, taps - 1]
    for back in range(1, taps):
        shifted = F.pad(x, (0, 0, back, 0))[: x.shape[0]]
        out = out + torch.where((position >= back)[:, None], shifted, 0) * weight[:, 0, taps - 1 - back]
    return F.silu(out)


class Norm(nn.Module):
    """A weight of RMS norm; zeros mean 1."""

    def __init__(self, size: int, value: float = 0.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((size,), value))

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight)


class Conv(nn.Module):
    """Weight holder of the short convolution."""

    def __init__(self, channels: int, taps: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, 1, taps))


class GatedDeltaNet(nn.Module):
    """Recurrent layer: short convolution, gated delta rule, gated norm."""

    def __init__(self, c: dict[str, Any]) -> None:
        super().__init__()
        h, self.dim = c["hidden_size"], c["linear_value_head_dim"]
        self.k_heads, self.v_heads = c["linear_num_key_heads"], c["linear_num_value_heads"]
        key, value = self.k_heads * self.dim, self.v_heads * self.dim
        self.sizes = [key, key, value]
        self.conv1d = Conv(2 * key + value, c["linear_conv_kernel_dim"])
        self.dt_bias = nn.Parameter(torch.empty(self.v_heads))
        self.A_log = nn.Parameter(torch.empty(self.v_heads))
        self.norm = Norm(self.dim, 1.0)
        self.in_proj_qkv = nn.Linear(h, 2 * key + value, bias=False)
        self.in_proj_z = nn.Linear(h, value, bias=False)
        self.in_proj_b = nn.Linear(h, self.v_heads, bias=False)
        self.in_proj_a = nn.Linear(h, self.v_heads, bias=False)
        self.out_proj = nn.Linear(value, h, bias=False)

    def before(self, x: Tensor, position: Tensor) -> tuple[Tensor, ...]:
        """Projections and gates of the delta rule."""
        mixed = causal_conv(self.in_proj_qkv(x), self.conv1d.weight, position)
        q, k, v = (t.reshape(x.shape[0], -1, self.dim) for t in mixed.split(self.sizes, -1))
        beta = self.in_proj_b(x).float().sigmoid()
        g = -self.A_log.float().exp() * F.softplus(self.in_proj_a(x).float() + self.dt_bias)
        return q, k, v, g, beta, self.in_proj_z(x)

    def after(self, y: Tensor, z: Tensor) -> Tensor:
        """Norm, gate and output projection."""
        y = y.float()
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6) * self.norm.weight
        y = y * F.silu(z.float().view_as(y))
        return self.out_proj(y.to(z.dtype).flatten(1))


class Attention(nn.Module):
    """Full attention with norms of queries and keys, partial rotary positions and an output gate."""

    def __init__(self, c: dict[str, Any]) -> None:
        super().__init__()
        h, self.dim = c["hidden_size"], c["head_dim"]
        self.heads, self.kv_heads = c["num_attention_heads"], c["num_key_value_heads"]
        self.rotary, self.theta = (
            int(self.dim * c["partial_rotary_factor"]),
            c["rope_parameters"]["rope_theta"],
        )
        self.q_proj = nn.Linear(h, 2 * self.heads * self.dim, bias=False)
        self.k_proj = nn.Linear(h, self.kv_heads * self.dim, bias=False)
        self.v_proj = nn.Linear(h, self.kv_heads * self.dim, bias=False)
        self.o_proj = nn.Linear(self.heads * self.dim, h, bias=False)
        self.q_norm = Norm(self.dim)
        self.k_norm = Norm(self.dim)

    def rotate(self, x: Tensor, position: Tensor) -> Tensor:
        """Rotary positions on the first `rotary` channels, halves paired."""
        half = torch.arange(0, self.rotary, 2, device=x.device).float() / self.rotary
        angle = position[:, None].float() * (1.0 / self.theta**half)
        cos, sin = angle.cos()[:, None], angle.sin()[:, None]
        a, b, rest = x.float().split([self.rotary // 2, self.rotary // 2, self.dim - self.rotary], -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], -1).to(x.dtype)

    def before(self, x: Tensor, position: Tensor) -> tuple[Tensor, ...]:
        """Queries, keys, values (key heads repeated) and gate."""
        n = x.shape[0]
        q, gate = self.q_proj(x).view(n, self.heads, 2 * self.dim).chunk(2, -1)
        k, v = self.k_proj(x).view(n, -1, self.dim), self.v_proj(x).view(n, -1, self.dim)
        q, k = self.rotate(self.q_norm(q), position), self.rotate(self.k_norm(k), position)
        groups = self.heads // self.kv_heads
        return q, k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1), gate

    def after(self, y: Tensor, gate: Tensor) -> Tensor:
        """Gate and output projection."""
        return self.o_proj((y * gate.sigmoid()).flatten(1))


class Router(nn.Module):
    """Weight holder of the router."""

    def __init__(self, c: dict[str, Any]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(c["num_experts"], c["hidden_size"]))


class Experts(nn.Module):
    """Routed experts as two 3-d weights: gate over up [E, 2I, H], and down [E, H, I]."""

    def __init__(self, c: dict[str, Any]) -> None:
        super().__init__()
        e, h, i = c["num_experts"], c["hidden_size"], c["moe_intermediate_size"]
        self.gate_up_proj = nn.Parameter(torch.empty(e, 2 * i, h))
        self.down_proj = nn.Parameter(torch.empty(e, h, i))

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        """All experts, weighted: x [N, H], weight [N, E] -> [N, H]."""
        e, i2, _ = self.gate_up_proj.shape
        gate, up = F.linear(x, self.gate_up_proj.flatten(0, 1)).view(-1, e, i2).chunk(2, -1)
        hidden = F.silu(gate) * up * weight[:, :, None].to(x.dtype)
        return F.linear(hidden.flatten(1), self.down_proj.permute(1, 0, 2).flatten(1))


class Mlp(nn.Module):
    """A gated MLP."""

    def __init__(self, h: int, i: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(h, i, bias=False)
        self.up_proj = nn.Linear(h, i, bias=False)
        self.down_proj = nn.Linear(i, h, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Moe(nn.Module):
    """Top-k routed experts plus the gated shared expert."""

    def __init__(self, c: dict[str, Any]) -> None:
        super().__init__()
        self.top_k = c["num_experts_per_tok"]
        self.gate = Router(c)
        self.experts = Experts(c)
        self.shared_expert = Mlp(c["hidden_size"], c["shared_expert_intermediate_size"])
        self.shared_expert_gate = nn.Linear(c["hidden_size"], 1, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x [N, H] -> output [N, H], balance loss (1 when even), share of routes of each expert [E]."""
        probs = F.linear(x, self.gate.weight).float().softmax(-1)
        top, index = probs.topk(self.top_k, -1)
        weight = torch.zeros_like(probs).scatter(-1, index, top / top.sum(-1, keepdim=True))
        share = (weight > 0).float().mean(0) / self.top_k
        balance = probs.shape[-1] * (share.detach() * probs.mean(0)).sum()
        out = self.experts(x, weight) + self.shared_expert_gate(x).sigmoid() * self.shared_expert(x)
        return out, balance, share


class Layer(nn.Module):
    """One decoder layer."""

    def __init__(self, c: dict[str, Any], kind: str) -> None:
        super().__init__()
        if kind == "linear_attention":
            self.linear_attn = GatedDeltaNet(c)
        else:
            self.self_attn = Attention(c)
        self.kind = kind
        self.mlp = Moe(c)
        self.input_layernorm = Norm(c["hidden_size"])
        self.post_attention_layernorm = Norm(c["hidden_size"])

    def before(self, x: Tensor, position: Tensor) -> tuple[Tensor, ...]:
        """Everything ahead of the token mixing."""
        mixer = self.linear_attn if self.kind == "linear_attention" else self.self_attn
        return mixer.before(self.input_layernorm(x), position)

    def after(self, x: Tensor, y: Tensor, gate: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Everything behind the token mixing: output of the mixer, then the experts."""
        mixer = self.linear_attn if self.kind == "linear_attention" else self.self_attn
        x = x + mixer.after(y, gate)
        out, balance, share = self.mlp(self.post_attention_layernorm(x))
        return x + out, balance, share

    def forward(self, x: Tensor, batch: Packed, kernels: Kernels) -> tuple[Tensor, Tensor, Tensor]:
        *inputs, gate = self.before(x, batch.position)
        if self.kind == "linear_attention":
            y = kernels.delta_rule(*inputs, batch.order)
        else:
            y = kernels.attention(*inputs, batch.starts, batch.longest)
        return self.after(x, y, gate)


class Body(nn.Module):
    """Embedding, layers and final norm."""

    def __init__(self, c: dict[str, Any]) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(c["vocab_size"], c["hidden_size"])
        self.layers = nn.ModuleList(Layer(c, kind) for kind in c["layer_types"])
        self.norm = Norm(c["hidden_size"])


class Network(nn.Module):
    """The whole model; the output head shares the embedding."""

    def __init__(self, config: dict[str, Any] = CONFIG) -> None:
        super().__init__()
        self.config = config
        self.model = Body(config)
        self.reset()

    def reset(self) -> None:
        """Initial weights from torch's current seed."""
        for name, p in self.named_parameters():
            if name.endswith("A_log"):
                p.data.uniform_(0.5, 8).log_()
            elif name.endswith("dt_bias"):
                p.data.uniform_(-5, -1)
            elif p.dim() >= 2:
                scale = (
                    0.5
                    if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight", "down_proj"))
                    else 1.0
                )
                nn.init.normal_(p, std=0.02 if "embed" in name else scale * p.shape[-1] ** -0.5)

    def forward(self, batch: Packed, kernels: Kernels) -> tuple[Tensor, Tensor, Tensor]:
        """Hidden states [N, H], mean balance loss, share of routes [layers, E]."""
        x = self.model.embed_tokens(batch.ids)
        balances, shares = [], []
        for layer in self.model.layers:
            x, balance, share = layer(x, batch, kernels)
            balances.append(balance)
            shares.append(share)
        return self.model.norm(x), torch.stack(balances).mean(), torch.stack(shares)

    def logits(self, hidden: Tensor) -> Tensor:
        """Next-token scores, [N, V]."""
        return F.linear(hidden, self.model.embed_tokens.weight)


def attention_on_cpu(q: Tensor, k: Tensor, v: Tensor, starts: Tensor, longest: int) -> Tensor:
    """Causal attention within documents, one document at a time."""
    parts = []
    for begin, end in zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True):
        one = [t[begin:end].transpose(0, 1)[None] for t in (q, k, v)]
        parts.append(F.scaled_dot_product_attention(*one, is_causal=True)[0].transpose(0, 1))
    return torch.cat(parts)


def attention_on_gpu(q: Tensor, k: Tensor, v: Tensor, starts: Tensor, longest: int) -> Tensor:
    """Causal attention within documents, by torch's variable-length flash attention."""
    from torch.nn.attention.varlen import varlen_attn

    q, k, v = (t.to(torch.bfloat16).contiguous() for t in (q, k, v))
    return varlen_attn(q, k, v, starts, starts, longest, longest, window_size=(-1, 0))


def kernels_for(device: str) -> Kernels:
    """The two operations for a device."""
    if device == "cpu":
        return Kernels(DeltaRule(compile=False), attention_on_cpu)
    return Kernels(DeltaRule(compile=True), attention_on_gpu)
