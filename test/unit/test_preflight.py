"""Checks before the start: version, port, memory."""

import socket
from importlib import metadata
from pathlib import Path

import handmade
import pytest

from sglang_ft import preflight
from sglang_ft.checkpoint import summarize
from sglang_ft.errors import CheckpointError, ConfigError, FtError, MemoryBudgetError
from sglang_ft.plan import StartPlan, render

GIB = 1 << 30


@pytest.fixture
def model(tmp_path):
    return summarize(handmade.write_checkpoint(tmp_path))


def test_the_installed_sglang_is_the_pinned_one():
    preflight.check_sglang_version()
    assert preflight.supported_sglang() == metadata.version("sglang")


def test_another_sglang_is_refused_unless_forced(monkeypatch):
    found = metadata.version
    monkeypatch.setattr(metadata, "version", lambda name: "0.4.0" if name == "sglang" else found(name))
    with pytest.raises(ConfigError, match=r"sglang 0\.4\.0 .* made for 0\.5\.17.*--ft-force-version"):
        preflight.check_sglang_version()
    preflight.check_sglang_version(force=True)


def test_a_port_in_use_is_refused_and_free_again_afterwards():
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        with pytest.raises(ConfigError, match=f"--port {port}: the port is in use"):
            preflight.check_port("127.0.0.1", port)
    preflight.check_port("127.0.0.1", port)


@pytest.mark.parametrize(
    "host,port,words",
    [
        ("127.0.0.1", 0, "1 to 65535"),
        ("127.0.0.1", 65536, "1 to 65535"),
        ("203.0.113.7", 41301, "no such address"),
    ],
)
def test_unusable_addresses(host, port, words):
    with pytest.raises(ConfigError, match=words):
        preflight.check_port(host, port)


def test_memory_counts_pool_dense_weights_and_reserve(model):
    needed = model.pool_bytes + model.other_bytes + GIB
    preflight.check_memory(model, 1.0, needed, dense_on_host=True)
    with pytest.raises(MemoryBudgetError, match=r"1\.00 GiB needed.*--ft-ram-reserve-gib"):
        preflight.check_memory(model, 1.0, needed - 1, dense_on_host=True)
    preflight.check_memory(model, 1.0, needed - model.other_bytes, dense_on_host=False)


def test_memory_of_experts_held_in_another_type(model):
    needed = 2 * model.pool_bytes
    preflight.check_memory(model, 0, needed, dense_on_host=False, dtype="float32")
    with pytest.raises(MemoryBudgetError):
        preflight.check_memory(model, 0, needed - 1, dense_on_host=False, dtype="float32")


def test_an_unknown_type_is_refused_by_the_flag_that_names_it(model):
    with pytest.raises(ConfigError, match="--dtype float12: .* bfloat16, float16, float32"):
        preflight.check_memory(model, 0, GIB, dense_on_host=False, dtype="float12")


def test_available_memory_is_capped_by_the_container(tmp_path):
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 64 kB\nMemAvailable: 8388608 kB\n")
    assert preflight.available_memory(meminfo, tmp_path) == 8 * GIB
    (tmp_path / "memory.current").write_text(f"{2 * GIB}\n")
    (tmp_path / "memory.stat").write_text(f"anon 1\ninactive_file {GIB}\n")
    (tmp_path / "memory.max").write_text("max\n")
    assert preflight.available_memory(meminfo, tmp_path) == 8 * GIB
    (tmp_path / "memory.max").write_text(f"{4 * GIB}\n")
    assert preflight.available_memory(meminfo, tmp_path) == 3 * GIB


def test_all_problems_are_reported_at_once():
    def fail(error):
        def check():
            raise error

        return check

    preflight.run(lambda: None)
    with pytest.raises(CheckpointError, match="^one$"):
        preflight.run(lambda: None, fail(CheckpointError("one")))
    with pytest.raises(FtError, match="2 problems:\n1. one\n2. two"):
        preflight.run(fail(CheckpointError("one")), fail(ConfigError("two")))


def test_the_plan_shows_what_a_user_wants_to_know(model):
    plan = StartPlan(model, "cpu", "bfloat16", 6, "avx512_bf16", 32768, 20 * GIB, 2.0)
    text = render(plan)
    for words in (
        "2 of 2 layers x 4, top 2",
        "6 threads, avx512_bf16",
        "32,768 tokens",
        "20.00 GiB available",
    ):
        assert words in text
    assert (
        len(
            {
                line.index(value)
                for line, value in zip(text.splitlines()[1:3], ("2 of 2", "1.5 KiB"), strict=True)
            }
        )
        == 1
    )


def test_the_plan_of_a_dense_model(tiny_checkpoint):
    model = summarize(Path(tiny_checkpoint("qwen3")))
    assert "dense model" in render(StartPlan(model, "cpu", "float32", 0, "none", 4096, GIB, 2.0))
