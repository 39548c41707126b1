"""Bad input to the launcher: exit status 2 and one message that names the cure, before anything loads."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import handmade
import pytest

PORT = "41599"


def launch(*arguments: str | Path, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "sglang_ft.launch_server", "--port", PORT, *map(str, arguments)]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=120, env={**os.environ, **(env or {})}
    )


def refusal(*arguments: str | Path, env: dict[str, str] | None = None) -> str:
    """The message of a launch that must fail."""
    ended = launch(*arguments, env=env)
    assert ended.returncode == 2, (ended.returncode, ended.stderr[-2000:])
    assert "Traceback" not in ended.stderr
    lines = ended.stderr.strip().splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("sglang_ft: "))
    assert first == 0, f"something comes before the message: {ended.stderr}"
    return ended.stderr


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return handmade.write_checkpoint(tmp_path / "model")


def test_no_model():
    assert "--model-path" in refusal()


def test_a_missing_directory(tmp_path):
    text = refusal("--model-path", tmp_path / "nowhere")
    assert "nowhere: no such directory" in text and "--model-path" in text


def test_a_directory_without_config(tmp_path):
    assert "no config.json" in refusal("--model-path", tmp_path)


def test_a_broken_config(model):
    (model / "config.json").write_text('{"architectures": [')
    assert "config.json: not JSON" in refusal("--model-path", model)


def test_a_missing_shard(model):
    (model / "model-00002-of-00002.safetensors").unlink()
    assert "model-00002-of-00002.safetensors" in refusal("--model-path", model)


def test_a_cut_tensor_file(model):
    shard = model / "model-00002-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:-40])
    text = refusal("--model-path", model)
    assert f"{shard.name}: cut short: 2080 bytes on disk, 2120 expected" in text


def test_a_file_that_is_no_safetensors(model):
    (model / "model-00001-of-00002.safetensors").write_bytes(b"<html>404</html>")
    assert "model-00001-of-00002.safetensors" in refusal("--model-path", model)


def test_a_format_that_is_not_served_yet(tmp_path):
    settings = {"quant_method": "fp8", "fmt": "e4m3"}
    model = handmade.write_checkpoint(tmp_path / "fp8", dtype="F8_E4M3", quantization_config=settings)
    text = refusal("--model-path", model)
    assert "quantized (fp8" in text and "BF16, FP16 and FP32" in text


def test_no_tokenizer(model):
    (model / "tokenizer.json").unlink()
    assert "--tokenizer-path" in refusal("--model-path", model)


def test_too_little_memory_gives_the_numbers(model):
    text = refusal("--model-path", model, "--ft-ram-reserve-gib", "60000")
    assert "60000.00 GiB" in text and "available" in text and "--ft-ram-reserve-gib" in text


def test_a_port_in_use(model):
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = str(holder.getsockname()[1])
        assert "the port is in use" in refusal("--model-path", model, "--port", port)


@pytest.mark.parametrize(
    "arguments, words",
    [
        (("--ft-worker-threads", "many"), ("--ft-worker-threads", "'many'", "0 to 1,024")),
        (("--ft-worker-isa", "mmx"), ("--ft-worker-isa", "avx512_bf16")),
        (("--ft-worker-thread", "4"), ("no such flag", "--ft-worker-threads")),
        (("--ft-ram-reserve-gib",), ("the value is missing",)),
        (("--ft-platform", "gpu"), ("--ft-platform gpu",)),
    ],
)
def test_a_wrong_flag(model, arguments, words):
    text = refusal("--model-path", model, *arguments)
    assert all(word in text for word in words), text


def test_a_wrong_environment_variable(model):
    text = refusal("--model-path", model, env={"SGLANG_FT_WORKER_ISA": "mmx"})
    assert "SGLANG_FT_WORKER_ISA" in text
    text = refusal("--model-path", model, env={"SGLANG_FT_WORKER_IAS": "amx"})
    assert "did you mean SGLANG_FT_WORKER_ISA?" in text


def test_an_unsupported_sglang(model, tmp_path):
    metadata = tmp_path / "other" / "sglang-0.4.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: sglang\nVersion: 0.4.0\n")
    path = os.pathsep.join([str(metadata.parent), os.environ.get("PYTHONPATH", "")])
    text = refusal("--model-path", model, env={"PYTHONPATH": path})
    assert "sglang 0.4.0 is installed" in text and "0.5.17" in text and "--ft-force-version" in text


def test_a_worker_that_was_not_built(model, tmp_path):
    text = refusal("--model-path", model, env={"SGLANG_FT_BIN_DIR": str(tmp_path)})
    assert "cpu_worker is not in" in text and "pip install" in text


def test_all_problems_at_once(model, tmp_path):
    text = refusal(
        "--model-path", model, "--ft-ram-reserve-gib", "60000", env={"SGLANG_FT_BIN_DIR": str(tmp_path)}
    )
    assert "2 problems" in text and "60000.00 GiB" in text and "cpu_worker is not in" in text


def test_a_refusal_takes_seconds(model):
    start = time.monotonic()
    refusal("--model-path", model, "--ft-worker-isa", "mmx")
    assert time.monotonic() - start < 20, "SGLang was imported before the check"


def test_help_lists_our_flags_with_defaults_and_units():
    ended = launch("--help")
    assert ended.returncode == 0
    text = " ".join(ended.stdout.split())
    for words in (
        "--ft-worker-threads",
        "--ft-ram-reserve-gib",
        "(default: 2.0 GiB)",
        "[SGLANG_FT_WORKER_ISA]",
    ):
        assert words in text
    assert "--tensor-parallel-size" in text or "--tp-size" in text, "SGLang's flags are listed too"


def test_a_flag_that_neither_knows(model):
    ended = launch("--model-path", model, "--frobnicate")
    assert ended.returncode == 2
    assert "--frobnicate" in ended.stderr
