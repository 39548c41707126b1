"""The sglang-ft command: what it prints, its exit status, and that errors come without a traceback."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import handmade
import pytest

from sglang_ft.cli import docs, environment
from sglang_ft.cli.main import COMMANDS, main
from sglang_ft.config import FtConfig

ROOT = Path(__file__).parents[2]


def run(*arguments, **env):
    return subprocess.run(
        [sys.executable, "-m", "sglang_ft.cli.main", *arguments],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, **env},
    )


def test_help_lists_every_command(capsys):
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(f"  {name} " in text for name in COMMANDS)


def test_without_a_command_it_shows_the_help_and_fails():
    done = run()
    assert done.returncode == 2
    assert "usage: sglang-ft COMMAND" in done.stdout


def test_an_unknown_command_is_answered_with_the_nearest():
    done = run("docter")
    assert done.returncode == 2
    assert "docter: no such command (did you mean doctor?)" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("command", ["serve", "doctor"])
def test_a_wrong_setting_is_one_message_and_status_2(command):
    done = run(command, "--ft-worker-isa=sse9")
    assert done.returncode == 2
    assert "--ft-worker-isa: 'sse9' is not allowed; it takes one of auto" in done.stderr
    assert "Traceback" not in done.stderr


def test_doctor_reports_all_problems_with_their_cures(tmp_path):
    folder = handmade.write_checkpoint(tmp_path)
    (folder / "model-00001-of-00002.safetensors").unlink()
    flags = ("--ft-ram-reserve-gib=60000", "--ft-platform=cpu")
    done = run("doctor", "--port", "0", "--model-path", str(folder), *flags)
    assert done.returncode == 1, done.stdout + done.stderr
    problems = [line for line in done.stdout.splitlines() if line.startswith("PROBLEM")]
    assert [line.split()[1] for line in problems] == ["memory", "port", "model"]
    assert "--ft-ram-reserve-gib" in problems[0]
    assert "3 problems" in done.stdout


def test_doctor_starts_the_worker():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    flags = ("--ft-worker-isa=scalar", "--ft-worker-threads=1", "--ft-platform=cpu")
    done = run("doctor", "--port", str(port), *flags)
    assert "worker    starts: 1 threads, scalar" in done.stdout
    assert done.returncode == 0, done.stdout + done.stderr


def test_collect_env_names_versions_and_hides_secrets(monkeypatch, capsys):
    monkeypatch.setenv("HF_TOKEN", "hf_very_secret")
    monkeypatch.setenv("SGLANG_FT_WORKER_THREADS", "3")
    assert environment.main([]) == 0
    text = capsys.readouterr().out
    assert "sglang: 0.5.17" in text
    assert "SGLANG_FT_WORKER_THREADS: 3" in text
    assert "HF_TOKEN: (set)" in text and "very_secret" not in text


def test_the_documentation_of_the_command_line_is_up_to_date():
    assert (ROOT / "docs" / "cli.md").read_text() == docs.page(), "run: make docs"


def test_every_setting_is_documented_with_its_default_and_unit():
    page = docs.page()
    for o in FtConfig.options():
        row = next(line for line in page.splitlines() if f"`{o.flag}`" in line)
        assert o.env in row and o.help in row and o.default_text in row and o.unit in row


def test_anchors_marks_a_conversation(tmp_path):
    file = tmp_path / "chat.json"
    call = {"type": "function", "function": {"name": "look", "arguments": '{"at": "sky"}'}}
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": "", "reasoning_content": "Look.", "tool_calls": [call]},
        {"role": "tool", "content": "sunny"},
    ]
    file.write_text(json.dumps({"messages": messages}))
    demo = str(ROOT / "demo" / "model")
    done = run("anchors", "--model-path", demo, "--chat", str(file), "--ft-anchors", "brief,-</think>")
    assert done.returncode == 0, done.stderr
    assert "[system 9]<|im_start|>user" in done.stdout and "<think>[thinking" in done.stdout
    assert "</think>[" not in done.stdout and '{"at": "sky"}' in done.stdout
    assert "marker: 'brief'" in done.stderr


@pytest.mark.parametrize("text", ["no json", "{}", "[3]", '[{"role": "pirate", "content": "x"}]'])
def test_anchors_refuses_what_is_no_conversation(tmp_path, text, capsys):
    file = tmp_path / "chat.json"
    file.write_text(text)
    assert main(["anchors", "--model-path", str(ROOT / "demo" / "model"), "--chat", str(file)]) == 2
    assert str(file) in capsys.readouterr().err
