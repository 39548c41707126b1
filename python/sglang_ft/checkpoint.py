"""What a model directory holds, found before anything loads: config.json and tensor headers, no torch.

`summarize` returns the numbers that the plan and the memory check need, or raises one CheckpointError naming
every problem. A dense model is a valid answer: it has no experts and is served as SGLang serves it.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_ft.errors import CheckpointError, ConfigError
from sglang_ft.tensor_files import TensorInfo, read_checkpoint
from sglang_ft.weights import manifest

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "tiktoken.model",
    "vocab.json",
)
_CHECKPOINT_FILES = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja"]
DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
_FORMAT_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}

# Names of one number in the config.json of different families, in the order tried.
NUM_EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")
TOP_K = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts")
MOE_INTERMEDIATE = ("moe_intermediate_size", "expert_ffn_hidden_size", "intermediate_size")
TEXT_CONFIGS = ("text_config", "language_config", "llm_config")

# model.layers.3.mlp.experts.7.gate_proj.weight, model.layers.3.mlp.experts.gate_up_proj; not shared_experts.
_EXPERT = re.compile(
    r"(?:^|\.)layers\.(?P<layer>\d+)\.(?:\w+\.)*experts\.(?:(?P<expert>\d+)\.)?(?P<leaf>[\w.]+)$"
)
_NEXT_TOKEN_HEAD = re.compile(r"(?:^|\.)mtp\.")


@dataclass(frozen=True)
class ModelSummary:
    """Sizes of one checkpoint. Bytes are those of the checkpoint's own types; expert fields are 0 when dense.

    The layers of a next-token prediction head (MTP) are in `unused_bytes`, in no other number.
    """

    path: Path
    architecture: str
    num_layers: int
    num_moe_layers: int
    num_experts: int
    top_k: int
    hidden: int
    moe_intermediate: int
    dtype: str
    context_length: int
    expert_bytes: int
    pool_bytes: int
    other_bytes: int
    unused_bytes: int

    @property
    def is_moe(self) -> bool:
        return self.num_moe_layers > 0

    @property
    def total_bytes(self) -> int:
        """Bytes of all tensors in the files."""
        return self.pool_bytes + self.other_bytes + self.unused_bytes

    def experts_dtype(self, dtype: str) -> str:
        """The type in which SGLang will hold the weights, from its --dtype."""
        if dtype == "auto" and self.dtype == "float32":  # SGLang's rule
            return "bfloat16" if "Gemma" in self.architecture else "float16"
        names = {"auto": self.dtype, "half": "float16", "float": "float32"}
        return names.get(dtype, dtype)

    def pool_bytes_as(self, dtype: str) -> int:
        """Size of the pool when the experts are held as `dtype`. Raises ConfigError if they cannot be."""
        if dtype not in DTYPE_BYTES:
            raise ConfigError(f"--dtype {dtype}: experts are held as one of {', '.join(DTYPE_BYTES)}")
        return self.pool_bytes * DTYPE_BYTES[dtype] // DTYPE_BYTES[self.dtype]


def locate(model_path: str, revision: str | None = None) -> Path:
    """The local folder of a model: the path itself, or that of a Hugging Face name, downloaded if need be.

    Raises CheckpointError if it is neither.
    """
    if Path(model_path).is_dir() or not re.fullmatch(r"[\w.-]+/[\w.-]+", model_path):
        return Path(model_path)
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(model_path, revision=revision, allow_patterns=_CHECKPOINT_FILES))
    except Exception as e:  # the library raises dozens of kinds
        raise CheckpointError(
            f"{model_path}: neither a directory here nor a model that can be downloaded: {e}"
        ) from e


def summarize(folder: str | Path, needs_tokenizer: bool = True) -> ModelSummary:
    """Check and measure the checkpoint in `folder`.

    Raises CheckpointError if it is missing, damaged, without a tokenizer, or has experts in a format that
    this version cannot serve.
    """
    folder = Path(folder)
    config = read_config(folder)
    if needs_tokenizer and not any((folder / name).is_file() for name in TOKENIZER_FILES):
        raise CheckpointError(
            f"{folder}: no tokenizer (looked for {', '.join(TOKENIZER_FILES)}); "
            "name one with --tokenizer-path"
        )
    text = text_config(config)
    if manifest.is_converted(folder):
        return _summary_of_converted(folder, config)
    experts, others, unused = _sort(read_checkpoint(folder), num_layers=_number(text, ("num_hidden_layers",)))
    _check_completeness(folder, experts, _number(text, NUM_EXPERTS))
    summary = _summary(folder, config, experts, others, unused)
    _check_format(folder, experts, config, summary)
    return summary


def _summary_of_converted(folder: Path, config: Mapping[str, Any]) -> ModelSummary:
    """The experts by the manifest, the rest by headers."""
    found, text = manifest.read(folder), text_config(config)
    _, others, unused = _sort(read_checkpoint(folder), num_layers=_number(text, ("num_hidden_layers",)))
    first = found.layers[0]
    strides = [stride for _, stride, *_ in first["roles"].values()]
    return ModelSummary(
        path=folder,
        architecture=config["architectures"][0],
        num_layers=_number(text, ("num_hidden_layers",)),
        num_moe_layers=len(found.layers),
        num_experts=first["num_experts"],
        top_k=_number(text, TOP_K),
        hidden=first["hidden"],
        moe_intermediate=first["intermediate"],
        dtype=_FORMAT_DTYPES[first["format"]],
        context_length=_number(text, ("max_position_embeddings", "model_max_length", "max_sequence_length")),
        expert_bytes=sum(strides),
        pool_bytes=found.experts.nbytes,
        other_bytes=sum(t.nbytes for t in others),
        unused_bytes=sum(t.nbytes for t in unused),
    )


def summarize_config(folder: str | Path) -> ModelSummary:
    """Sizes by config.json alone, for --load-format dummy: gated experts, other weights not counted."""
    config = read_config(Path(folder))
    text = text_config(config)
    hidden, intermediate = _number(text, ("hidden_size",)), _number(text, MOE_INTERMEDIATE)
    num_experts, num_layers = _number(text, NUM_EXPERTS), _number(text, ("num_hidden_layers",))
    moe_layers = num_layers - _number(text, ("first_k_dense_replace",)) if num_experts else 0
    dtype = str(text.get("dtype") or text.get("torch_dtype") or "bfloat16")
    expert_bytes = 3 * hidden * intermediate * DTYPE_BYTES.get(dtype, 2) if num_experts else 0
    return ModelSummary(
        path=Path(folder),
        architecture=config["architectures"][0],
        num_layers=num_layers,
        num_moe_layers=moe_layers,
        num_experts=num_experts,
        top_k=_number(text, TOP_K),
        hidden=hidden,
        moe_intermediate=intermediate if num_experts else 0,
        dtype=dtype,
        context_length=_number(text, ("max_position_embeddings", "model_max_length", "max_sequence_length")),
        expert_bytes=expert_bytes,
        pool_bytes=expert_bytes * num_experts * moe_layers,
        other_bytes=0,
        unused_bytes=0,
    )


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of a model directory."""
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: no such directory; --model-path must name a downloaded checkpoint")
    path = folder / "config.json"
    if not path.is_file():
        raise CheckpointError(f"{folder}: no config.json; this is not a Hugging Face checkpoint")
    try:
        config = json.loads(path.read_text())
    except ValueError as e:
        raise CheckpointError(f"{path}: not JSON: {e}") from e
    if not isinstance(config, dict) or not config.get("architectures"):
        raise CheckpointError(f"{path}: names no architecture")
    return config


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of config.json about the language model; the whole where nothing is nested."""
    return next((config[name] for name in TEXT_CONFIGS if isinstance(config.get(name), dict)), config)


# One MoE layer's expert tensors by (expert number, or None for stacked ones; name within the expert).
_Layer = dict[tuple[int | None, str], TensorInfo]


def _sort(
    tensors: Iterable[TensorInfo], num_layers: int
) -> tuple[dict[int, _Layer], list[TensorInfo], list[TensorInfo]]:
    """Expert tensors by layer, other tensors, and those of next-token prediction layers."""
    experts: dict[int, _Layer] = defaultdict(dict)
    others, unused = [], []
    for tensor in tensors:
        match = _EXPERT.search(tensor.name)
        if _NEXT_TOKEN_HEAD.search(tensor.name) or _layer_of(tensor.name) >= num_layers:
            unused.append(tensor)
        elif match:
            number = match["expert"]
            experts[int(match["layer"])][int(number) if number else None, match["leaf"]] = tensor
        else:
            others.append(tensor)
    return dict(experts), others, unused


def is_expert(name: str, num_layers: int) -> bool:
    """Whether a tensor belongs to a routed expert of one of the model's own layers."""
    return bool(_EXPERT.search(name) and not _NEXT_TOKEN_HEAD.search(name) and _layer_of(name) < num_layers)


