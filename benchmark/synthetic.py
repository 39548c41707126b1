"""A checkpoint of any MoE shape with random weights, whose router gives a set locality, for any engine.

Names and shapes are those of the architecture in transformers. Weights are N(0, 0.02), embeddings N(0, 1), the rows of
routers are scaled by exp(locality * n), n the quantiles of a normal. Vectors (norms, biases, decay rates) are as
transformers initialises them, so that norms pass their input on unscaled. Experts are stretches of one random block
(sglang_ft/experts/synthetic.py). A byte-level tokenizer is written beside. Quantized formats are not written: a
quantization_config is left out. A model with a vision tower also needs the files of its processor, copied by hand.

    python benchmark/synthetic.py --config config.json --out DIR --layers 8 --locality 0.49

Locality 0.49 gives 16 % LRU misses where 37 % of 40 x 256 experts, top 8, have a slot; 0.87 gives 39 % for 11 % of
43 x 256, top 6 (replay.find_locality). Needs a few hundred MB of memory.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.core_model_loading import revert_weight_conversion

from sglang_ft.checkpoint import DTYPES, text_config
from sglang_ft.experts.synthetic import STD, NormalBlock, scale_router
from sglang_ft.tensor_files import INDEX

SHARD_BYTES = 4 << 30
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>")
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_DRAW = 1 << 24  # elements drawn at once
_EXPERT = re.compile(r"\.experts\.(?P<number>\d+\.)?")
_ROUTER = re.compile(r"\.(gate|router)(\.wg)?\.weight$")
_EMBEDDING = re.compile(r"(embed_tokens|word_embeddings|wte)\.weight$")


def write(
    config: dict[str, Any],
    folder: Path,
    locality: float = 0.0,
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Writes checkpoint and tokenizer for a config.json into `folder`, one tensor at a time."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(_plain(config, dtype), indent=2) + "\n")
    tensors = skeleton(folder, seed)
    write_shards(folder, tensors, Values(tensors, locality, dtype, seed), shard_bytes)
    byte_tokenizer(text_config(config)["vocab_size"]).save_pretrained(folder)


def cut_layers(config: dict[str, Any], layers: int) -> dict[str, Any]:
    """The config with its first `layers` layers; lists with an entry a layer are cut, too."""
    config = json.loads(json.dumps(config))
    text: Any = text_config(config)
    old = text["num_hidden_layers"]
    if not 1 <= layers <= old:
        raise SystemExit(f"--layers {layers}: the config has {old}")
    cut = {k: v[:layers] for k, v in text.items() if isinstance(v, list) and len(v) == old}
    text.update(cut, num_hidden_layers=layers)
    return config


def _plain(config: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """The config of an unquantized checkpoint of this type."""
    config = json.loads(json.dumps(config))
    for part in (config, text_config(config)):
        for name in ("quantization_config", "torch_dtype"):
            part.pop(name, None)  # type: ignore[attr-defined]
        part["dtype"] = str(dtype).removeprefix("torch.")  # type: ignore[index]
    return config


def skeleton(folder: Path, seed: int) -> dict[str, torch.Tensor]:
    """All tensors of the checkpoint by name: vectors with their values, everything else on the meta device."""
    config = transformers.AutoConfig.from_pretrained(folder)
    model_class = getattr(transformers, config.architectures[0], None)
    if model_class is None:
        raise SystemExit(f"transformers {transformers.__version__} has no {config.architectures[0]}")
    with torch.device("meta"):
        model = model_class(config)
    for module in model.modules():
        _allocate_vectors(module)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model.initialize_weights()
    tied = model.all_tied_weights_keys
    tensors = {name: tensor for name, tensor in model.state_dict().items() if name not in tied}
    for name, tensor in tensors.items():
        if not tensor.is_floating_point():
            raise SystemExit(f"{name}: a table of {tensor.dtype}, which cannot be drawn here")
    if config.model_type.startswith("qwen3_5_moe"):
        return (
            tensors  # the hub's files stack the experts, as transformers' model does; it would unstack them
        )
    return revert_weight_conversion(model, tensors)


def _allocate_vectors(module: torch.nn.Module) -> None:
    for name, tensor in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]:
        if tensor.dim() < 2:
            vector = torch.zeros_like(tensor, device="cpu")
            is_parameter = isinstance(tensor, torch.nn.Parameter)
            setattr(module, name, torch.nn.Parameter(vector) if is_parameter else vector)


class Values:
    """Draws the values of a skeleton's tensors, piece by piece."""

    def __init__(
        self, tensors: dict[str, torch.Tensor], locality: float, dtype: torch.dtype, seed: int
    ) -> None:
        self.tensors, self.locality, self.dtype = tensors, locality, dtype
        self._generator = torch.Generator().manual_seed(seed)
        elements = sum(t.numel() for name, t in tensors.items() if _EXPERT.search(name))
        self._block = NormalBlock(dtype, seed, elements)
        self._num_experts = 0  # taken from the block so far

    def of(self, name: str) -> Iterator[torch.Tensor]:
        """The elements of a tensor, in order, as contiguous pieces of `dtype`. For each tensor once."""
        tensor, expert = self.tensors[name], _EXPERT.search(name)
        if not tensor.is_meta:
            yield tensor.detach().to(self.dtype)
        elif expert:
            yield from self._experts(tensor if expert["number"] is None else tensor.unsqueeze(0))
        elif _ROUTER.search(name):
            yield self._router(tensor.shape)
        else:
            yield from self._normal(tensor.numel(), 1.0 if _EMBEDDING.search(name) else STD)

    def _experts(self, stacked: torch.Tensor) -> Iterator[torch.Tensor]:
        piece = torch.empty(stacked.shape[1:], dtype=self.dtype)
        for _ in range(len(stacked)):
            self._block.copy_to(piece, self._num_experts)
            self._num_experts += 1
            yield piece

    def _router(self, shape: torch.Size) -> torch.Tensor:
        weight = torch.randn(shape, generator=self._generator) * STD
        scale_router(weight, self.locality, self._generator)
        return weight.to(self.dtype)

    def _normal(self, count: int, std: float) -> Iterator[torch.Tensor]:
        for begin in range(0, count, _DRAW):
            piece = torch.randn(min(_DRAW, count - begin), generator=self._generator)
            yield piece.mul_(std).to(self.dtype)


