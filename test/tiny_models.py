"""Tiny random checkpoints of every supported family, written by transformers, for tests.

`write(family, folder)` saves a float32 checkpoint of a few hundred thousand parameters with a byte-level
tokenizer that is made here (no network). Weights are drawn so that logits are spread out: greedy argmax
margins stay far above rounding. The files hold the names that the models on the Hugging Face hub have.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

VOCAB_SIZE = 320
SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
)
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

# Sizes that every family shares: 16 experts, top 4, 4 layers.
COMMON = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "bos_token_id": 256,
    "eos_token_id": 258,
    "pad_token_id": 256,
}
LINEAR_ATTENTION = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
    "full_attention_interval": 4,
}
SHARED_EXPERT = {
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "norm_topk_prob": True,
}
MLA = {
    "intermediate_size": 192,
    "moe_intermediate_size": 64,
    "num_key_value_heads": 4,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "n_routed_experts": 16,
    "num_experts_per_tok": 4,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
}


def qwen3() -> transformers.PreTrainedConfig:
    return transformers.Qwen3Config(**COMMON, intermediate_size=192, num_key_value_heads=2, head_dim=32)


def qwen3_moe() -> transformers.PreTrainedConfig:
    return transformers.Qwen3MoeConfig(
        **COMMON,
        intermediate_size=192,
        num_key_value_heads=2,
        head_dim=32,
        moe_intermediate_size=64,
        num_experts=16,
        num_experts_per_tok=4,
        norm_topk_prob=True,
        mlp_only_layers=[],
    )


def qwen3_5_moe_text() -> transformers.PreTrainedConfig:
    return transformers.Qwen3_5MoeTextConfig(
        **COMMON,
        **LINEAR_ATTENTION,
        **SHARED_EXPERT,
        num_key_value_heads=2,
        head_dim=64,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
    )


def qwen3_5_moe() -> transformers.PreTrainedConfig:
    """The whole model as on the hub: text model under `language_model`, with a small vision tower."""
    text = qwen3_5_moe_text().to_dict()
    text["rope_parameters"] |= {"mrope_section": [4, 2, 2], "mrope_interleaved": True}
    return transformers.Qwen3_5MoeConfig(
        text_config=text,
        vision_config={
            "depth": 1,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_heads": 2,
            "out_hidden_size": COMMON["hidden_size"],
            "num_position_embeddings": 64,
        },
        image_token_id=300,
        video_token_id=301,
        vision_start_token_id=302,
        vision_end_token_id=303,
        tie_word_embeddings=False,
    )


def qwen3_next() -> transformers.PreTrainedConfig:
    return transformers.Qwen3NextConfig(
        **COMMON,
        **LINEAR_ATTENTION,
        **SHARED_EXPERT,
        intermediate_size=192,
        num_key_value_heads=2,
        head_dim=64,
        partial_rotary_factor=0.25,
        decoder_sparse_step=1,
        mlp_only_layers=[],
    )


def glm4_moe() -> transformers.PreTrainedConfig:
    return transformers.Glm4MoeConfig(
        **COMMON,
        intermediate_size=192,
        num_key_value_heads=2,
        head_dim=32,
        partial_rotary_factor=0.5,
        use_qk_norm=True,
        attention_bias=True,
        moe_intermediate_size=64,
        n_routed_experts=16,
        num_experts_per_tok=4,
        n_shared_experts=1,
        first_k_dense_replace=1,
        n_group=1,
        topk_group=1,
        norm_topk_prob=True,
        routed_scaling_factor=2.5,
    )


def gpt_oss() -> transformers.PreTrainedConfig:
    return transformers.GptOssConfig(
        **COMMON,
        intermediate_size=64,
        num_key_value_heads=2,
        head_dim=32,
        num_local_experts=16,
        num_experts_per_tok=4,
        sliding_window=16,
        swiglu_limit=7.0,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 1024,
        },
    )


def olmoe() -> transformers.PreTrainedConfig:
    return transformers.OlmoeConfig(
        **COMMON, intermediate_size=64, num_key_value_heads=4, num_experts=16, num_experts_per_tok=4
    )


def mixtral() -> transformers.PreTrainedConfig:
    return transformers.MixtralConfig(
        **COMMON,
        intermediate_size=64,
        num_key_value_heads=2,
        head_dim=32,
        num_local_experts=16,
        num_experts_per_tok=4,
        sliding_window=None,
    )


def deepseek_v2() -> transformers.PreTrainedConfig:
    """DeepSeek-V2-Lite's kind: no query compression, softmax scores, no renormalisation."""
    return transformers.DeepseekV2Config(
        **COMMON,
        **MLA,
        q_lora_rank=None,
        scoring_func="softmax",
        n_group=1,
        topk_group=1,
        topk_method="greedy",
        norm_topk_prob=False,
        routed_scaling_factor=1.5,
    )


