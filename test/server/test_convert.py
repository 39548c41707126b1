"""Conversion by SGLang's own loaders: every family's file holds, bit for bit, what a server would load."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import tiny_models
import torch
from serving import DEMO, Server

from sglang_ft.cli import main as cli
from sglang_ft.weights import kept

ROOT = Path(__file__).parents[2]
FAMILIES = {
    "qwen3_moe": "bfloat16",
    "qwen3_next": "float16",
    "glm4_moe": "float32",
    "gpt_oss": "bfloat16",
    "mixtral": "float16",
    "deepseek_v3": "bfloat16",
}

# Converts the demo by the command. Then, for each family, converts, lets SGLang load the same checkpoint into memory in
# one go, and compares. One process for all: most of the time are imports.
SCRIPT = """
import sys
from pathlib import Path
import torch
from safetensors.torch import load_file
from sglang_ft import checkpoint
from sglang_ft.cli import main
assert main.main(["convert", "--model-path", sys.argv[1], "--out", sys.argv[2]]) == 0
from sglang_ft.engine import convert
from sglang_ft.weights import manifest, reader
from sglang_ft.worker.memory import MemoryFile

convert._GROUP_BYTES = 20_000
for word in sys.argv[3:]:
    family, dtype, folder = word.split("=")
    source, out = Path(folder), Path(folder + "-ftw")
    found = convert.convert(source, out, checkpoint.summarize(source), dtype)
    loader = convert._Loader(source, dtype)
    files = []
    def memory(plan):
        files.append(MemoryFile("pool", plan.nbytes))
        return files[0]
    plan = loader.build(memory)
    loader.load(loader.expert_weights())
    again = torch.zeros(plan.nbytes, dtype=torch.uint8)
    reader.read_experts(out, manifest.read(out), again)
    assert again.any() and torch.equal(again, files[0].bytes[: plan.nbytes]), family
    was = {k: v for p in source.glob("*.safetensors") for k, v in load_file(p).items()}
    now = {k: v for p in out.glob("*.safetensors") for k, v in load_file(p).items()}
    assert now and len(now) + found.expert_tensors == len(was), family
    assert all(torch.equal(now[k], was[k]) for k in now), family
    print("same", family, dtype, found.expert_tensors, flush=True)
"""


@pytest.fixture(scope="module")
def conversions(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The demo model, converted, and what the script says."""
    folder = tmp_path_factory.mktemp("converted")
    words = [str(DEMO), str(folder / "demo")]
    for family, dtype in FAMILIES.items():
        source = tiny_models.write(family, folder / family, dtype=getattr(torch, dtype))
        words.append(f"{family}={dtype}={source}")
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *words], capture_output=True, text=True, timeout=500, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return folder / "demo", done.stdout


@pytest.fixture
def converted(conversions: tuple[Path, str]) -> Path:
    return conversions[0]


def test_every_family_converts_to_what_is_loaded(conversions: tuple[Path, str]) -> None:
    same = [line.split()[1] for line in conversions[1].splitlines() if line.startswith("same")]
    assert same == list(FAMILIES)
    assert f"serve it with --model-path {conversions[0]}" in conversions[1]


def probabilities(server: Server) -> list[float]:
    body = {"model": "demo", "prompt": "The valley", "max_tokens": 24, "temperature": 0, "logprobs": 1}
    reply = httpx.post(server.url + "/v1/completions", json=body, timeout=120).raise_for_status().json()
    logprobs: list[float] = reply["choices"][0]["logprobs"]["token_logprobs"]
    return logprobs


@pytest.fixture(scope="module")
def own_pools(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """A place for kept pools, of which none is left in the end."""
    folder = str(tmp_path_factory.mktemp("run"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_RUNTIME_DIR", folder)
        yield {"XDG_RUNTIME_DIR": folder}
        for pool in kept.pools():
            kept.drop(pool.name)


KEEP = ("--skip-server-warmup", "--ft-keep-pool", "30")


@pytest.mark.parametrize("start", ["first", "second"])
def test_a_converted_model_answers_the_same_also_from_the_pool_of_an_earlier_start(
    converted: Path, demo_server: Server, own_pools: dict[str, str], start: str
) -> None:
    server = Server(converted, *KEEP, env=own_pools)
    try:
        server.wait_ready()
        assert probabilities(server) == probabilities(demo_server)
        (pool,) = kept.pools()
        assert pool.servers == 1 and pool.model == str(converted)
        read = "Experts read" in server.log
        taken = "kept from an earlier start, nothing of it is read" in server.log
        assert (read, taken) == ((True, False) if start == "first" else (False, True))
    finally:
        server.stop()


def test_a_damaged_folder_is_refused_at_start_in_words(
    converted: Path, own_pools: dict[str, str], capsys: pytest.CaptureFixture
) -> None:
    path = converted / "experts.ftw"
    with path.open("r+b") as file:
        file.seek(3 << 20)
        byte = file.read(1)[0]
        file.seek(3 << 20)
        file.write(bytes([byte ^ 16]))
    assert cli.main(["verify", str(converted)]) == 2
    assert "experts.ftw: damaged at" in capsys.readouterr().err
    assert len(kept.pools()) == 1, "of the folder as it was, which does not count any more"
    server = Server(converted, *KEEP, env=own_pools)
    try:
        with pytest.raises(RuntimeError):
            server.wait_ready()
        assert "experts.ftw: damaged at" in server.log and "convert it again" in server.log
        assert "Traceback" not in server.log
        assert kept.pools() == [], "the old pool of a changed checkpoint is dropped, none takes its place"
    finally:
        server.stop()


def test_a_converted_folder_is_not_converted_again(converted: Path, tmp_path: Path, capsys) -> None:
    assert cli.main(["convert", "--model-path", str(converted), "--out", str(tmp_path / "x")]) == 2
    assert "is converted already" in capsys.readouterr().err
