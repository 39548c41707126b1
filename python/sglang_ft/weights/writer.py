"""Writes an FTW folder beside the experts themselves: everything else of a checkpoint, and the journal of a conversion.

A conversion works in FOLDER.partial, which becomes FOLDER in its last step. The journal there names the tensors that
are safely in the expert file, so that an interrupted conversion goes on where it stopped.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import torch

import sglang_ft
from sglang_ft.errors import CheckpointError
from sglang_ft.tensor_files import INDEX, TensorInfo, read_header_entries, weight_files
from sglang_ft.weights import manifest
from sglang_ft.weights.manifest import CHUNK, DATA_OFFSET, EXPERTS, File, Manifest, describe_layers
from sglang_ft.weights.reader import FileReader, checksum, checksums_of
from sglang_ft.weights.transfers import aligned_buffer
from sglang_ft.worker.memory import MappedFile

if TYPE_CHECKING:
    from sglang_ft.experts.bank import BankPlan

_JOURNAL = "journal.json"
_MOST_FILE_BYTES = 8 << 30
_LENGTH_BYTES = 8
_NOT_COPIED = (".safetensors", ".bin", ".pt", ".pth", ".gguf")


def hash_of_source(folder: Path) -> str:
    """Of a checkpoint's config, and names, sizes and headers of its weight files."""
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for path in weight_files(folder):
        with path.open("rb") as file:
            length = file.read(_LENGTH_BYTES)
            header = file.read(int.from_bytes(length, "little"))
        digest.update(f"{path.name} {path.stat().st_size}".encode() + header)
    return digest.hexdigest()


def identity_of_weights(folder: Path) -> str:
    """The same for a checkpoint and what it was converted to. Raises CheckpointError."""
    return manifest.read(folder).source_hash if manifest.is_converted(folder) else hash_of_source(folder)


class Journal:
    """Which tensors are in the expert file for good."""

    def __init__(self, folder: Path, source: str) -> None:
        """Starts anew, and empties `folder`, unless it was left by a conversion of the same `source`."""
        self._path, self._source = folder / _JOURNAL, source
        self.done: set[str] = set()
        try:
            content = json.loads(self._path.read_text())
            if content["source"] == source and (folder / EXPERTS).is_file():
                self.done = set(content["done"])
        except (OSError, ValueError, KeyError, TypeError):
            pass
        if not self.done and folder.exists():
            shutil.rmtree(folder)
        folder.mkdir(parents=True, exist_ok=True)

    def add(self, names: Iterable[str]) -> None:
        """To be called once the data of these tensors is on disk."""
        self.done |= set(names)
        temporary = self._path.with_suffix(".new")
        with temporary.open("w") as file:
            json.dump({"source": self._source, "done": sorted(self.done)}, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, self._path)

    def remove(self) -> None:
        self._path.unlink(missing_ok=True)


def open_experts(folder: Path, nbytes: int) -> MappedFile:
    """The pool as a file, with all its space taken, so that a full disk is noticed now. Raises OSError."""
    fd = os.open(folder / EXPERTS, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        os.posix_fallocate(fd, 0, DATA_OFFSET + nbytes)
    finally:
        os.close(fd)
    return MappedFile(folder / EXPERTS, DATA_OFFSET, nbytes)


def finish(
    folder: Path,
    source: Path,
    source_hash: str,
    plan: BankPlan,
    pool: torch.Tensor,
    others: dict[str, File],
    expert_tensors: int,
) -> Manifest:
    """Writes header, small files and manifest once `pool`, the mapped expert file, is full. Raises OSError."""
    copy_small_files(source, folder)
    result = Manifest(
        made_by=f"sglang_ft {sglang_ft.__version__}",
        source=source.name,
        source_hash=source_hash,
        layers=describe_layers(plan),
        experts=File(plan.nbytes, tuple(checksums_of(pool))),
        others={**others, "config.json": measure(folder / "config.json")},
        expert_tensors=expert_tensors,
    )
    with (folder / EXPERTS).open("r+b") as out:
        out.write(result.header())
        out.flush()
        os.fsync(out.fileno())
    result.write(folder)
    return result


def copy_small_files(source: Path, to: Path) -> None:
    """Configuration, tokenizer and whatever else is no weight."""
    for path in sorted(source.iterdir()):
        if path.is_file() and path.suffix not in _NOT_COPIED and path.name != INDEX:
            shutil.copyfile(path, to / path.name)


def write_others(
    source: Path, to: Path, wanted: Callable[[str], bool], progress: Callable[[int], None]
) -> dict[str, File]:
    """Copies the tensors of a checkpoint for which `wanted(name)`, into files of up to 8 GiB; their checksums.

    Raises CheckpointError or OSError.
    """
    parts: list[tuple[Path, int, TensorInfo, dict]] = []
    for path in weight_files(source):
        begin, header = read_header_entries(path)
        for name, entry in header.items():
            if wanted(name):
                at, end = entry["data_offsets"]
                info = TensorInfo(name, entry["dtype"], tuple(entry["shape"]), end - at)
                parts.append((path, begin + at, info, entry))
    groups: list[list[tuple[Path, int, TensorInfo, dict]]] = [[]]
    size = 0
    for part in parts:
        if groups[-1] and size + part[2].nbytes > _MOST_FILE_BYTES:
            groups.append([])
            size = 0
        groups[-1].append(part)
        size += part[2].nbytes
    names = [f"others-{i:05}-of-{len(groups):05}.safetensors" for i in range(1, len(groups) + 1)]
    return {
        name: _write_file(to / name, group, progress)
        for name, group in zip(names, groups, strict=True)
        if group
    }


def _write_file(
    path: Path, parts: list[tuple[Path, int, TensorInfo, dict]], progress: Callable[[int], None]
) -> File:
    header, at = {}, 0
    for _, _, info, entry in parts:
        header[info.name] = {**entry, "data_offsets": [at, at + info.nbytes]}
        at += info.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as out:
        out.write(len(text).to_bytes(_LENGTH_BYTES, "little") + text)
        for source, begin, info, _ in parts:
            _copy(source, begin, info.nbytes, out, progress)
        out.flush()
        os.fsync(out.fileno())
    return measure(path)


def _copy(source: Path, begin: int, nbytes: int, out, progress: Callable[[int], None]) -> None:  # type: ignore[no-untyped-def]
    with source.open("rb") as file:
        file.seek(begin)
        while nbytes > 0:
            data = file.read(min(nbytes, CHUNK))
            if not data:
                raise CheckpointError(f"{source}: ends before its header says; download it again")
            out.write(data)
            progress(len(data))
            nbytes -= len(data)


def measure(path: Path) -> File:
    """Size and checksums of a file as it is on disk."""
    reader, buffer = FileReader(path), aligned_buffer(CHUNK)
    nbytes = path.stat().st_size
    checksums = []
    try:
        for at in range(0, nbytes, CHUNK):
            piece = buffer[: min(CHUNK, nbytes - at)]
            reader.read(at, piece)
            checksums.append(checksum(piece))
    finally:
        reader.close()
    return File(nbytes, tuple(checksums))
