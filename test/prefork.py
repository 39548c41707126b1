"""Many servers for one import of SGLang: a process that imports everything once and forks a server per request.

For measurements over many checkpoints and flags, where starting `python -m sglang_ft.launch_server` each time
would take most of the hour. What runs is the launcher's own code; only the import is shared, and SGLang's child
processes are forked too instead of spawned.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
from serving import free_port


class Nursery:
    """The process that has imported SGLang."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdin is not None and self.process.stdout is not None
        self.requests, self.replies = self.process.stdin, self.process.stdout

    @contextlib.contextmanager
    def serving(self, model: Path, *flags: str, start_s: float = 240) -> Iterator[str]:
        """URL of a ready server, stopped at the end."""
        port = free_port()
        with tempfile.NamedTemporaryFile("r", prefix="server-", suffix=".log") as log:
            arguments = ["--model-path", str(model), "--port", str(port), *flags]
            self.requests.write(json.dumps({"arguments": arguments, "log": log.name}) + "\n")
            self.requests.flush()
            pid = int(self.replies.readline())
            try:
                wait_ready(f"http://127.0.0.1:{port}", pid, Path(log.name), start_s)
                yield f"http://127.0.0.1:{port}"
            finally:
                stop(pid)

    def close(self) -> None:
        self.requests.close()
        self.process.wait()


def wait_ready(url: str, pid: int, log: Path, start_s: float) -> None:
    deadline = time.monotonic() + start_s
    while time.monotonic() < deadline:
        if not Path(f"/proc/{pid}").exists():
            raise RuntimeError(f"server ended:\n{log.read_text(errors='replace')[-6000:]}")
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(url + "/health", timeout=30, verify=False).status_code == 200:
                return
        time.sleep(0.2)
    raise TimeoutError(f"server not ready after {start_s} s:\n{log.read_text(errors='replace')[-6000:]}")


def stop(pid: int) -> None:
    """Ends the server's process group; the nursery collects it."""
    for sign in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, sign)
        deadline = time.monotonic() + 10
        while Path(f"/proc/{pid}").exists() and time.monotonic() < deadline:
            time.sleep(0.1)


def main() -> None:
    """Imports, then forks a server for each line of standard input and answers with its process id."""
    children: set[int] = set()

    def reap(*_: object) -> None:
        with contextlib.suppress(ChildProcessError):
            while (pid := os.waitpid(-1, os.WNOHANG)[0]) != 0:
                children.discard(pid)

    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    import_everything()
    signal.signal(signal.SIGCHLD, reap)
    for line in sys.stdin:
        request = json.loads(line)
        pid = os.fork()
        if pid == 0:
            serve(request["arguments"], request["log"])
        children.add(pid)
        replies.write(f"{pid}\n")
        replies.flush()
    for pid in list(children):  # whoever asked for them is gone
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
    os._exit(0)  # tearing down what was imported takes seconds


def import_everything() -> None:
    from sglang_ft.engine import cpu_platform

    os.environ.update(cpu_platform.environment() | cpu_platform.required_environment(), HF_HUB_OFFLINE="1")
    for module in (
        "sglang.srt.entrypoints.http_server",
        "sglang.srt.managers.detokenizer_manager",
        "sglang.srt.managers.scheduler",
        "sglang.srt.models.registry",
        "sglang_ft.engine.entry",
        "sglang_ft.engine.experts",
        "sglang_ft.engine.loader",
        "sglang_ft.engine.routes",
    ):
        importlib.import_module(module)
    # SGLang asks for spawned children, which would import everything again.
    multiprocessing.set_start_method("fork")
    multiprocessing.set_start_method = lambda *args, **kwargs: None


def serve(arguments: list[str], log: str) -> None:
    """In the forked child; does not return."""
    os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    descriptor = os.open(log, os.O_WRONLY)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    status = 1
    try:
        from sglang_ft.launch_server import main as launch

        status = launch(arguments)
    finally:
        os._exit(status)


if __name__ == "__main__":
    main()