def write_shards(folder: Path, tensors: dict[str, torch.Tensor], values: Values, shard_bytes: int) -> None:
    """Writes safetensors files of about `shard_bytes`, at least one tensor each, and their index."""
    shards: list[list[str]] = [[]]
    size = total = 0
    for name, tensor in tensors.items():
        nbytes = tensor.numel() * values.dtype.itemsize
        if shards[-1] and size + nbytes > shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size, total = size + nbytes, total + nbytes
    files = {f"model-{i:05}-of-{len(shards):05}.safetensors": names for i, names in enumerate(shards, 1)}
    for file, names in files.items():
        _write_shard(folder / file, {name: tensors[name].shape for name in names}, values)
    index = {
        "metadata": {"total_size": total},
        "weight_map": {name: file for file, names in files.items() for name in names},
    }
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _write_shard(path: Path, shapes: dict[str, torch.Size], values: Values) -> None:
    """The format: length of the header (8 bytes), header (JSON), then all data; the library needs them in memory."""
    dtype = {torch_name: name for name, torch_name in DTYPES.items()}[
        str(values.dtype).removeprefix("torch.")
    ]
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        begin, end = end, end + shape.numel() * values.dtype.itemsize
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # data are to be aligned
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in shapes:
            for piece in values.of(name):
                file.write(piece.view(-1).view(torch.uint8).numpy())


def byte_tokenizer(vocab_size: int) -> transformers.PreTrainedTokenizerFast:
    """One token a byte, special tokens, and fillers that no text gives, so that every id has a text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*alphabet, *SPECIAL_TOKENS]
    tokens += [f"[{i}]" for i in range(len(tokens), vocab_size)]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=SPECIAL_TOKENS[0],
        eos_token=SPECIAL_TOKENS[2],
        pad_token=SPECIAL_TOKENS[0],
        chat_template=CHAT_TEMPLATE,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", type=Path, required=True, help="a model's config.json")
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--layers", type=int, help="only the first so many layers")
    parser.add_argument("--locality", type=float, default=0.0, help="of the router; 0: uniform (default)")
    parser.add_argument("--dtype", choices=DTYPES.values(), default="bfloat16")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    config = json.loads(args.config.read_text())
    if args.layers:
        config = cut_layers(config, args.layers)
    write(config, args.out, args.locality, getattr(torch, args.dtype), args.seed)


if __name__ == "__main__":
    main()
