"""Loading: the experts' own way from disk, and progress for the terminal and for /health."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from sglang.srt.plugins.hook_registry import HookType
from tqdm import tqdm

from sglang_ft import checkpoint, runtime
from sglang_ft.engine.hook import Hook
from sglang_ft.weights.lazy import Ahead, Reads

_REPORT_S = 0.25


TOTAL_BYTES = "SGLANG_FT_CHECKPOINT_BYTES"
"""Variable: size of the checkpoint's tensors, for the bar's end."""


def hooks(reads: Callable[[], LazyReads | None]) -> list[Hook]:
    """`reads` of the experts."""

    def with_progress(weights: Iterable[tuple[str, torch.Tensor]], *args: Any, **kwargs: Any) -> Iterator:
        return _report(weights, int(os.environ.get(TOTAL_BYTES, "0")), reads())

    return [
        Hook(
            "sglang.srt.model_loader.loader.DefaultModelLoader._get_all_weights",
            HookType.AFTER,
            with_progress,
            "(self, model_config, model)",
        )
    ]


class LazyReads:
    """The tensors of a checkpoint past the page cache: experts are read when the model stores them, others ahead."""

    def __init__(self, folder: Path, num_layers: int, experts: bool = True) -> None:
        """`experts` False: they are not wanted."""
        self._num_layers, self._experts = num_layers, experts
        self._reads = Reads(folder, self._count)
        self._others = Ahead(
            self._reads, [n for n in self._reads.names() if not checkpoint.is_expert(n, num_layers)]
        )
        self._lock = threading.Lock()
        self.nbytes = 0
        self.count: Callable[[int], None] = lambda nbytes: None
        """Gets the bytes that have been read."""
        self.filled: Callable[[int, int], None] = lambda address, nbytes: None
        """Gets address and size of what has been written."""

    def wants(self, name: str) -> bool:
        """Whether a tensor is to be loaded."""
        return self._experts or not checkpoint.is_expert(name, self._num_layers)

    def tensor(self, name: str) -> torch.Tensor | None:
        """An expert's as a LazyTensor, another as a real one; None where SGLang's own will do.

        Raises CheckpointError.
        """
        if checkpoint.is_expert(name, self._num_layers):
            return self._reads.tensor(name)
        return self._others.take(name)

    def wait(self) -> None:
        """Until everything stored so far is in place. Raises CheckpointError."""
        self._reads.wait()

    def close(self) -> None:
        self._reads.close()

    def _count(self, address: int, nbytes: int) -> None:
        self.filled(address, nbytes)
        with self._lock:
            self.nbytes += nbytes
            self.count(nbytes)


def _report(
    weights: Iterable[tuple[str, torch.Tensor]], total_bytes: int, reads: LazyReads | None
) -> Iterator[tuple[str, torch.Tensor]]:
    started = reported = time.monotonic()
    done = 0
    with tqdm(
        total=total_bytes or None, unit="B", unit_scale=True, desc="Loading weights", mininterval=0.5
    ) as bar:

        def count(nbytes: int) -> None:
            nonlocal done, reported
            done += nbytes
            bar.update(nbytes)
            now = time.monotonic()
            if now - reported > _REPORT_S:
                reported = now
                rate = done / (now - started)
                runtime.write("load", stage="weights", done=done, total=total_bytes, bytes_per_s=round(rate))

        if reads is not None:
            reads.count = count
        for name, tensor in weights:
            if reads is not None and not reads.wants(name):
                count(tensor.nbytes)
                continue
            ours = reads.tensor(name) if reads is not None else None
            yield name, tensor if ours is None else ours
            if ours is None:
                count(tensor.nbytes)
        if reads is not None:
            reads.wait()  # what the model has stored by now; the rest is waited for when the model is complete
            reads.count = lambda nbytes: None
    runtime.write("load", stage="starting", done=done, total=total_bytes)
