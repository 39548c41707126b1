"""The kernels of the expert cache, called through their C interface (sgl-ft-kernel/include/sgl_ft_kernel/api.h).

They come in a package of their own, sgl-ft-kernel, which is built where nvcc is. Importing this loads nothing;
`library()` loads the kernels and says what is missing when it cannot.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import os
from ctypes import POINTER, c_char_p, c_int, c_uint32, c_uint64, c_void_p
from pathlib import Path

from sglang_ft.errors import FtError
from sglang_ft.kernels import abi

CURE = "pip install ./sgl-ft-kernel in a clone of sglang_ft builds them"
_LIBRARY = "libsgl_ft_kernel.so"
_HOST_LIBRARY = "libsgl_ft_plan_host.so"


class KernelError(FtError):
    """A kernel could not be loaded or launched."""


@functools.cache
def library() -> ctypes.CDLL:
    """The kernels. Raises KernelError where they are not built."""
    return _load(_LIBRARY, CURE)


@functools.cache
def host_library() -> ctypes.CDLL:
    """The plan logic alone, for the host; no CUDA needed. Raises KernelError where it is not built."""
    return _load(
        _HOST_LIBRARY, "build it: cmake -S sgl-ft-kernel -B build/kernel && cmake --build build/kernel"
    )


def is_built() -> bool:
    """Whether the kernels are installed."""
    return any((folder / _LIBRARY).is_file() for folder in _folders())


def check(result: int, what: str) -> None:
    """Raises KernelError for a result of the library that is not 0."""
    if result:
        raise KernelError(f"{what}: {library().ft_error_text(result).decode()} (CUDA error {result})")


def _folders() -> list[Path]:
    if override := os.environ.get("SGLANG_FT_KERNEL_DIR"):
        return [Path(override)]
    package = importlib.util.find_spec("sgl_ft_kernel")
    return [Path(folder) for folder in package.submodule_search_locations or ()] if package else []


def _load(name: str, cure: str) -> ctypes.CDLL:
    for folder in _folders():
        if (folder / name).is_file():
            try:
                lib = ctypes.CDLL(str(folder / name))
            except OSError as e:
                raise KernelError(f"{name} cannot be loaded: {e}; {cure}") from e
            _declare(lib)
            _check_abi(lib, name)
            return lib
    where = ", ".join(map(str, _folders())) or "any package sgl_ft_kernel"
    raise KernelError(f"{name} is not in {where}; {cure}")


def _declare(lib: ctypes.CDLL) -> None:
    cache, layer, step = POINTER(abi.Cache), POINTER(abi.Layer), POINTER(abi.Step)
    signatures = {
        "ft_plan": [cache, layer, step, c_void_p],
        "ft_fill": [layer, step, c_int, c_uint32, c_void_p],
        "ft_gate_up": [layer, step, c_int, c_void_p],
        "ft_down": [layer, step, c_int, c_void_p],
        "ft_combine": [cache, layer, step, c_int, c_void_p],
        "ft_plan_on_host": [cache, layer, step],
        "ft_gather": [cache, layer, POINTER(abi.Gathering), c_uint32, c_void_p],
        "ft_copy_runs": [POINTER(abi.Copy), c_uint32, c_void_p],
        "ft_range_reserve": [c_uint64, c_int, POINTER(c_void_p)],
        "ft_range_resize": [c_void_p, c_uint64],
        "ft_range_address": [c_void_p],
        "ft_range_mapped": [c_void_p],
        "ft_range_free": [c_void_p],
        "ft_host_register": [c_void_p, c_uint64, c_uint64, POINTER(c_uint64)],
        "ft_host_unregister": [c_void_p, c_uint64, c_uint64],
        "ft_device_address": [c_void_p, POINTER(c_void_p)],
        "ft_copy_from_host": [c_void_p, c_void_p, c_uint64, c_uint32, c_void_p],
        "ft_handoff_probe": [POINTER(abi.RingView), c_uint64, c_uint32, c_int, c_void_p],
        "ft_error_text": [c_int],
        "ft_abi_sizes": [POINTER(c_uint64), c_int],
    }
    results = {"ft_error_text": c_char_p, "ft_range_address": c_uint64, "ft_range_mapped": c_uint64}
    for name, arguments in signatures.items():
        function = getattr(lib, name, None)
        if function is not None:  # the host's library has the plan only
            function.argtypes, function.restype = arguments, results.get(name, c_int)


def _check_abi(lib: ctypes.CDLL, name: str) -> None:
    sizes = (c_uint64 * len(abi.STRUCTS))()
    count = lib.ft_abi_sizes(sizes, len(sizes))
    ours = [ctypes.sizeof(struct) for struct in abi.STRUCTS]
    if count != len(ours) or list(sizes) != ours:
        raise KernelError(f"{name} was built from other sources than this package: install both again")


__all__ = ["KernelError", "abi", "check", "host_library", "is_built", "library"]
