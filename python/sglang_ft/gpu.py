"""Whether this machine has a GPU that we can use, found without importing torch."""

from __future__ import annotations

import ctypes
import functools

from sglang_ft import kernels


@functools.cache
def count() -> int:
    """NVIDIA GPUs that this process may use (CUDA_VISIBLE_DEVICES); 0 without a driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    found = ctypes.c_int(0)
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(found)):
        return 0
    return found.value


def what_is_missing() -> str:
    """Why experts cannot run on a GPU here, with the cure; empty when they can."""
    if not count():
        return "no NVIDIA GPU with a working driver was found"
    if not kernels.is_built():
        return "the CUDA kernels are not installed: pip install sgl-ft-kernel, or ./sgl-ft-kernel with nvcc"
    return ""
