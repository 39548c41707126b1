"""Converts a checkpoint into an FTW folder: SGLang's own weight loader of the model writes into the file.

The pool of the model is then a file on disk instead of memory, so any model converts whose dense part can be built,
however large its experts are. Runs on the CPU, without a server.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

import sglang_ft
from sglang_ft import checkpoint
from sglang_ft.checkpoint import ModelSummary
from sglang_ft.engine.loader import LazyReads
from sglang_ft.errors import CheckpointError, FtError
from sglang_ft.experts.bank import BankPlan
from sglang_ft.weights import writer
from sglang_ft.weights.manifest import Manifest
from sglang_ft.worker.memory import GIB, MappedFile

_GROUP_BYTES = 1 << 30
"""So much is loaded, brought to disk and written down at a time."""


def convert(source: Path, out: Path, summary: ModelSummary, dtype: str) -> Manifest:
    """Writes `out`. Raises FtError, after which nothing of it is left; an interrupted conversion is gone on with.

    `summary` of `source`; `dtype` as SGLang's flag.
    """
    if out.exists():
        raise FtError(f"{out} exists already; name another folder with --out, or remove it")
    partial = out.with_name(out.name + ".partial")
    _check_space(summary, partial, dtype)
    journal = writer.Journal(partial, f"{writer.hash_of_source(source)} {dtype} {sglang_ft.__version__}")
    try:
        result = _convert(source, partial, summary, dtype, journal)
        os.rename(partial, out)
        return result
    except OSError as e:
        shutil.rmtree(partial, ignore_errors=True)
        raise FtError(f"{out}: writing failed: {e.strerror or e}; nothing was left behind") from e
    except FtError:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _check_space(summary: ModelSummary, partial: Path, dtype: str) -> None:
    need = summary.pool_bytes_as(summary.experts_dtype(dtype)) + summary.other_bytes + summary.unused_bytes
    parent = next(p for p in partial.parents if p.exists())
    there = sum(f.stat().st_blocks * 512 for f in partial.glob("*")) if partial.exists() else 0
    free = shutil.disk_usage(parent).free + there
    if need > free:
        raise FtError(
            f"{parent}: the converted model takes {need / GIB:.2f} GiB, {free / GIB:.2f} GiB are free there"
        )


def _convert(
    source: Path, partial: Path, summary: ModelSummary, dtype: str, journal: writer.Journal
) -> Manifest:
    loader = _Loader(source, dtype)
    file: MappedFile | None = None

    def make_file(plan: BankPlan) -> MappedFile:
        nonlocal file
        file = writer.open_experts(partial, plan.nbytes)
        return file

    plan = loader.build(make_file)
    assert file is not None
    total = summary.total_bytes
    with tqdm(total=total, unit="B", unit_scale=True, desc="Converting", mininterval=0.5) as bar:
        _load_experts(loader, file, journal, bar.update)
        expert_names = set(journal.done)
        others = writer.write_others(source, partial, lambda name: name not in expert_names, bar.update)
    result = writer.finish(
        partial, source, writer.hash_of_source(source), plan, file.bytes, others, len(expert_names)
    )
    journal.remove()
    return result


def _load_experts(
    loader: _Loader, file: MappedFile, journal: writer.Journal, progress: Callable[[int], object]
) -> None:
    group: list[tuple[str, torch.Tensor]] = []
    size = 0

    def store() -> None:
        nonlocal size
        loader.load(iter(group))
        file.flush()
        journal.add(name for name, _ in group)
        progress(size)
        group.clear()
        size = 0

    for name, tensor in loader.expert_weights():
        if name in journal.done:
            progress(tensor.nbytes)
            continue
        group.append((name, tensor))
        size += tensor.nbytes
        if size >= _GROUP_BYTES:
            store()
    if group:
        store()


class _Loader:
    """SGLang's model and weight loader of one checkpoint, on the CPU and outside of a server."""

    def __init__(self, source: Path, dtype: str) -> None:
        from sglang.srt import distributed
        from sglang.srt.configs.load_config import LoadConfig
        from sglang.srt.configs.model_config import ModelConfig
        from sglang.srt.layers.dp_attention import initialize_dp_attention
        from sglang.srt.model_loader.loader import get_model_loader
        from sglang.srt.runtime_context import publish
        from sglang.srt.server_args import prepare_server_args

        from sglang_ft.engine import cpu_platform, install

        install.install(cpu_platform.hooks())
        args = prepare_server_args(["--model-path", str(source), "--dtype", dtype, "--skip-tokenizer-init"])
        publish(args, role="convert")
        self._model_config = ModelConfig.from_server_args(args)
        if not distributed.model_parallel_is_initialized():
            with tempfile.TemporaryDirectory() as folder:
                distributed.init_distributed_environment(
                    1, 0, f"file://{folder}/rendezvous", 0, backend="gloo"
                )
                distributed.initialize_model_parallel()
            initialize_dp_attention(args, self._model_config)
        self._load_config = LoadConfig(
            load_format="auto", model_loader_extra_config={"enable_multithread_load": False}
        )
        self._loader = get_model_loader(load_config=self._load_config, model_config=self._model_config)
        self._layers = int(checkpoint.text_config(checkpoint.read_config(source))["num_hidden_layers"])
        self._reads = LazyReads(source, self._layers)

    def build(self, make_file: Callable[[BankPlan], MappedFile]) -> BankPlan:
        """Builds the model, its experts in the file that `make_file` gives."""
        from sglang.srt.model_loader.loader import _initialize_model
        from sglang.srt.model_loader.utils import set_default_torch_dtype

        from sglang_ft.engine.moe import ExpertLayers

        with set_default_torch_dtype(self._model_config.dtype), torch.device("cpu"):
            self._model = _initialize_model(self._model_config, self._load_config)
        experts = ExpertLayers(self._model, make_file=make_file)
        if not experts.layers:
            raise CheckpointError("a dense model: it has no experts to convert and loads as it is")
        return experts.plan

    def expert_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Names and tensors of the experts that the model loads, in the order of the files."""
        weights: Any = self._loader._get_all_weights(self._model_config, self._model)
        for name, tensor in weights:
            if checkpoint.is_expert(name, self._layers):
                lazy = self._reads.tensor(name)
                yield name, tensor if lazy is None else lazy

    def load(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Lets the model store these tensors; they are in the file's memory when it returns."""
        self._model.load_weights(weights)
        self._reads.wait()
