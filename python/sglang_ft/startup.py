"""The time line of a start: what took how long, from the launch of the first process until requests are served.

A start is one chain: the launcher prepares, then the scheduler process does, then the launcher again. Each names a
phase when it ends; a phase lasts from the end of the one before, whichever process named that. So the phases add up to
the whole, and nothing is left out.
"""

from __future__ import annotations

import os
import time
from typing import NamedTuple

from sglang_ft import runtime

_LAUNCHER, _SCHEDULER = "startup-launcher", "startup-scheduler"
_START_TIME = 21 - 2  # field of /proc/PID/stat after the name, which may hold blanks

_marks: dict[str, list[tuple[str, float]]] = {_LAUNCHER: [], _SCHEDULER: []}


class Phase(NamedTuple):
    """A phase and the seconds that it took."""

    name: str
    seconds: float


def mark(phase: str, in_scheduler: bool = False) -> None:
    """Says that a phase has just ended in this process."""
    process = _SCHEDULER if in_scheduler else _LAUNCHER
    _marks[process].append((phase, _now()))
    runtime.write(process, marks=_marks[process])


def finish(phase: str) -> list[Phase]:
    """Ends the start with its last phase, in the launcher: all phases in order, which `GET /ft/startup` shows then."""
    mark(phase)
    marks = [*_marks[_LAUNCHER], *(tuple(m) for m in runtime.read(_SCHEDULER).get("marks", []))]
    phases = phases_of(marks, launched_at())
    runtime.write("startup", **as_json(phases))
    return phases


def phases_of(marks: list[tuple[str, float]], begin: float) -> list[Phase]:
    """Phases from names and end times in any order, the first of which began at `begin`."""
    phases = []
    for name, end in sorted(marks, key=lambda m: m[1]):
        phases.append(Phase(name, end - begin))
        begin = end
    return phases


def as_json(phases: list[Phase]) -> dict[str, object]:
    """As `GET /ft/startup` answers."""
    return {
        "seconds": round(sum(p.seconds for p in phases), 3),
        "phases": [{"name": p.name, "seconds": round(p.seconds, 3)} for p in phases],
    }


def render(phases: list[Phase]) -> str:
    """One line a phase, and their sum."""
    total = sum(p.seconds for p in phases)
    lines = [f"  {p.seconds:7.2f} s  {p.name}" for p in phases]
    return "\n".join([*lines, f"  {total:7.2f} s  from launch to ready"])


def launched_at() -> float:
    """When this process began, on the clock of `mark`."""
    with open("/proc/self/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    return int(fields[_START_TIME]) / os.sysconf("SC_CLK_TCK")


def _now() -> float:
    """Seconds since the machine started: the same clock in every process."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)
