"""Conversion by SGLang's own loaders: every family's file holds, bit for bit, what a server would load."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import httpx
import pytest
import tiny_models
import torch
from serving import DEMO, Server

from sglang_ft.cli import main as cli

ROOT = Path(__file__).parents[2]
FAMILIES = {
    "qwen3_moe": "bfloat16",
    "qwen3_next": "float16",
    "glm4_moe": "float32",
    "gpt_oss": "bfloat16",
    "mixtral": "float16",
    "deepseek_v3": "bfloat16",
}

# Converts, then lets SGLang load the same checkpoint into memory in one go, and compares. One process for all:
# most of the time are imports.
SCRIPT = """
import logging, os, sys
from pathlib import Path
import torch
from safetensors.torch import load_file
from sglang_ft import checkpoint
from sglang_ft.engine import cpu_platform
os.environ.update(cpu_platform.required_environment())
logging.disable(logging.WARNING)
from sglang_ft.engine import convert
from sglang_ft.weights import manifest, reader
from sglang_ft.worker.memory import MemoryFile

convert._GROUP_BYTES = 20_000
for word in sys.argv[1:]:
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
    reader.read_experts(out, manifest.read(out), again, lambda n: None)
    assert again.any() and torch.equal(again, files[0].bytes[: plan.nbytes]), family
    was = {k: v for p in source.glob("*.safetensors") for k, v in load_file(p).items()}
    now = {k: v for p in out.glob("*.safetensors") for k, v in load_file(p).items()}
    assert now and len(now) + found.expert_tensors == len(was), family
    assert all(torch.equal(now[k], was[k]) for k in now), family
    print("same", family, dtype, found.expert_tensors, flush=True)
"""


def test_every_family_converts_to_what_is_loaded(tmp_path: Path) -> None:
    words = []
    for family, dtype in FAMILIES.items():
        folder = tiny_models.write(family, tmp_path / family, dtype=getattr(torch, dtype))
        words.append(f"{family}={dtype}={folder}")
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *words], capture_output=True, text=True, timeout=400, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr[-4000:]
    same = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("same")]
    assert same == list(FAMILIES)


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model, by the command."""
    out = tmp_path_factory.mktemp("converted") / "demo"
    command = [
        sys.executable,
        "-m",
        "sglang_ft.cli.main",
        "convert",
        "--model-path",
        str(DEMO),
        "--out",
        str(out),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    assert f"serve it with --model-path {out}" in done.stdout
    return out


def probabilities(server: Server) -> list[float]:
    body = {"model": "demo", "prompt": "The valley", "max_tokens": 24, "temperature": 0, "logprobs": 1}
    reply = httpx.post(server.url + "/v1/completions", json=body, timeout=120).raise_for_status().json()
    logprobs: list[float] = reply["choices"][0]["logprobs"]["token_logprobs"]
    return logprobs


def test_a_converted_model_answers_the_same(converted: Path, demo_server: Server) -> None:
    server = Server(converted, "--skip-server-warmup")
    try:
        server.wait_ready()
        assert probabilities(server) == probabilities(demo_server)
        assert "Experts read" in server.log
    finally:
        server.stop()


def test_a_damaged_folder_is_refused_at_start_in_words(
    converted: Path, capsys: pytest.CaptureFixture
) -> None:
    path = converted / "experts.ftw"
    with path.open("r+b") as file:
        file.seek(3 << 20)
        byte = file.read(1)[0]
        file.seek(3 << 20)
        file.write(bytes([byte ^ 16]))
    assert cli.main(["verify", str(converted)]) == 2
    assert "experts.ftw: damaged at" in capsys.readouterr().err
    server = Server(converted, "--skip-server-warmup")
    try:
        with pytest.raises(RuntimeError):
            server.wait_ready()
        assert "experts.ftw: damaged at" in server.log and "convert it again" in server.log
        assert "Traceback" not in server.log
    finally:
        server.stop()


def test_a_converted_folder_is_not_converted_again(converted: Path, tmp_path: Path, capsys) -> None:
    assert cli.main(["convert", "--model-path", str(converted), "--out", str(tmp_path / "x")]) == 2
    assert "is converted already" in capsys.readouterr().err
