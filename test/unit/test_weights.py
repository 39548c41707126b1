"""Converted weights: round trip, damage of every kind in every place, failing writes, interrupted conversions."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from sglang_ft import checkpoint
from sglang_ft.cli import main as cli
from sglang_ft.engine import convert as engine
from sglang_ft.errors import FtError
from sglang_ft.experts.bank import BankPlan, ExpertPool, plan_banks
from sglang_ft.experts.formats import LayerSpec, find_format
from sglang_ft.experts.registration import Registration, expert_borders
from sglang_ft.weights import manifest, reader, transfers, writer
from sglang_ft.weights.loading import Loading
from sglang_ft.weights.manifest import DATA_OFFSET, EXPERTS, WeightsError
from sglang_ft.worker.protocol import Role

LAYERS, EXPERTS_OF_LAYER, HIDDEN, INTERMEDIATE = 2, 4, 64, 32
SPEC = LayerSpec(find_format(None, "bfloat16"), EXPERTS_OF_LAYER, HIDDEN, INTERMEDIATE)
PARTS = {
    "gate_proj": (INTERMEDIATE, HIDDEN),
    "up_proj": (INTERMEDIATE, HIDDEN),
    "down_proj": (HIDDEN, INTERMEDIATE),
}


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    for module in (reader, writer):
        monkeypatch.setattr(module, "CHUNK", 8192)
    monkeypatch.setattr(engine, "_GROUP_BYTES", 1)


@pytest.fixture
def source(tmp_path) -> Path:
    """A checkpoint in the names of Qwen3-MoE, in two files, with a next-token head that is never loaded."""
    folder = tmp_path / "source"
    folder.mkdir()
    config = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_hidden_layers": LAYERS,
        "num_experts": EXPERTS_OF_LAYER,
        "num_experts_per_tok": 2,
        "hidden_size": HIDDEN,
        "moe_intermediate_size": INTERMEDIATE,
        "max_position_embeddings": 64,
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")
    for layer in range(LAYERS):
        tensors = {
            f"model.layers.{layer}.mlp.experts.{e}.{name}.weight": torch.randn(shape).bfloat16()
            for e in range(EXPERTS_OF_LAYER)
            for name, shape in PARTS.items()
        }
        tensors[f"model.layers.{layer}.input_layernorm.weight"] = torch.randn(HIDDEN)
        tensors["mtp.layers.0.mlp.experts.0.up_proj.weight" if layer else "model.embed_tokens.weight"] = (
            torch.randn(700, HIDDEN)
        )
        save_file(tensors, folder / f"model-0000{layer + 1}-of-00002.safetensors")
    return folder


class FakeLoader:
    """Stands for SGLang's loader of a Qwen3-MoE; `stop_after` tensors it is interrupted."""

    stop_after = 10**9
    loaded: list[str]

    def __init__(self, source: Path, dtype: str) -> None:
        self._source = source
        FakeLoader.loaded = []

    def build(self, make_file: Callable[[BankPlan], object]) -> BankPlan:
        plan = plan_banks([SPEC] * LAYERS)
        self.pool = ExpertPool(plan, make_file(plan))
        return plan

    def expert_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        for path in sorted(self._source.glob("*.safetensors")):
            for name, tensor in load_file(path).items():
                if checkpoint.is_expert(name, LAYERS):
                    yield name, tensor

    def load(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            if len(FakeLoader.loaded) >= FakeLoader.stop_after:
                raise KeyboardInterrupt
            FakeLoader.loaded.append(name)
            words = name.split(".")
            layer, expert, part = int(words[2]), int(words[5]), words[6]
            if part == "down_proj":
                self.pool.bank(layer, Role.DOWN)[expert] = tensor
            else:
                begin = INTERMEDIATE if part == "up_proj" else 0
                self.pool.bank(layer, Role.GATE_UP)[expert, begin : begin + INTERMEDIATE] = tensor


@pytest.fixture
def convert(monkeypatch, source, tmp_path):
    """Converts the source; returns the folder."""
    monkeypatch.setattr(engine, "_Loader", FakeLoader)
    monkeypatch.setattr(FakeLoader, "stop_after", 10**9)
    out = tmp_path / "out"

    def run() -> Path:
        engine.convert(source, out, checkpoint.summarize(source), "auto")
        return out

    return run


def load(folder: Path) -> ExpertPool:
    pool = ExpertPool(plan_banks([SPEC] * LAYERS))
    Loading(folder, pool).wait()
    return pool


def expected(source: Path) -> dict[str, torch.Tensor]:
    return {k: v for path in source.glob("*.safetensors") for k, v in load_file(path).items()}


def test_every_bit_comes_back(convert, source):
    folder = convert()
    pool, want = load(folder), expected(source)
    for layer in range(LAYERS):
        for e in range(EXPERTS_OF_LAYER):
            at = f"model.layers.{layer}.mlp.experts.{e}."
            gate, up = pool.bank(layer, Role.GATE_UP)[e].split(INTERMEDIATE)
            assert torch.equal(gate, want[at + "gate_proj.weight"])
            assert torch.equal(up, want[at + "up_proj.weight"])
            assert torch.equal(pool.bank(layer, Role.DOWN)[e], want[at + "down_proj.weight"])
    others = expected(folder)
    assert others.keys() == {name for name in want if not checkpoint.is_expert(name, LAYERS)}
    assert all(torch.equal(others[name], want[name]) for name in others)


def test_each_piece_of_the_pool_is_pinned_once_it_is_full_and_not_before(convert, monkeypatch):
    folder = convert()
    plan = plan_banks([SPEC] * LAYERS)
    pool = ExpertPool(plan)
    want = load(folder).file.bytes
    experts = sum(layer.spec.expert_bytes * layer.spec.num_experts for layer in plan.layers)
    assert experts < plan.nbytes // 10, "these banks are mostly padding, so none is allowed for"
    pinned = []

    def pin(begin: int, end: int) -> str:
        assert torch.equal(pool.file.bytes[begin:end], want[begin:end]), "it is full"
        pinned.append((begin, end))
        return ""

    borders = expert_borders(plan, pool.file.size, piece=16384)
    registration = Registration(borders, 0, pin, lambda begin, end: None)
    Loading(folder, pool, filled=registration.filled).wait()
    registration._executor.shutdown()
    assert sorted(pinned) == list(zip(borders, borders[1:], strict=False)), "all before the end of loading"


def test_experts_that_are_there_are_not_read_but_the_rest_is_checked(convert, monkeypatch):
    folder = convert()
    pool = ExpertPool(plan_banks([SPEC] * LAYERS))
    Loading(folder, pool, experts=False).wait()
    assert not pool.file.bytes.any()
    path = folder / "others-00001-of-00001.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(WeightsError, match="others-00001"):
        Loading(folder, pool, experts=False).wait()


def test_the_folder_is_described_like_its_source(convert, source):
    folder = convert()
    assert sorted(p.name for p in folder.iterdir()) == [
        "config.json",
        EXPERTS,
        manifest.NAME,
        "others-00001-of-00001.safetensors",
        "tokenizer.json",
    ]
    ours, theirs = checkpoint.summarize(folder), checkpoint.summarize(source)
    same = {f.name for f in dataclasses.fields(ours)} - {"path", "pool_bytes"}
    assert all(getattr(ours, name) == getattr(theirs, name) for name in same)
    assert ours.pool_bytes >= theirs.pool_bytes, "banks are padded"


def test_verify_finds_a_whole_folder_whole(convert, capsys):
    folder = convert()
    assert cli.main(["verify", str(folder)]) == 0
    assert "whole" in capsys.readouterr().out


def regions(path: Path) -> Iterator[int]:
    """Offsets all over a file: each word of the first bytes, then further and further apart, and the last byte."""
    size = path.stat().st_size
    yield from range(0, min(size, 96), 11)
    yield from range(96, min(size, DATA_OFFSET), 500_009)
    yield from range(DATA_OFFSET, size, 16_381)
    yield size - 1


@pytest.mark.parametrize("name", [EXPERTS, manifest.NAME, "others-00001-of-00001.safetensors", "config.json"])
def test_a_flipped_bit_anywhere_is_found(convert, name):
    folder = convert()
    path = folder / name
    for offset in regions(path):
        with path.open("r+b") as file:
            file.seek(offset)
            byte = file.read(1)[0]
            file.seek(offset)
            file.write(bytes([byte ^ 1 << offset % 8]))
        with pytest.raises(WeightsError) as raised:
            load(folder)
        assert name in str(raised.value), (offset, str(raised.value))
        with path.open("r+b") as file:
            file.seek(offset)
            file.write(bytes([byte]))
    load(folder)


def test_damage_is_named_by_expert_and_offset(convert):
    folder = convert()
    plan = plan_banks([SPEC] * LAYERS)
    view = plan.layers[1].roles[Role.DOWN]
    offset = view.offset + 2 * view.stride
    with (folder / EXPERTS).open("r+b") as file:
        file.seek(DATA_OFFSET + offset)
        file.write(b"\xff\xff")
    found = manifest.read(folder)
    assert found.place_of(offset) == "down of expert 2 in MoE layer 1"
    with pytest.raises(
        WeightsError, match=r"experts.ftw: damaged at down of expert \d in MoE layer 1, offset \d+"
    ):
        load(folder)


@pytest.mark.parametrize("name", [EXPERTS, "others-00001-of-00001.safetensors", "config.json"])
@pytest.mark.parametrize("change", ["cut", "longer", "missing", "emptied"])
def test_files_of_another_size_are_found_before_anything_is_read(convert, name, change):
    folder = convert()
    path = folder / name
    size = path.stat().st_size
    if change == "missing":
        path.unlink()
    else:
        os.truncate(path, {"cut": size - 1, "longer": size + 1, "emptied": 0}[change])
    with pytest.raises(
        WeightsError, match=f"{name}: (missing|{path.stat().st_size if path.exists() else 0} bytes)"
    ):
        manifest.read(folder)


def rewrite(folder: Path, **change) -> None:
    path = folder / manifest.NAME
    content = json.loads(path.read_text()) | change
    del content["checksum"]
    content["checksum"] = manifest._checksum(content)
    path.write_text(json.dumps(content))


@pytest.mark.parametrize(
    "change, words",
    [
        ({"version": 2}, "version 2, this sglang_ft reads version 1; update"),
        ({"format": "another"}, "not a manifest of sglang_ft"),
        ({"experts": 3}, "not a manifest of sglang_ft"),
        ({"source_hash": "other"}, "belongs to another manifest"),
    ],
)
def test_foreign_and_newer_manifests_are_refused(convert, change, words):
    folder = convert()
    rewrite(folder, **change)
    with pytest.raises(WeightsError, match=words):
        manifest.read(folder)


def test_the_experts_of_another_conversion_are_refused(convert, tmp_path, source):
    first = convert()
    shutil.move(first, tmp_path / "first")
    (source / "config.json").write_text((source / "config.json").read_text() + " ")
    second = convert()
    shutil.copyfile(tmp_path / "first" / EXPERTS, second / EXPERTS)
    with pytest.raises(WeightsError, match="belongs to another manifest"):
        manifest.read(second)


def test_a_model_of_another_shape_or_type_is_refused(convert):
    folder = convert()
    for spec, words in (
        (dataclasses.replace(SPEC, hidden=32), "another hidden"),
        (dataclasses.replace(SPEC, format=find_format(None, "float16")), "now fp16.*--dtype"),
    ):
        with pytest.raises(WeightsError, match=words):
            Loading(folder, ExpertPool(plan_banks([spec] * LAYERS)))
    with pytest.raises(WeightsError, match="made for 2 MoE layers, this model has 3"):
        Loading(folder, ExpertPool(plan_banks([SPEC] * 3)))


def test_an_interrupted_conversion_goes_on_where_it_stopped(convert, source, tmp_path, monkeypatch):
    monkeypatch.setattr(FakeLoader, "stop_after", 7)
    with pytest.raises(KeyboardInterrupt):
        convert()
    assert not (tmp_path / "out").exists() and (tmp_path / "out.partial").exists()
    first = list(FakeLoader.loaded)
    monkeypatch.setattr(FakeLoader, "stop_after", 10**9)
    folder = convert()
    assert len(first) == 7 and not set(first) & set(FakeLoader.loaded), "nothing is done twice"
    assert len(FakeLoader.loaded) == LAYERS * EXPERTS_OF_LAYER * 3 - 7
    assert not (tmp_path / "out.partial").exists()
    pool, want = load(folder), expected(source)
    name = "model.layers.0.mlp.experts.0.down_proj.weight"
    assert torch.equal(pool.bank(0, Role.DOWN)[0], want[name])


def test_what_is_left_of_another_source_is_not_used(convert, source, tmp_path, monkeypatch):
    monkeypatch.setattr(FakeLoader, "stop_after", 7)
    with pytest.raises(KeyboardInterrupt):
        convert()
    (source / "config.json").write_text((source / "config.json").read_text() + " ")
    monkeypatch.setattr(FakeLoader, "stop_after", 10**9)
    convert()
    assert len(FakeLoader.loaded) == LAYERS * EXPERTS_OF_LAYER * 3


def test_a_journal_without_its_expert_file_is_not_believed(convert, tmp_path, monkeypatch):
    monkeypatch.setattr(FakeLoader, "stop_after", 7)
    with pytest.raises(KeyboardInterrupt):
        convert()
    (tmp_path / "out.partial" / EXPERTS).unlink()
    monkeypatch.setattr(FakeLoader, "stop_after", 10**9)
    convert()
    assert len(FakeLoader.loaded) == LAYERS * EXPERTS_OF_LAYER * 3


def test_nothing_is_overwritten(convert, tmp_path):
    convert()
    with pytest.raises(FtError, match="exists already"):
        convert()
    load(tmp_path / "out")


def test_a_full_disk_is_noticed_before_anything_is_written(convert, tmp_path, monkeypatch):
    monkeypatch.setattr(engine.shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 10, 5))
    with pytest.raises(FtError, match=r"takes \d+\.\d+ GiB, 0\.00 GiB are free"):
        convert()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["source"]


