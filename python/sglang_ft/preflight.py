"""Checks before anything loads: SGLang's version, the port, memory for the pool.

Each check raises one FtError that says what is wrong, the number, and the flag that mends it. `run` collects
the errors of several checks, so that a user sees all problems at once.
"""

from __future__ import annotations

import errno
import re
import socket
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

from sglang_ft.checkpoint import ModelSummary
from sglang_ft.errors import ConfigError, FtError, MemoryBudgetError

GIB = 1 << 30
_CGROUP = Path("/sys/fs/cgroup")


def run(*checks: Callable[[], object]) -> None:
    """Call every check; raise one FtError with all texts. A single failure keeps its type."""
    failures: list[FtError] = []
    for check in checks:
        try:
            check()
        except FtError as e:
            failures.append(e)
    if len(failures) == 1:
        raise failures[0]
    if failures:
        text = "\n".join(f"{n}. {e}" for n, e in enumerate(failures, 1))
        raise FtError(f"{len(failures)} problems:\n{text}")


def supported_sglang() -> str:
    """The SGLang version that this release was made for, as its own package metadata pins it."""
    for requirement in metadata.requires("sglang-ft") or []:
        if match := re.match(r"sglang==([\w.]+)", requirement):
            return match[1]
    raise FtError("the installed sglang-ft names no SGLang version; install it again")


def check_sglang_version(force: bool = False) -> None:
    """Refuse another SGLang than the pinned one, unless `force`."""
    supported = supported_sglang()
    try:
        found = metadata.version("sglang")
    except metadata.PackageNotFoundError:
        raise ConfigError(f"sglang is not installed; run: pip install sglang=={supported}") from None
    if found != supported and not force:
        raise ConfigError(
            f"sglang {found} is installed, but this release was made for {supported}; "
            f"run: pip install sglang=={supported}, or try it anyway with --ft-force-version"
        )


def check_port(host: str, port: int) -> None:
    """Refuse a port that cannot be bound on `host`."""
    if not 0 < port < 65536:
        raise ConfigError(f"--port {port}: a port is a number from 1 to 65535")
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except socket.gaierror as e:
        raise ConfigError(f"--host {host} --port {port}: not an address of this machine: {e}") from e
    family, kind, protocol, _, address = addresses[0]
    with socket.socket(family, kind, protocol) as probe:
        # As the HTTP server binds: a port in TIME_WAIT is free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
        except OSError as e:
            raise ConfigError(f"--host {host} --port {port}: {_bind_problem(e)}") from e


def check_memory(
    model: ModelSummary, reserve_gib: float, available: int, dense_on_host: bool, dtype: str | None = None
) -> None:
    """Refuse a model that does not fit in `available` bytes of host memory.

    Needed are the expert pool (held as `dtype`; default: the checkpoint's), the dense weights where they live
    on the host too, and the reserve.
    """
    pool = model.pool_bytes_as(dtype) if dtype and model.is_moe else model.pool_bytes
    dense = model.other_bytes if dense_on_host else 0
    needed = pool + dense + int(reserve_gib * GIB)
    if needed <= available:
        return
    experts = (
        f"expert pool {pool / GIB:.2f} GiB ({model.num_moe_layers} layers x {model.num_experts} experts)"
    )
    rest = f" + other weights {dense / GIB:.2f} GiB" if dense_on_host else ""
    raise MemoryBudgetError(
        f"{model.path}: not enough host memory: {experts}{rest} + reserve {reserve_gib:.2f} GiB "
        f"= {needed / GIB:.2f} GiB needed, {available / GIB:.2f} GiB available, "
        f"{(needed - available) / GIB:.2f} GiB short; close other programs, lower --ft-ram-reserve-gib, "
        "or choose a smaller model"
    )


def available_memory(meminfo: Path = Path("/proc/meminfo"), cgroup: Path = _CGROUP) -> int:
    """Bytes of host memory still to be had: the kernel's estimate, capped by the container's limit."""
    line = next(line for line in meminfo.read_text().splitlines() if line.startswith("MemAvailable:"))
    available = int(line.split()[1]) * 1024
    try:
        limit = (cgroup / "memory.max").read_text().strip()
        used = int((cgroup / "memory.current").read_text())
        statistics = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
    except OSError:
        return available  # no container limit, or a kernel without cgroup v2
    if limit == "max":
        return available
    return min(available, int(limit) - used + int(statistics["inactive_file"]))


def _bind_problem(e: OSError) -> str:
    if e.errno == errno.EADDRINUSE:
        return "the port is in use; stop the program that holds it or choose another --port"
    if e.errno == errno.EACCES:
        return "ports below 1024 need root; choose another --port"
    if e.errno == errno.EADDRNOTAVAIL:
        return "this machine has no such address; 127.0.0.1 is this machine only, 0.0.0.0 every network"
    return f"cannot listen: {e.strerror}"
