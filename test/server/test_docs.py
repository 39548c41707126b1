"""Every snippet of docs/clients.md, run as it stands."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from serving import REPOSITORY, Server

ADDRESS = "http://127.0.0.1:30000"
SNIPPETS = re.findall(
    r"```(python|bash)\n(.*?)```", (REPOSITORY / "docs" / "clients.md").read_text(), re.DOTALL
)


def title(snippet: tuple[str, str]) -> str:
    language, code = snippet
    calls = re.findall(r"client\.([\w.]+)\(|(/v1/[\w/]+|/health|bench_serving)", code)
    return f"{language}-{''.join(calls[0]) if calls else 'other'}"


@pytest.mark.parametrize("snippet", SNIPPETS, ids=title)
def test_a_snippet_runs(demo_server: Server, snippet: tuple[str, str]):
    language, code = snippet
    if "curl" in code and not shutil.which("curl"):
        pytest.skip("curl is not installed")
    code = code.replace(ADDRESS, demo_server.url)
    command = [sys.executable, "-c", code] if language == "python" else ["bash", "-euc", code]
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=240, cwd=REPOSITORY, env={**os.environ, "PATH": path}
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip()
    assert '"error"' not in done.stdout
    if "bench_serving" in code:
        assert re.search(r"Successful requests: +4\b", done.stdout), done.stdout
