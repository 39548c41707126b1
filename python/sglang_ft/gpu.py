"""Which GPUs this machine has for us, and whether we can use them, found without importing torch."""

from __future__ import annotations

import ctypes
import functools
from typing import NamedTuple

from sglang_ft import kernels

LEAST_CAPABILITY = (8, 0)
"""The kernels are compiled for Ampere and newer."""
_CAPABILITY_ATTRIBUTES = (75, 76)  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR


class Gpu(NamedTuple):
    """One NVIDIA GPU. `capability`: its compute capability, like (9, 0); `nbytes`: its memory."""

    name: str
    capability: tuple[int, int]
    nbytes: int = 0


@functools.cache
def found() -> tuple[Gpu, ...]:
    """NVIDIA GPUs that this process may use (CUDA_VISIBLE_DEVICES); none without a driver."""
    driver = _driver()
    number = ctypes.c_int(0)
    if driver is None or driver.cuDeviceGetCount(ctypes.byref(number)):
        return ()
    return tuple(_describe(driver, index) for index in range(number.value))


def free_bytes() -> int:
    """Memory of the first GPU that nobody uses now; all of it where the driver's management library is missing."""
    total = found()[0].nbytes
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return total
    handle, memory = ctypes.c_void_p(), (ctypes.c_ulonglong * 3)()  # total, free, used
    failed = (
        nvml.nvmlInit_v2()
        or nvml.nvmlDeviceGetHandleByPciBusId_v2(_bus_id(), ctypes.byref(handle))
        or nvml.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory))
    )
    return total if failed else min(total, memory[1])


def _bus_id() -> bytes:
    """Of the first GPU that this process may use: NVML counts all there are."""
    device, text = ctypes.c_int(), ctypes.create_string_buffer(32)
    driver = _driver()
    if driver is None or driver.cuDeviceGet(ctypes.byref(device), 0):
        return b""
    driver.cuDeviceGetPCIBusId(text, len(text), device)
    return text.value


def driver_cuda() -> tuple[int, int]:
    """The newest CUDA version that the driver knows, like (13, 0); (0, 0) without a driver."""
    version = ctypes.c_int(0)
    if (driver := _driver()) is not None:
        driver.cuDriverGetVersion(ctypes.byref(version))
    return version.value // 1000, version.value % 1000 // 10


def what_is_missing() -> str:
    """Why experts cannot run on a GPU here, with the cure; empty when they can."""
    if not found():
        return "no NVIDIA GPU with a working driver was found"
    first = found()[0]
    if first.capability < LEAST_CAPABILITY:
        return (
            f"{first.name} has compute capability {_dotted(first.capability)}, "
            f"the kernels need {_dotted(LEAST_CAPABILITY)}"
        )
    if not kernels.is_built():
        return f"the CUDA kernels are not installed: {kernels.CURE}"
    return ""


def _dotted(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))


def _driver() -> ctypes.CDLL | None:
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    return None if driver.cuInit(0) else driver


def _describe(driver: ctypes.CDLL, index: int) -> Gpu:
    device, value = ctypes.c_int(), ctypes.c_int()
    name = ctypes.create_string_buffer(256)
    driver.cuDeviceGet(ctypes.byref(device), index)
    driver.cuDeviceGetName(name, len(name), device)
    capability = []
    for attribute in _CAPABILITY_ATTRIBUTES:
        driver.cuDeviceGetAttribute(ctypes.byref(value), attribute, device)
        capability.append(value.value)
    total = ctypes.c_size_t()
    driver.cuDeviceTotalMem_v2(ctypes.byref(total), device)
    return Gpu(name.value.decode(), (capability[0], capability[1]), total.value)
