"""Checkpoints of full size without weights: real headers and config, files with nothing in them but holes."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

BYTES = {"BF16": 2, "F32": 4, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E8M0": 1}
GIB = 1 << 30


class Tensor(NamedTuple):
    name: str
    dtype: str
    shape: tuple[int, ...]


def write(folder: Path, config: dict[str, Any], tensors: Iterable[Tensor], file: str = "model") -> Path:
    """Writes config.json and one safetensors file; its data takes no space on disk."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    header, at = {}, 0
    for tensor in tensors:
        end = at + BYTES[tensor.dtype]
        for length in tensor.shape:
            end += (length - 1) * (end - at)
        header[tensor.name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    with (folder / f"{file}.safetensors").open("wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        out.truncate(8 + len(text) + at)
    return folder


def dense(nbytes: float) -> Tensor:
    """Everything that is no expert, as one tensor."""
    return Tensor("model.embed_tokens.weight", "BF16", (int(nbytes) // 2,))


def qwen36(nvfp4: bool) -> tuple[dict[str, Any], Iterator[Tensor]]:
    """Qwen3.6-35B-A3B in BF16 or NVIDIA's NVFP4."""
    text = {
        "num_hidden_layers": 40,
        "hidden_size": 2048,
        "moe_intermediate_size": 512,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "full_attention_interval": 4,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "vocab_size": 248320,
        "max_position_embeddings": 262144,
    }
    config = {"architectures": ["Qwen3_5MoeForConditionalGeneration"], "text_config": text}

    def tensors() -> Iterator[Tensor]:
        yield dense(3.5e9 if nvfp4 else 4.9e9)
        for layer in range(40):
            at = f"model.language_model.layers.{layer}.mlp.experts."
            if not nvfp4:
                yield Tensor(at + "gate_up_proj", "BF16", (256, 1024, 2048))
                yield Tensor(at + "down_proj", "BF16", (256, 2048, 512))
                continue
            for expert in range(256):
                yield from _nvfp4(f"{at}{expert}.", 2048, 512)

    if nvfp4:
        config["quantization_config"] = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
    return config, tensors()


def glm52() -> tuple[dict[str, Any], Iterator[Tensor]]:
    """GLM-5.2 in NVFP4: 75 MoE layers of 78."""
    config = {
        "architectures": ["GlmMoeDsaForCausalLM"],
        "num_hidden_layers": 78,
        "first_k_dense_replace": 3,
        "hidden_size": 6144,
        "intermediate_size": 12288,
        "moe_intermediate_size": 2048,
        "n_routed_experts": 256,
        "num_experts_per_tok": 8,
        "num_attention_heads": 64,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "index_head_dim": 128,
        "vocab_size": 154880,
        "max_position_embeddings": 202752,
        "quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"},
    }

    def tensors() -> Iterator[Tensor]:
        yield dense(37e9)
        for layer in range(3, 78):
            for expert in range(256):
                yield from _nvfp4(f"model.layers.{layer}.mlp.experts.{expert}.", 6144, 2048)

    return config, tensors()


def deepseek_v4_flash() -> tuple[dict[str, Any], Iterator[Tensor]]:
    """DeepSeek-V4-Flash with its native MXFP4 experts."""
    config = {
        "architectures": ["DeepseekV4ForCausalLM"],
        "num_hidden_layers": 43,
        "hidden_size": 4096,
        "moe_intermediate_size": 2048,
        "n_routed_experts": 256,
        "num_experts_per_tok": 6,
        "num_attention_heads": 64,
        "head_dim": 512,
        "num_key_value_heads": 1,
        "compress_ratios": [0, 0] + [4, 128] * 20 + [4],
        "vocab_size": 129280,
        "max_position_embeddings": 1048576,
        "quantization_config": {"quant_method": "fp8", "fmt": "e4m3"},
    }

    def tensors() -> Iterator[Tensor]:
        yield dense(10.3e9)
        for layer in range(43):
            for expert in range(256):
                at = f"layers.{layer}.ffn.experts.{expert}."
                for name, out, ins in (("w1", 2048, 4096), ("w3", 2048, 4096), ("w2", 4096, 2048)):
                    yield Tensor(f"{at}{name}.weight", "I8", (out, ins // 2))
                    yield Tensor(f"{at}{name}.scale", "F8_E8M0", (out, ins // 32))

    return config, tensors()


def _nvfp4(at: str, hidden: int, intermediate: int) -> Iterator[Tensor]:
    for name, out, ins in (
        ("gate_proj", intermediate, hidden),
        ("up_proj", intermediate, hidden),
        ("down_proj", hidden, intermediate),
    ):
        yield Tensor(f"{at}{name}.weight", "U8", (out, ins // 2))
        yield Tensor(f"{at}{name}.weight_scale", "F8_E4M3", (out, ins // 16))
        yield Tensor(f"{at}{name}.weight_scale_2", "F32", (1,))
        yield Tensor(f"{at}{name}.input_scale", "F32", (1,))