class FailsOnce:
    """The n-th call of a function raises that the disk is full."""

    def __init__(self, function: Callable, count: list[int], at: int) -> None:
        self.function, self.count, self.at = function, count, at

    def __call__(self, *args, **kwargs):
        self.count[0] += 1
        if self.count[0] == self.at:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return self.function(*args, **kwargs)


def test_every_write_may_fail_and_leaves_nothing(convert, tmp_path, monkeypatch):
    failed = 0
    for at in range(1, 200):
        with monkeypatch.context() as patch:
            count = [0]
            for name in ("fsync", "replace", "posix_fallocate", "rename"):
                patch.setattr(os, name, FailsOnce(getattr(os, name), count, at))
            patch.setattr(writer, "_copy", FailsOnce(writer._copy, count, at))
            patch.setattr(writer.shutil, "copyfile", FailsOnce(shutil.copyfile, count, at))
            try:
                convert()
            except FtError as e:
                failed += 1
                assert "No space left on device; nothing was left behind" in str(e)
                assert sorted(p.name for p in tmp_path.iterdir()) == ["source"], at
                continue
        break
    assert failed > 30, "there are that many writes"
    load(tmp_path / "out")


def test_a_folder_without_permission_is_refused_in_words(convert, tmp_path, monkeypatch):
    def refuse(*args, **kwargs):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(writer.os, "posix_fallocate", refuse)
    with pytest.raises(FtError, match="Permission denied"):
        convert()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["source"]


