"""Keeps measured times for the next start: one JSON file, keyed by everything that they depend on."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sglang_ft.experts.policy import BranchTimes
from sglang_ft.worker import topology

if TYPE_CHECKING:
    from sglang_ft.experts.formats import LayerSpec

_VERSION = 3


def path() -> Path:
    """Of the file, under XDG_CACHE_HOME or ~/.cache."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "sglang-ft" / "calibration.json"


def key(gpu: str, cpu: str, threads: int, isa: str, format: str, hidden: int, intermediate: int) -> str:
    """What the times of a machine and a model depend on."""
    return "/".join(map(str, (_VERSION, gpu, cpu, threads, isa, format, hidden, intermediate)))


def machine_key(threads: int, isa: str, spec: LayerSpec) -> str:
    """The key of this machine with the current GPU."""
    import torch

    return key(
        torch.cuda.get_device_name(),
        topology.cpu_name(),
        threads,
        isa,
        spec.format.name,
        spec.hidden,
        spec.intermediate,
    )


def load(key: str) -> BranchTimes | None:
    """The times kept under `key`; None when there are none or the file is unreadable."""
    try:
        times = BranchTimes(**_read()[key])
    except (KeyError, TypeError):
        return None
    return times if _is_usable(times) else None


def save(key: str, times: BranchTimes) -> None:
    """Keeps `times`; whole or not at all. A folder that cannot be written only means measuring again."""
    entries = _read() | {key: dataclasses.asdict(times)}
    with contextlib.suppress(OSError):
        path().parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path().parent, delete=False) as file:
            json.dump(entries, file, indent=1)
        os.replace(file.name, path())


def _read() -> dict[str, dict[str, Any]]:
    try:
        entries = json.loads(path().read_text())
    except (OSError, ValueError):
        return {}
    return entries if isinstance(entries, dict) else {}


def _is_usable(times: BranchTimes) -> bool:
    values = dataclasses.astuple(times)
    numbers = all(isinstance(value, float | int) and 0 <= value < math.inf for value in values)
    return numbers and min(times.link_expert, times.cpu_expert, times.fill_blocks) > 0