def _layer_of(name: str) -> int:
    """Number of the language model layer that a tensor belongs to; -1 outside of them."""
    match = re.search(r"^(?:model\.|backbone\.|language_model\.)*layers\.(\d+)\.", name)
    return int(match[1]) if match else -1


def _check_completeness(folder: Path, experts: Mapping[int, _Layer], num_experts: int) -> None:
    """Every MoE layer must hold all experts, each with the same tensors."""
    if num_experts > 0 and not experts:
        raise CheckpointError(
            f"{folder}: config.json names {num_experts} experts, but no tensor belongs to one"
        )
    problems = []
    for layer, tensors in sorted(experts.items()):
        numbered = {number for number, _ in tensors if number is not None}
        expected = num_experts or len(numbered)
        for leaf in sorted({leaf for number, leaf in tensors if number is not None}):
            missing = [e for e in range(expected) if (e, leaf) not in tensors]
            if missing:
                problems.append(
                    f"layer {layer}: {len(missing)} of {expected} experts lack {leaf}, like {missing[0]}"
                )
        for (number, leaf), tensor in tensors.items():
            if number is None and num_experts and tensor.shape[0] != num_experts:
                problems.append(
                    f"layer {layer}: {leaf} holds {tensor.shape[0]} experts, config.json {num_experts}"
                )
    if problems:
        raise CheckpointError(f"{folder}: experts are missing\n" + "\n".join(f"  {p}" for p in problems[:20]))