def deepseek_v3() -> transformers.PreTrainedConfig:
    return transformers.DeepseekV3Config(
        **COMMON,
        **MLA,
        q_lora_rank=48,
        topk_method="noaux_tc",
        scoring_func="sigmoid",
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 1024,
        },
        n_group=4,
        topk_group=2,
        norm_topk_prob=True,
        routed_scaling_factor=2.5,
    )


def lfm2_moe() -> transformers.PreTrainedConfig:
    """Short convolutions as the only recurrent layers."""
    return transformers.Lfm2MoeConfig(
        **COMMON,
        intermediate_size=192,
        num_key_value_heads=2,
        moe_intermediate_size=64,
        num_experts=16,
        num_experts_per_tok=4,
        num_dense_layers=1,
        layer_types=["conv", "conv", "full_attention", "conv"],
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )


FAMILIES: dict[str, Callable[[], transformers.PreTrainedConfig]] = {
    f.__name__: f
    for f in (
        qwen3,
        qwen3_moe,
        qwen3_5_moe,
        qwen3_5_moe_text,
        qwen3_next,
        glm4_moe,
        gpt_oss,
        olmoe,
        mixtral,
        deepseek_v2,
        deepseek_v3,
        lfm2_moe,
    )
}


def write(family: str, folder: str | Path, seed: int = 0, dtype: torch.dtype = torch.float32) -> Path:
    """Writes the checkpoint and tokenizer of `family` into `folder`; returns the folder."""
    folder = Path(folder)
    config = FAMILIES[family]()
    model = (
        transformers.AutoModelForImageTextToText
        if family == "qwen3_5_moe"
        else transformers.AutoModelForCausalLM
    )
    torch.manual_seed(seed)
    network = model.from_config(config, dtype=torch.float32)
    randomize(network, seed)
    network.to(dtype).save_pretrained(folder)
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(folder)
    if family == "qwen3_5_moe":
        make_processor(tokenizer).save_pretrained(folder)
    return folder


def randomize(network: torch.nn.Module, seed: int) -> None:
    """Draws every parameter again, scaled by its role so that activations and logits keep a healthy size."""
    generator = torch.Generator().manual_seed(seed)

    def normal(tensor: torch.Tensor, mean: float, std: float) -> None:
        tensor.data.normal_(mean, std, generator=generator)

    for name, tensor in [*network.named_parameters(), *network.named_buffers()]:
        leaf = name.rsplit(".", 1)[-1]
        if "rotary" in name or "inv_freq" in name or not tensor.is_floating_point():
            continue
        if "embed_tokens" in name:
            normal(tensor, 0.0, 1.0)
        elif leaf == "A_log":
            tensor.data.uniform_(math.log(0.02), math.log(1.0), generator=generator)
        elif "norm" in name and tensor.dim() == 1:
            # Gemma-style norms multiply by (1 + weight) and start at zero, the others at one.
            normal(tensor, tensor.data.mean().round().item(), 0.1)
        elif leaf == "sinks":
            normal(tensor, 0.0, 1.0)
            tensor.data = tensor.data.bfloat16().float()  # the type that SGLang keeps them in
        elif "bias" in leaf:
            normal(tensor, 0.0, 0.2)
        elif "lm_head" in name or ".gate.weight" in name or ".router.weight" in name:
            normal(tensor, 0.0, 3.0 / math.sqrt(tensor.shape[-1]))
        elif tensor.dim() >= 2:
            normal(tensor, 0.0, 1.0 / math.sqrt(tensor.shape[-1]))


def make_tokenizer() -> transformers.PreTrainedTokenizerFast:
    """One token per byte, then the special tokens; ids up to VOCAB_SIZE are filled with reserved ones."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    reserved = [f"<|reserved_{i}|>" for i in range(VOCAB_SIZE - len(alphabet) - len(SPECIAL_TOKENS))]
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in (*SPECIAL_TOKENS, *reserved)])
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|endoftext|>",
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=CHAT_TEMPLATE,
    )


def make_processor(tokenizer: transformers.PreTrainedTokenizerFast) -> Any:
    """What turns images into patches; a model with a vision tower is not loaded without it."""
    return transformers.Qwen3VLProcessor(
        image_processor=transformers.Qwen2VLImageProcessor(),
        video_processor=transformers.Qwen3VLVideoProcessor(),
        tokenizer=tokenizer,
        chat_template=CHAT_TEMPLATE,
    )


def reference(folder: str | Path) -> Any:
    """The transformers model of a checkpoint, in float32 and eager attention, to compare with."""
    config = transformers.AutoConfig.from_pretrained(folder)
    multimodal = hasattr(config, "vision_config")
    auto = transformers.AutoModelForImageTextToText if multimodal else transformers.AutoModelForCausalLM
    return auto.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("family", choices=FAMILIES)
    parser.add_argument("folder", type=Path)
    args = parser.parse_args()
    write(args.family, args.folder)


if __name__ == "__main__":
    main()
