"""Checkpoints made of headers and zero bytes, for tests of what a checkpoint contains. No torch."""

import json
import math
from pathlib import Path

ITEM_BYTES = {"BF16": 2, "F16": 2, "F32": 4, "F8_E4M3": 1, "U8": 1}
CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_hidden_layers": 2,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "hidden_size": 8,
    "moe_intermediate_size": 4,
    "max_position_embeddings": 64,
}


def write_safetensors(path: Path, tensors: dict[str, tuple[str, tuple[int, ...]]]) -> None:
    """`tensors`: name -> (safetensors dtype, shape); data are zeros."""
    header, end = {}, 0
    for name, (dtype, shape) in tensors.items():
        begin, end = end, end + ITEM_BYTES[dtype] * math.prod(shape)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(end))


def expert_tensors(
    layer: int, dtype: str = "BF16", experts: int = 4
) -> dict[str, tuple[str, tuple[int, ...]]]:
    """One MoE layer as Qwen3-MoE names it: hidden 8, intermediate 4."""
    shapes = {"gate_proj": (4, 8), "up_proj": (4, 8), "down_proj": (8, 4)}
    return {
        f"model.layers.{layer}.mlp.experts.{e}.{name}.weight": (dtype, shape)
        for e in range(experts)
        for name, shape in shapes.items()
    }


def write_checkpoint(folder: Path, dtype: str = "BF16", **config) -> Path:
    """Two MoE layers in two files with an index, and an embedding of 64 bytes (32 elements)."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG | config))
    (folder / "tokenizer.json").write_text("{}")
    files = {
        "model-00001-of-00002.safetensors": {"model.embed_tokens.weight": ("BF16", (4, 8))}
        | expert_tensors(0, dtype),
        "model-00002-of-00002.safetensors": expert_tensors(1, dtype),
    }
    weight_map = {}
    for file, tensors in files.items():
        write_safetensors(folder / file, tensors)
        weight_map |= dict.fromkeys(tensors, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder
