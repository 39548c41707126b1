"""Bad input through the real launcher: one clear message, exit status 2, before anything loads."""

import os
import socket
import subprocess
import sys

import handmade
import pytest


def refuse(*flags, **env):
    """What the launcher says about `flags`."""
    done = subprocess.run(
        [sys.executable, "-m", "sglang_ft.launch_server", *map(str, flags)],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, **env},
    )
    assert done.returncode == 2, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    assert "server_args=" not in done.stdout + done.stderr, "SGLang had started"
    return done.stderr


@pytest.fixture
def folder(tmp_path):
    return handmade.write_checkpoint(tmp_path)


def test_no_model():
    assert "--model-path" in refuse("--port", 41310)


def test_a_directory_that_is_not_there(tmp_path):
    assert "no such directory" in refuse("--model-path", tmp_path / "nowhere")


def test_a_cut_file(folder):
    file = folder / "model-00002-of-00002.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    assert "model-00002-of-00002.safetensors: cut short" in refuse("--model-path", folder)


def test_an_unknown_format(tmp_path):
    folder = handmade.write_checkpoint(tmp_path, "F8_E4M3", quantization_config={"quant_method": "fp8"})
    assert "the experts are quantized (fp8" in refuse("--model-path", folder)


def test_a_wrong_and_an_unknown_flag_of_ours(folder):
    assert "--ft-worker-threads: 'x' is not allowed" in refuse(
        "--model-path", folder, "--ft-worker-threads", "x"
    )
    assert "did you mean --ft-worker-isa" in refuse("--model-path", folder, "--ft-worker-iso", "avx2")


def test_a_type_that_experts_cannot_have(folder):
    assert "--dtype int3" in refuse("--model-path", folder, "--dtype", "int3")


def test_too_little_memory_and_a_port_in_use_are_said_together(folder):
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        text = refuse("--model-path", folder, "--port", port, "--ft-ram-reserve-gib", 60000)
    assert "2 problems" in text
    assert "60000.00 GiB needed" in text and "GiB short" in text
    assert f"--port {port}: the port is in use" in text


def test_another_sglang(folder, tmp_path):
    info = tmp_path / "elsewhere" / "sglang-0.4.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: sglang\nVersion: 0.4.0\n")
    path = os.pathsep.join([str(info.parent), os.environ.get("PYTHONPATH", "")])
    text = refuse("--model-path", folder, PYTHONPATH=path)
    assert "sglang 0.4.0 is installed" in text and "--ft-force-version" in text
