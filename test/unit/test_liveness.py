"""A worker that gets no CPU time is not taken for one that hangs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from sglang_ft.worker.liveness import cpu_seconds, is_starved

WINDOW_S = 1.0
CORE = min(os.sched_getaffinity(0))


@pytest.fixture
def run():
    """Starts Python processes on one core; they are killed at the end."""
    started = []

    def start(code: str) -> int:
        process = subprocess.Popen(
            [sys.executable, "-c", code], preexec_fn=lambda: os.sched_setaffinity(0, {CORE})
        )
        started.append(process)
        time.sleep(0.3)
        return process.pid

    yield start
    for process in started:
        process.kill()
        process.wait()


def verdict(pid: int) -> bool:
    before = cpu_seconds(pid)
    time.sleep(WINDOW_S)
    return is_starved(pid, before, WINDOW_S)


def test_a_process_that_others_keep_from_running_is_starved(run):
    for _ in range(2):
        run("while True: pass")
    pid = run("while True: pass")
    os.sched_setscheduler(pid, os.SCHED_IDLE, os.sched_param(0))
    assert verdict(pid)


def test_a_stopped_process_hangs(run):
    pid = run("while True: pass")
    os.kill(pid, signal.SIGSTOP)
    assert not verdict(pid)


def test_a_sleeping_process_hangs(run):
    assert not verdict(run("import time; time.sleep(60)"))


def test_a_process_that_is_gone_hangs(run):
    pid = run("pass")
    assert not verdict(pid)
