"""Tells a worker that hangs from one that merely gets no CPU time on a crowded machine."""

from __future__ import annotations

from pathlib import Path

import psutil

_STARVED_SHARE = 0.5
"""A process that got less than this share of one core, and wants more, is starved."""


def cpu_seconds(pid: int) -> float:
    """CPU time that the process has used so far; 0 when it is gone."""
    try:
        user, system, *_ = psutil.Process(pid).cpu_times()
    except psutil.Error:
        return 0.0
    return user + system


def is_starved(pid: int, cpu_seconds_before: float, window_s: float) -> bool:
    """Whether the process had work to do over the last `window_s` seconds and was kept from it.

    A hung worker sleeps, is stopped, or burns CPU time without progress; a starved one has a thread that could
    run and got little time.
    """
    used = cpu_seconds(pid) - cpu_seconds_before
    return _wants_to_run(pid) and used < _STARVED_SHARE * window_s


def _wants_to_run(pid: int) -> bool:
    for stat in Path(f"/proc/{pid}/task").glob("*/stat"):
        try:
            state = stat.read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue  # the thread ended
        if state == "R":
            return True
    return False
