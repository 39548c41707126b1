"""Which cores the worker's threads get: one thread a physical core, some cores left to the server."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from sglang_ft.errors import ConfigError

_SYS_CPU = Path("/sys/devices/system/cpu")


def cpu_name() -> str:
    """As the kernel names it; empty where it does not."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return ""


def parse_cores(text: str) -> list[int]:
    """'0-3,8' -> [0, 1, 2, 3, 8]."""
    cores: list[int] = []
    for part in text.split(","):
        first, _, last = part.strip().partition("-")
        if not first.isdigit() or (last and not last.isdigit()):
            raise ConfigError(f"--ft-worker-cores {text!r}: {part!r} is not a core or a range like 0-5")
        cores += range(int(first), int(last or first) + 1)
    return cores


def physical_cores(allowed: set[int] | None = None, root: Path = _SYS_CPU) -> list[int]:
    """First hardware thread of each physical core that this process may run on, in numeric order."""
    allowed = os.sched_getaffinity(0) if allowed is None else allowed
    seen: set[str] = set()
    cores = []
    for cpu in sorted(allowed):
        siblings = root / f"cpu{cpu}" / "topology" / "thread_siblings_list"
        key = siblings.read_text().strip() if siblings.exists() else str(cpu)
        if key not in seen:
            seen.add(key)
            cores.append(cpu)
    return cores


def headroom(num_cores: int) -> int:
    """Cores left to tokenizer, scheduler and driver (lab notes: using all of them costs a factor of two)."""
    if num_cores <= 2:
        return 0
    return 1 if num_cores <= 8 else 2


def keep_off(cores: list[int]) -> None:
    """Moves all threads of this process to other cores, if at least two are left, and those that they start.

    A thread that polls there would take turns of milliseconds with one of the worker.
    """
    import torch

    others = os.sched_getaffinity(0) - set(cores)
    if len(others) < 2:
        return
    torch.set_num_threads(min(torch.get_num_threads(), len(others)))
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError):  # it has ended, or may not be moved
            os.sched_setaffinity(int(thread), others)


def choose_cores(threads: int, cores: str) -> list[int]:
    """Cores to pin to, one a thread, from --ft-worker-threads (0: automatic) and --ft-worker-cores ('': automatic)."""
    if cores:
        chosen = parse_cores(cores)
        foreign = sorted(set(chosen) - os.sched_getaffinity(0))
        if foreign:
            raise ConfigError(f"--ft-worker-cores {cores!r}: this process may not run on core {foreign[0]}")
        if threads > len(chosen):
            raise ConfigError(
                f"--ft-worker-threads {threads}: --ft-worker-cores names only {len(chosen)} cores"
            )
        return chosen[: threads or len(chosen)]
    physical = physical_cores()
    wanted = threads or len(physical) - headroom(len(physical))
    # The low cores take interrupts and the server's first threads: leave those free.
    if wanted <= len(physical):
        return physical[len(physical) - wanted :]
    everything = sorted(os.sched_getaffinity(0))
    if wanted > len(everything):
        raise ConfigError(f"--ft-worker-threads {wanted}: this process may use {len(everything)} cores")
    return everything[:wanted]
