"""Starts real servers for tests: `python -m sglang_ft.launch_server` on a free port, with its log at hand."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil

START_S = 600
REPOSITORY = Path(__file__).parents[1]
DEMO = REPOSITORY / "demo" / "model"


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def _get(url: str) -> httpx.Response:
    """Without reading certificates first, which takes 50 ms of CPU time each time."""
    return httpx.get(url, timeout=30, verify=False)


class Server:
    """A server process and what one wants to know of it."""

    def __init__(
        self,
        model: Path | str,
        *flags: str,
        env: dict[str, str] | None = None,
        module: str = "sglang_ft.launch_server",
    ) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log_file = tempfile.NamedTemporaryFile("w+", prefix="server-", suffix=".log")
        self.started, self.ready_after = time.monotonic(), math.inf
        command = [sys.executable, "-m", module, "--model-path", str(model)]
        self.process = subprocess.Popen(
            [*command, "--port", str(self.port), *flags],
            stdout=self.log_file,
            stderr=subprocess.STDOUT,
            env={**os.environ, "HF_HUB_OFFLINE": "1", **(env or {})},
            start_new_session=True,
        )

    @property
    def log(self) -> str:
        return Path(self.log_file.name).read_text(errors="replace")

    def health(self) -> httpx.Response:
        return _get(self.url + "/health")

    def wait_ready(self, timeout: float = START_S) -> None:
        """Returns when /health is 200; raises with the end of the log when the server ends or takes too long."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise RuntimeError(f"server ended with {self.process.returncode}:\n{self.log[-6000:]}")
            with contextlib.suppress(httpx.TransportError):
                if self.health().status_code == 200:
                    self.ready_after = time.monotonic() - self.started
                    return
            time.sleep(0.25)
        raise TimeoutError(f"server not ready after {timeout} s:\n{self.log[-6000:]}")

    def metrics(self, prefix: str = "sglang_ft_") -> dict[str, float]:
        """Our counters by name, labels dropped."""
        values: dict[str, float] = {}
        for line in _get(self.url + "/metrics").text.splitlines():
            if line.startswith(prefix):
                name, _, value = line.rpartition(" ")
                values[name.partition("{")[0]] = float(value)
        return values

    def wait_for_metric(self, name: str, above: float, timeout: float = 10) -> float:
        """The value of a metric once it is above a number; raises when it does not rise in time."""
        deadline = time.monotonic() + timeout
        while (value := self.metrics(name).get(name, 0.0)) <= above:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{name} stays at {value} after {timeout} s")
            time.sleep(0.1)
        return value

    def jobs_when_idle(self, timeout: float = 30) -> float:
        """Jobs run by the worker, once that number stands still; raises when it does not in time."""
        name, deadline = "sglang_ft_worker_jobs_total", time.monotonic() + timeout
        before = self.metrics(name).get(name, 0.0)
        while True:
            time.sleep(1)
            now = self.metrics(name).get(name, 0.0)
            if now == before:
                return now
            if time.monotonic() > deadline:
                raise TimeoutError(f"the worker is still at work after {timeout} s")
            before = now

    def children(self) -> dict[str, psutil.Process]:
        """The server's processes by name; 'main' is the HTTP process."""
        main = psutil.Process(self.process.pid)
        found = {"main": main}
        for child in main.children(recursive=True):
            with contextlib.suppress(psutil.Error):
                found["worker" if child.name() == "cpu_worker" else child.name()] = child
        return found

    @property
    def worker(self) -> psutil.Process:
        return self.children()["worker"]

    def stop(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(10)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@contextlib.contextmanager
def serving(model: Path | str, *flags: str, **kwargs: Any) -> Iterator[Server]:
    """A ready server, stopped at the end."""
    server = Server(model, *flags, **kwargs)
    try:
        server.wait_ready()
        yield server
    finally:
        server.stop()
