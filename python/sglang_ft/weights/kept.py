"""Expert pools that outlive their server: what identifies one, handing one over to a keeper, taking one from it.

A pool is taken only if everything that decides its bytes is the same: the checkpoint's config, headers and files (size,
times, place), the layout, the versions. See keeper.py for the process that holds it.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import socket
import subprocess
import sys
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import sglang_ft
from sglang_ft.tensor_files import weight_files
from sglang_ft.weights import keeper, manifest
from sglang_ft.weights.writer import hash_of_source
from sglang_ft.worker.memory import MemoryFile

if TYPE_CHECKING:
    from sglang_ft.experts.bank import BankPlan

logger = logging.getLogger(__name__)

_VERSION = 1
_SUFFIX = ".pool"
_ANSWER_S = 5.0
_START_S = 30.0
_NO_RESIZE = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


@dataclass(frozen=True)
class Kept:
    """A pool that some keeper holds. `servers`: that use it now; `ends_in_s`: None as long as there are any."""

    name: str
    identity: str
    model: str
    nbytes: int
    seconds: float
    pid: int
    servers: int
    age_s: float
    ends_in_s: float | None


class Lease:
    """A server's part in a kept pool; the keeper's time does not run as long as it is open."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def close(self) -> None:
        self._connection.close()


def identity(folder: Path, plan: BankPlan) -> str:
    """Of the pool that a checkpoint fills with this layout. Raises OSError, CheckpointError."""
    if manifest.is_converted(folder):
        files = [folder / manifest.NAME, folder / manifest.EXPERTS]
        source = manifest.read(folder).identity.hex()
    else:
        files, source = weight_files(folder), hash_of_source(folder)
    states = [os.stat(path) for path in files]
    content = [
        _VERSION,
        sglang_ft.__version__,
        metadata.version("sglang"),
        source,
        [(s.st_dev, s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns) for s in states],
        manifest.describe_layers(plan),
        plan.nbytes,
    ]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def pools() -> list[Kept]:
    """All pools that are kept for this user. Raises PermissionError if others can enter the folder."""
    found = []
    try:
        folder_fd = keeper.open_folder(create=False)
    except FileNotFoundError:
        return []
    try:
        for name in sorted(os.listdir(folder_fd)):
            if name.endswith(_SUFFIX) and (answer := _ask(folder_fd, name, {"do": "tell"})):
                found.append(_described(name, answer))
    finally:
        os.close(folder_fd)
    return found


def drop(name: str) -> bool:
    """Ends a keeper; its memory is free when this returns, unless a server uses it. False: there is none."""
    folder_fd = keeper.open_folder(create=False)
    try:
        return _ask(folder_fd, name + _SUFFIX, {"do": "drop"}) is not None
    finally:
        os.close(folder_fd)


def drop_idle(model: str | None = None) -> int:
    """Drops the pools that no server uses, of one model or all; returns how many bytes they had."""
    with contextlib.suppress(OSError):
        idle = [p for p in pools() if not p.servers and model in (None, p.model)]
        return sum(pool.nbytes for pool in idle if drop(pool.name))
    return 0


def usable_bytes(model: str | None = None) -> int:
    """Host memory of pools that no server uses, which is as good as free, and of `model`'s, which can be shared."""
    with contextlib.suppress(OSError):
        return sum(pool.nbytes for pool in pools() if not pool.servers or pool.model == model)
    return 0


def take(identity: str, nbytes: int, seconds: float) -> tuple[MemoryFile, Lease] | None:
    """The pool of that identity and size, if one is kept; from now on for `seconds` after its last server."""
    with contextlib.suppress(OSError):
        folder_fd = keeper.open_folder(create=False)
        try:
            connection = _connect(folder_fd, identity[:16] + _SUFFIX)
        finally:
            os.close(folder_fd)
        if connection is None:
            return None
        file = _receive(connection, identity, nbytes)
        if file is not None and _exchange(connection, {"do": "keep", "seconds": seconds}):
            return file, Lease(connection)
        connection.close()
    return None


def hand_over(file: MemoryFile, identity: str, model: str, nbytes: int, seconds: float) -> Lease | None:
    """Starts a keeper for a full pool; None, with a warning, where that cannot be."""
    name = identity[:16] + _SUFFIX
    about = {"identity": identity, "model": model, "nbytes": nbytes, "seconds": seconds}
    command = [sys.executable, "-m", "sglang_ft.weights.keeper", str(file.fd), name, json.dumps(about)]
    try:
        os.close(keeper.open_folder(create=True))
        started = subprocess.run(
            command,
            pass_fds=(file.fd,),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=_START_S,
            check=False,
        )
        taken = take(identity, nbytes, seconds) if started.returncode == 0 else None
    except (OSError, subprocess.SubprocessError) as e:
        logger.warning("The expert pool will not be kept: %s", e)
        return None
    if taken is None:
        logger.warning("The expert pool will not be kept: its keeper did not start")
        return None
    second, lease = taken
    second.close()  # the same memory as `file`
    return lease


def _receive(connection: socket.socket, identity: str, nbytes: int) -> MemoryFile | None:
    connection.sendall(json.dumps({"do": "use", "identity": identity}).encode() + b"\n")
    data, fds, _, _ = socket.recv_fds(connection, keeper.MAX_MESSAGE, 1)
    try:
        whole = data.endswith(b"\n") and "error" not in json.loads(data)
        if not whole or len(fds) != 1 or os.fstat(fds[0]).st_size < nbytes:
            return None
        if fcntl.fcntl(fds[0], fcntl.F_GET_SEALS) & _NO_RESIZE != _NO_RESIZE:
            return None
        fd = fds.pop()
        return MemoryFile.adopt(fd)
    except ValueError:
        return None
    finally:
        for fd in fds:
            os.close(fd)


def _ask(folder_fd: int, name: str, message: dict[str, Any]) -> dict[str, Any] | None:
    connection = _connect(folder_fd, name)
    if connection is None:
        return None
    with connection:
        return _exchange(connection, message)


def _connect(folder_fd: int, name: str) -> socket.socket | None:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(_ANSWER_S)
    try:
        connection.connect(keeper.address(folder_fd, name))
    except ConnectionRefusedError:  # its keeper was killed
        with contextlib.suppress(OSError):
            os.unlink(name, dir_fd=folder_fd)
    except OSError:
        pass
    else:
        if keeper.is_ours(connection):
            return connection
    connection.close()
    return None


def _exchange(connection: socket.socket, message: dict[str, Any]) -> dict[str, Any] | None:
    data = b""
    try:
        connection.sendall(json.dumps(message).encode() + b"\n")
        while not data.endswith(b"\n"):
            part = connection.recv(keeper.MAX_MESSAGE)
            if not part:
                return None
            data += part
        answer = json.loads(data)
    except (OSError, ValueError):
        return None
    return answer if isinstance(answer, dict) and "error" not in answer else None


def _described(name: str, answer: dict[str, Any]) -> Kept:
    fields = ("identity", "model", "nbytes", "seconds", "pid", "servers", "age_s", "ends_in_s")
    return Kept(name.removesuffix(_SUFFIX), *(answer[field] for field in fields))
