"""Finds and loads what the C++ build makes: the cpu_worker program and the client library."""

from __future__ import annotations

import ctypes
import functools
import os
import sysconfig
from ctypes import c_int, c_uint32, c_uint64, c_void_p
from pathlib import Path
from types import SimpleNamespace

import sglang_ft
from sglang_ft.errors import WorkerError

WORKER = "cpu_worker"
CLIENT = "libsglang_ft_client.so"
_CALLS = {
    "ring": [c_void_p, c_uint64],
    "command": [c_void_p, c_uint64],
    "give_up": [c_void_p, c_uint64, c_uint32],
    "wake": [c_void_p],
    "abort": [c_void_p, c_uint32],
}
_WAITS = {
    "wait": [c_void_p, c_uint64, c_uint64, c_uint64],
    "command_wait": [c_void_p, c_uint64, c_uint64],
    "state_wait": [c_void_p, c_uint32, c_uint64],
}
_PURE = {"crc32c": [c_uint32, c_void_p, c_uint64]}
_READS = {
    "reads_begin": [c_void_p, c_int, c_uint64, c_void_p, c_uint32, c_uint64],
    "reads_wait": [c_void_p, c_void_p, c_void_p],
    "reads_close": [c_void_p],
}
_OPENS = {"reads_open": [c_uint32, c_void_p]}


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
def client() -> SimpleNamespace:
    """The functions ft_client_* of the client library, which ring.h and reads.h describe, without that prefix.

    Waits, reads and checksums release the GIL. The others take about a microsecond, and to get the GIL back from a busy
    thread may take milliseconds.
    """
    path = str(find(CLIENT))
    functions = {}
    library = ctypes.CDLL(path)
    for lib, result, calls in (
        (ctypes.PyDLL(path), None, _CALLS),
        (library, c_int, _WAITS),
        (library, c_uint32, _PURE),
        (library, c_int, _READS),
        (library, c_void_p, _OPENS),
    ):
        for name, arguments in calls.items():
            functions[name] = function = getattr(lib, f"ft_client_{name}")
            function.argtypes, function.restype = arguments, result
    return SimpleNamespace(**functions)