class FormatError(CheckpointError):
    """The checkpoint is sound, but this version cannot serve its experts; `summary` has its sizes."""

    def __init__(self, text: str, summary: ModelSummary) -> None:
        super().__init__(text)
        self.summary = summary


def _check_format(
    folder: Path, experts: Mapping[int, _Layer], config: Mapping[str, Any], summary: ModelSummary
) -> None:
    dtypes = {t.dtype for layer in experts.values() for t in layer.values()}
    if dtypes <= DTYPES.keys():
        return
    method = _quantization_method(folder, config)
    raise FormatError(
        f"{folder}: the experts are quantized ({method}; tensors of type {', '.join(sorted(dtypes))}); "
        "this version serves experts in BF16, FP16 and FP32",
        summary,
    )


def _quantization_method(folder: Path, config: Mapping[str, Any]) -> str:
    """Name of the quantization as the checkpoint gives it."""
    settings = config.get("quantization_config") or text_config(config).get("quantization_config") or {}
    separate = folder / "hf_quant_config.json"
    if not settings and separate.is_file():
        settings = json.loads(separate.read_text()).get("quantization", {})
    names = [settings.get(key) for key in ("quant_method", "quant_algo", "format", "fmt")]
    return " ".join(str(name) for name in names if name) or "no quantization_config"


def _summary(
    folder: Path,
    config: Mapping[str, Any],
    experts: Mapping[int, _Layer],
    others: list[TensorInfo],
    unused: list[TensorInfo],
) -> ModelSummary:
    text = text_config(config)
    pool = [t for layer in experts.values() for t in layer.values()]
    pool_bytes = sum(t.nbytes for t in pool)
    num_experts = _number(text, NUM_EXPERTS) if experts else 0
    largest = max(pool or others, key=lambda t: t.nbytes)
    return ModelSummary(
        path=folder,
        architecture=config["architectures"][0],
        num_layers=_number(text, ("num_hidden_layers",)),
        num_moe_layers=len(experts),
        num_experts=num_experts,
        top_k=_number(text, TOP_K) if experts else 0,
        hidden=_number(text, ("hidden_size",)),
        moe_intermediate=_number(text, MOE_INTERMEDIATE) if experts else 0,
        dtype=DTYPES.get(largest.dtype, largest.dtype),
        context_length=_number(text, ("max_position_embeddings", "model_max_length", "max_sequence_length")),
        expert_bytes=pool_bytes // (len(experts) * num_experts) if num_experts else 0,
        pool_bytes=pool_bytes,
        other_bytes=sum(t.nbytes for t in others),
        unused_bytes=sum(t.nbytes for t in unused),
    )


def _number(config: Mapping[str, Any], names: Iterable[str]) -> int:
    """The first of `names` that the config gives as a number; 0 when it gives none."""
    return next((config[name] for name in names if isinstance(config.get(name), int)), 0)
