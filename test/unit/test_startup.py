"""The time line of a start: phases of two processes in one order, which add up."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from sglang_ft import runtime, startup
from sglang_ft.startup import Phase


@pytest.fixture(autouse=True)
def own_run(tmp_path, monkeypatch):
    monkeypatch.setenv(runtime.ENV, str(tmp_path))
    monkeypatch.setattr(startup, "_marks", {name: [] for name in startup._marks})


def test_phases_follow_one_another_whoever_named_them():
    marks = [("a", 11.0), ("d", 16.0), ("b", 12.5), ("c", 12.5)]
    assert startup.phases_of(marks, 10.0) == [
        Phase("a", 1.0),
        Phase("b", 1.5),
        Phase("c", 0.0),
        Phase("d", 3.5),
    ]


def test_the_marks_of_both_processes_add_up_to_the_time_since_launch():
    startup.mark("launcher")
    script = (
        "from sglang_ft import startup\nfor p in ('model', 'weights'): startup.mark(p, in_scheduler=True)"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
    phases = startup.finish("ready")
    assert [p.name for p in phases] == ["launcher", "model", "weights", "ready"]
    since = time.clock_gettime(time.CLOCK_BOOTTIME) - startup.launched_at()
    assert sum(p.seconds for p in phases) == pytest.approx(since, abs=0.2)
    told = runtime.read("startup")
    assert [p["name"] for p in told["phases"]] == [p.name for p in phases]
    assert told["seconds"] == pytest.approx(sum(p["seconds"] for p in told["phases"]), abs=0.01)


def test_the_launch_is_when_the_process_began():
    script = (
        "import time; from sglang_ft import startup\n"
        "print(time.clock_gettime(time.CLOCK_BOOTTIME) - startup.launched_at())"
    )
    begin = time.monotonic()
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert -0.02 <= float(done.stdout) <= time.monotonic() - begin + 0.02


def test_every_phase_is_a_line():
    text = startup.render([Phase("imports", 12.345), Phase("weights", 0.5)])
    assert text.splitlines() == [
        "    12.35 s  imports",
        "     0.50 s  weights",
        "    12.85 s  from launch to ready",
    ]