@pytest.fixture
def no_io_uring(monkeypatch):
    def refuse(depth):
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(transfers, "_ByKernel", refuse)


def test_file_systems_without_direct_reads_are_read_through_the_cache(convert, source, monkeypatch):
    folder = convert()
    real = os.open

    def no_direct(path, flags, *args, **kwargs):
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(path, flags, *args, **kwargs)

    monkeypatch.setattr(reader.os, "open", no_direct)
    name = "model.layers.1.mlp.experts.3.down_proj.weight"
    assert torch.equal(load(folder).bank(1, Role.DOWN)[3], expected(source)[name])


def test_reads_that_come_in_pieces(convert, source, monkeypatch, no_io_uring):
    folder = convert()
    real = os.preadv
    monkeypatch.setattr(reader.os, "preadv", lambda fd, to, at: real(fd, [to[0][:1000]], at))
    name = "model.layers.0.mlp.experts.1.down_proj.weight"
    assert torch.equal(load(folder).bank(0, Role.DOWN)[1], expected(source)[name])


def test_a_disk_error_is_named_with_its_place(convert, monkeypatch, no_io_uring):
    folder = convert()

    def broken(*args):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(reader.os, "preadv", broken)
    with pytest.raises(WeightsError, match=r"experts.ftw: reading at offset \d+ failed: Input/output error"):
        load(folder)


@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 4095, 4096, 4119, 4120, 100_003])
def test_checksums_are_crc32c(size):
    data = torch.randint(0, 256, (size,), dtype=torch.uint8)
    want = 0xFFFFFFFF
    for byte in data.tolist():
        want ^= byte
        for _ in range(8):
            want = want >> 1 ^ (0x82F63B78 if want & 1 else 0)
    assert reader.checksum(data) == want ^ 0xFFFFFFFF
