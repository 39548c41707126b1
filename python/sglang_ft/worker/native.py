"""Finds and loads what the C++ build makes: the cpu_worker program and the client library."""

from __future__ import annotations

import ctypes
import functools
import os
import sysconfig
from ctypes import c_int, c_uint32, c_uint64, c_void_p
from pathlib import Path

import sglang_ft
from sglang_ft.errors import WorkerError

WORKER = "cpu_worker"
CLIENT = "libsglang_ft_client.so"


def find(name: str) -> Path:
    """Path of a built file: SGLANG_FT_BIN_DIR, then `bin` of the installed package."""
    override = os.environ.get("SGLANG_FT_BIN_DIR")
    folders = [Path(override)] if override else [Path(p) / "bin" for p in sglang_ft.__path__]
    if not override:
        folders.append(Path(sysconfig.get_path("platlib")) / "sglang_ft" / "bin")
    for folder in folders:
        if (folder / name).is_file():
            return folder / name
    raise WorkerError(
        f"{name} is not in {', '.join(map(str, folders))}: the C++ part of sglang_ft is not built. "
        "Install the package with `pip install .` (needs a C++20 compiler and cmake)"
    )


@functools.cache
def client() -> ctypes.CDLL:
    """The client library, whose calls are described in ring.h. Calls release the GIL."""
    lib = ctypes.CDLL(str(find(CLIENT)))
    lib.ft_client_ring.argtypes = [c_void_p, c_uint64]
    lib.ft_client_wait.argtypes = [c_void_p, c_uint64, c_uint64, c_uint64]
    lib.ft_client_command.argtypes = [c_void_p, c_uint64]
    lib.ft_client_command_wait.argtypes = [c_void_p, c_uint64, c_uint64]
    lib.ft_client_wake.argtypes = [c_void_p]
    lib.ft_client_abort.argtypes = [c_void_p, c_uint32]
    lib.ft_client_state_wait.argtypes = [c_void_p, c_uint32, c_uint64]
    for name in ("ring", "command", "wake", "abort"):
        getattr(lib, f"ft_client_{name}").restype = None
    for name in ("wait", "command_wait", "state_wait"):
        getattr(lib, f"ft_client_{name}").restype = c_int
    return lib
