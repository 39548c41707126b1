"""Loading progress: bytes and rate, for the terminal and for /health."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from sglang.srt.plugins.hook_registry import HookType
from tqdm import tqdm

from sglang_ft import runtime
from sglang_ft.engine.hook import Hook

_REPORT_S = 0.25


def hooks(total_bytes: int) -> list[Hook]:
    """`total_bytes`: size of the checkpoint's tensors, for the bar's end; 0 when unknown."""

    def with_progress(weights: Iterable[tuple[str, torch.Tensor]], *args: Any, **kwargs: Any) -> Iterator:
        return _report(weights, total_bytes)

    return [
        Hook(
            "sglang.srt.model_loader.loader.DefaultModelLoader._get_all_weights",
            HookType.AFTER,
            with_progress,
            "(self, model_config, model)",
        )
    ]


def _report(
    weights: Iterable[tuple[str, torch.Tensor]], total_bytes: int
) -> Iterator[tuple[str, torch.Tensor]]:
    started = reported = time.monotonic()
    done = 0
    with tqdm(
        total=total_bytes or None, unit="B", unit_scale=True, desc="Loading weights", mininterval=0.5
    ) as bar:
        for name, tensor in weights:
            yield name, tensor
            done += tensor.nbytes
            bar.update(tensor.nbytes)
            now = time.monotonic()
            if now - reported > _REPORT_S:
                reported = now
                rate = done / (now - started)
                runtime.write("load", stage="weights", done=done, total=total_bytes, bytes_per_s=round(rate))
    runtime.write("load", stage="starting", done=done, total=total_bytes)
