"""Headers of a checkpoint's safetensors files: names, types and sizes, read without loading a tensor.

What a header says is checked against the index and the file's size, so that a missing or cut file is found in
milliseconds and not after minutes of loading. What the tensors mean is left to checkpoint.py.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_ft.errors import CheckpointError

INDEX = "model.safetensors.index.json"
_MAX_HEADER = 100_000_000  # bytes; the limit of the safetensors library
_LENGTH_BYTES = 8


@dataclass(frozen=True)
class TensorInfo:
    """One tensor of a file. `dtype` is the safetensors name, like BF16; `nbytes` counts its data."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


def read_checkpoint(folder: Path) -> list[TensorInfo]:
    """All tensors of the checkpoint in `folder`.

    Raises CheckpointError with every missing, damaged or incomplete file at once.
    """
    listed = _listed_tensors(folder)
    problems: list[str] = []
    tensors: list[TensorInfo] = []
    for file, names in sorted(listed.items()):
        try:
            found = read_header(folder / file)
        except CheckpointError as e:
            problems.append(str(e))
            continue
        absent = sorted(names - {t.name for t in found})
        if absent:
            problems.append(
                f"{file}: {len(absent)} tensors that {INDEX} lists are not in it, like {absent[0]}"
            )
        tensors += found
    if problems:
        raise CheckpointError(
            f"{folder}: the checkpoint is damaged\n" + "\n".join(f"  {p}" for p in problems)
        )
    return tensors


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files that make up the checkpoint: those of the index, else all. Raises CheckpointError."""
    return sorted(folder / name for name in _listed_tensors(folder))


def read_header_entries(path: Path) -> tuple[int, dict[str, Any]]:
    """Of a file that `read_header` found whole: where its data begins, and what the header says of each tensor."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        return _LENGTH_BYTES + length, _parse_header(path, file.read(length))


def read_header(path: Path) -> list[TensorInfo]:
    """The tensors of one safetensors file. Raises CheckpointError if it is missing or damaged."""
    if not path.is_file():
        raise CheckpointError(f"{path.name}: missing; download the checkpoint again")
    size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(_LENGTH_BYTES)
        if prefix == b"version ":
            raise CheckpointError(f"{path.name}: a Git LFS pointer, not the file; run: git lfs pull")
        length = int.from_bytes(prefix, "little")
        if len(prefix) < _LENGTH_BYTES or length > _MAX_HEADER:
            raise CheckpointError(f"{path.name}: not a safetensors file ({size} bytes)")
        if size < _LENGTH_BYTES + length:
            raise _cut(path, size, _LENGTH_BYTES + length, "for the header alone")
        header = _parse_header(path, file.read(length))
    tensors = [_tensor(path, name, entry) for name, entry in header.items()]
    end = max((entry["data_offsets"][1] for entry in header.values()), default=0)
    if size != _LENGTH_BYTES + length + end:
        raise _cut(path, size, _LENGTH_BYTES + length + end, "by its header")
    return tensors


def _listed_tensors(folder: Path) -> dict[str, set[str]]:
    """File name -> names of the tensors that must be in it. Without an index, every safetensors file."""
    index = folder / INDEX
    if not index.is_file():
        files = sorted(p.name for p in folder.glob("*.safetensors"))
        if not files:
            raise CheckpointError(f"{folder}: no *.safetensors file; other weight formats are not served")
        return {name: set() for name in files}
    try:
        weight_map = json.loads(index.read_text())["weight_map"]
    except (ValueError, KeyError, TypeError) as e:
        raise CheckpointError(f"{index}: not an index of safetensors files: {e!r}") from e
    listed: dict[str, set[str]] = defaultdict(set)
    for name, file in weight_map.items():
        listed[file].add(name)
    return dict(listed)


def _parse_header(path: Path, data: bytes) -> dict[str, Any]:
    try:
        header = json.loads(data)
    except ValueError as e:
        raise CheckpointError(f"{path.name}: not a safetensors file: {e}") from e
    header.pop("__metadata__", None)
    return header


def _tensor(path: Path, name: str, entry: Any) -> TensorInfo:
    try:
        begin, end = entry["data_offsets"]
        return TensorInfo(name, entry["dtype"], tuple(entry["shape"]), end - begin)
    except (KeyError, TypeError, ValueError) as e:
        raise CheckpointError(f"{path.name}: damaged header at tensor {name}: {e!r}") from e


def _cut(path: Path, actual: int, expected: int, by: str) -> CheckpointError:
    kind = "cut short" if actual < expected else "longer than it should be"
    return CheckpointError(
        f"{path.name}: {kind}: {actual} bytes on disk, {expected} expected {by}; download it again"
    )
