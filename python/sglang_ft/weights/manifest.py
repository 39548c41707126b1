"""The manifest of an FTW folder: what its files hold, for which layout, and the checksum of every chunk.

FOLDER/ftw.json           this; written last, so that a folder that has it is whole
FOLDER/experts.ftw        one page of header, zeros up to DATA_OFFSET, then the pool byte for byte
FOLDER/*.safetensors      all other tensors, as in the checkpoint
FOLDER/config.json, ...   everything else of the checkpoint
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sglang_ft.errors import CheckpointError
from sglang_ft.worker.protocol import Role

if TYPE_CHECKING:
    from sglang_ft.experts.bank import BankPlan

NAME = "ftw.json"
EXPERTS = "experts.ftw"
VERSION = 1
CHUNK = 16 << 20
"""Bytes that one checksum covers, and of one read."""
DATA_OFFSET = 2 << 20
"""Where the pool begins in its file: a border of direct reads and of huge pages."""

_FORMAT = "sglang_ft weights"
_MAGIC = b"SGLFTWEX"
_HEADER = struct.Struct("<8sIIQ32s")  # magic, version, zero, bytes of the pool, identity


class WeightsError(CheckpointError):
    """A damaged, foreign, newer or changed FTW folder; the text names file, place and cure."""


@dataclass(frozen=True)
class File:
    """Size of a file's data and the CRC-32C of each CHUNK of it."""

    nbytes: int
    checksums: tuple[int, ...]


@dataclass(frozen=True)
class Manifest:
    """`others`: files that must be as they were written, config.json among them. `layers`: of each MoE layer its
    format, number of experts, sizes, and of each role (offset, stride, shape, dtype) in the pool. `identity` ties the
    expert file to this manifest."""

    made_by: str
    source: str
    source_hash: str
    layers: tuple[dict[str, Any], ...]
    experts: File
    others: dict[str, File]
    expert_tensors: int
    version: int = VERSION

    @property
    def identity(self) -> bytes:
        text = json.dumps([self.source_hash, self.layers, self.experts.nbytes], sort_keys=True)
        return hashlib.sha256(text.encode()).digest()

    def header(self) -> bytes:
        """The first bytes of the expert file."""
        return _HEADER.pack(_MAGIC, self.version, 0, self.experts.nbytes, self.identity)

    def write(self, folder: Path) -> None:
        """Writes it whole or not at all."""
        content = {"format": _FORMAT, **dataclasses.asdict(self)}
        content["checksum"] = _checksum(content)
        temporary = folder / (NAME + ".new")
        with temporary.open("w") as file:
            json.dump(content, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, folder / NAME)

    def place_of(self, offset: int) -> str:
        """Which expert the pool byte at `offset` belongs to, for errors."""
        for number, layer in enumerate(self.layers):
            for role, (begin, stride, *_) in layer["roles"].items():
                expert, end = (offset - begin) // stride, begin + stride * layer["num_experts"]
                if begin <= offset < end:
                    return f"{role.lower()} of expert {expert} in MoE layer {number}"
        return "between the banks"

    def check_layout(self, plan: BankPlan, path: Path) -> None:
        """Raises WeightsError unless the model's pool has exactly this layout."""
        wanted = describe_layers(plan)
        if len(wanted) != len(self.layers):
            raise WeightsError(
                f"{path}: made for {len(self.layers)} MoE layers, this model has {len(wanted)}; convert again"
            )
        for number, (ours, theirs) in enumerate(zip(wanted, self.layers, strict=True)):
            if ours != theirs:
                names = ", ".join(k for k in ours if ours[k] != theirs.get(k))
                raise WeightsError(
                    f"{path}: the experts of MoE layer {number} were converted with another {names} "
                    f"({theirs.get('format')}; now {ours['format']}): --dtype or config.json has changed; convert again"
                )


def describe_layers(plan: BankPlan) -> tuple[dict[str, Any], ...]:
    """The layout of a pool, as plain values."""
    layers = []
    for banks in plan.layers:
        spec = banks.spec
        roles = {
            Role(role).name: [
                view.offset,
                view.stride,
                list(view.shape),
                str(view.dtype).removeprefix("torch."),
            ]
            for role, view in banks.roles.items()
        }
        layers.append(
            {
                "format": spec.format.name,
                "num_experts": spec.num_experts,
                "hidden": spec.hidden,
                "intermediate": spec.intermediate,
                "roles": roles,
            }
        )
    return tuple(layers)


def is_converted(folder: Path) -> bool:
    """Whether a folder holds converted weights."""
    return (folder / NAME).is_file()


def read(folder: Path) -> Manifest:
    """The manifest of a folder, checked; sizes of the files too. Raises WeightsError."""
    path = folder / NAME
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError) as e:
        raise WeightsError(f"{path}: cannot be read: {e}; convert the checkpoint again") from e
    if not isinstance(content, dict) or content.pop("format", None) != _FORMAT:
        raise WeightsError(f"{path}: not a manifest of sglang_ft")
    if content.get("version") != VERSION:
        raise WeightsError(
            f"{path}: version {content.get('version')}, this sglang_ft reads version {VERSION}; "
            "update sglang_ft or convert the checkpoint again"
        )
    checksum = content.pop("checksum", None)
    if checksum != _checksum({"format": _FORMAT, **content}):
        raise WeightsError(f"{path}: damaged, its checksum is another; convert the checkpoint again")
    try:
        content["layers"] = tuple(content["layers"])
        content["experts"] = _file(content["experts"])
        content["others"] = {name: _file(entry) for name, entry in content["others"].items()}
        manifest = Manifest(**content)
    except (KeyError, TypeError, AttributeError) as e:
        raise WeightsError(f"{path}: not a manifest of sglang_ft: {e!r}") from e
    _check_sizes(folder, manifest)
    return manifest


def _check_sizes(folder: Path, manifest: Manifest) -> None:
    problems = []
    expected = {name: file.nbytes for name, file in manifest.others.items()}
    expected[EXPERTS] = DATA_OFFSET + manifest.experts.nbytes
    for name, nbytes in sorted(expected.items()):
        path = folder / name
        actual = path.stat().st_size if path.is_file() else -1
        if actual < 0:
            problems.append(f"{name}: missing")
        elif actual != nbytes:
            problems.append(f"{name}: {actual} bytes, {nbytes} were written; cut short or changed")
    if problems:
        raise WeightsError(
            f"{folder}: damaged; convert the checkpoint again\n" + "\n".join(f"  {p}" for p in problems)
        )
    with (folder / EXPERTS).open("rb") as file:
        header = file.read(DATA_OFFSET)
    if header != manifest.header().ljust(DATA_OFFSET, b"\0"):
        what = "not an expert file" if header[:8] != _MAGIC else "belongs to another manifest, or is damaged"
        raise WeightsError(
            f"{folder / EXPERTS}: {what} (before offset {DATA_OFFSET}); convert the checkpoint again"
        )


def _file(entry: dict[str, Any]) -> File:
    return File(entry["nbytes"], tuple(entry["checksums"]))


def _checksum(content: dict[str, Any]) -> str:
    text = json.dumps(content, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()
