"""The process that keeps a full expert pool alive after its server has ended: python -m sglang_ft.weights.keeper.

It holds the pool's descriptor and hands copies of it to servers of the same user that ask for the same content, through
a socket in a folder that only the user can enter. It maps nothing and needs no torch. A server takes part as long
as its connection stands; some time after the last one is gone the keeper ends, and the memory with it.

A pool is handed to a keeper only once it is full, so that there is no such thing as a half-filled one here.

One message is a JSON object on a line, at most 64 KiB; the answer likewise.

    {"do": "tell"}                       -> what is kept, for whom, and for how long
    {"do": "use", "identity": "..."}     -> the same and the descriptor, or an error; this connection takes part
    {"do": "keep", "seconds": 600}       -> the same; how long after the last server
    {"do": "drop"}                       -> the same; the descriptor is closed, the keeper ends
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import socket
import stat
import struct
import sys
import time
from pathlib import Path
from typing import Any

MAX_MESSAGE = 1 << 16
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid of SO_PEERCRED
_FIRST_TO_GO = "1000"  # of oom_score_adj: memory that is only kept goes before any that is used
_FIRST_SERVER_S = 30.0
"""The server that started the keeper has so long to connect."""


def folder() -> Path:
    """Where the sockets are: under XDG_RUNTIME_DIR, which is the user's alone, or the cache."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime and os.path.isdir(runtime) and os.access(runtime, os.W_OK):
        return Path(runtime) / "sglang-ft"
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "sglang-ft" / "pools"


def open_folder(create: bool) -> int:
    """A descriptor of the folder. Raises OSError; PermissionError if others could have put something there."""
    path = folder()
    if create:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir(mode=0o700, exist_ok=True)
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    found = os.fstat(fd)
    if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
        os.close(fd)
        raise PermissionError(f"{path} must belong to you and be closed to others (chmod 700)")
    return fd


def address(folder_fd: int, name: str) -> str:
    """Of a socket in the folder; the kernel takes at most 107 bytes, a folder's own path may be longer."""
    return f"/proc/self/fd/{folder_fd}/{name}"


def is_ours(connection: socket.socket) -> bool:
    """Whether the process at the other end runs as the same user."""
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return bool(_CREDENTIALS.unpack(data)[1] == os.geteuid())


class Keeper:
    """One pool, the listening socket, and the connections of servers and of the command line."""

    def __init__(self, about: dict[str, Any], pool_fd: int, listener: socket.socket) -> None:
        """`about`: identity, model, nbytes, seconds."""
        self._about, self._pool_fd, self._listener = about, pool_fd, listener
        self._selector = selectors.DefaultSelector()
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)
        self._unread: dict[socket.socket, bytes] = {}
        self._servers: set[socket.socket] = set()
        self._made = time.time()
        self._ends_at = time.monotonic() + max(_FIRST_SERVER_S, about["seconds"])

    def run(self) -> None:
        """Until the pool is dropped or its time is over."""
        while self._pool_fd >= 0:
            left = None if self._servers else self._ends_at - time.monotonic()
            if left is not None and left <= 0:
                return
            for key, _ in self._selector.select(left):
                if key.fileobj is self._listener:
                    self._accept()
                else:
                    self._serve(key.fileobj)  # type: ignore[arg-type]

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            connection, _ = self._listener.accept()
            if not is_ours(connection):
                connection.close()
                return
            connection.setblocking(False)
            self._unread[connection] = b""
            self._selector.register(connection, selectors.EVENT_READ)

    def _serve(self, connection: socket.socket) -> None:
        try:
            data = connection.recv(MAX_MESSAGE)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        *lines, rest = (self._unread[connection] + data).split(b"\n")
        self._unread[connection] = rest
        for line in lines:
            self._answer(connection, line)
        if not data or len(rest) >= MAX_MESSAGE:
            self._leave(connection)

    def _leave(self, connection: socket.socket) -> None:
        self._selector.unregister(connection)
        del self._unread[connection]
        connection.close()
        if connection in self._servers:
            self._servers.remove(connection)
            self._ends_at = time.monotonic() + self._about["seconds"]

    def _answer(self, connection: socket.socket, line: bytes) -> None:
        fds: list[int] = []
        try:
            answer = self._do(connection, json.loads(line), fds)
        except (ValueError, KeyError, TypeError, AttributeError) as e:
            answer = {"error": f"not understood: {e!r}"}
        with contextlib.suppress(OSError):  # whoever asked may have gone
            socket.send_fds(connection, [json.dumps(answer).encode() + b"\n"], fds)

    def _do(self, connection: socket.socket, message: dict[str, Any], fds: list[int]) -> dict[str, Any]:
        what = message["do"]
        if what == "use":
            if message["identity"] != self._about["identity"]:
                return {"error": "another pool"}
            self._servers.add(connection)
            fds.append(self._pool_fd)
        elif what == "keep":
            self._about["seconds"] = float(message["seconds"])
        elif what == "drop":
            os.close(self._pool_fd)
            self._pool_fd = -1
        elif what != "tell":
            raise KeyError(what)
        left = max(0.0, self._ends_at - time.monotonic())
        return {
            **self._about,
            "pid": os.getpid(),
            "servers": len(self._servers),
            "age_s": time.time() - self._made,
            "ends_in_s": None if self._servers else left,
        }


def main() -> int:
    """Arguments: descriptor of the pool, name of the socket, what it is (JSON). Returns at once, from a parent."""
    pool_fd, name, about = int(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
    folder_fd = open_folder(create=True)
    if _is_kept(folder_fd, name):
        return 0  # by the keeper of another server that started at the same time
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(name, dir_fd=folder_fd)
    listener.bind(address(folder_fd, name))
    os.chmod(address(folder_fd, name), 0o600)
    listener.listen(16)
    if os.fork():
        return 0  # the keeper is nobody's child, so that nobody ends it with a server
    os.setsid()
    inode = os.stat(name, dir_fd=folder_fd).st_ino
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(_FIRST_TO_GO)
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    os.chdir("/")
    try:
        Keeper(about, pool_fd, listener).run()
    finally:
        with contextlib.suppress(OSError):  # a newer keeper may have taken the name
            if os.stat(name, dir_fd=folder_fd).st_ino == inode:
                os.unlink(name, dir_fd=folder_fd)
    return 0


def _is_kept(folder_fd: int, name: str) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        return probe.connect_ex(address(folder_fd, name)) == 0


if __name__ == "__main__":
    sys.exit(main())
