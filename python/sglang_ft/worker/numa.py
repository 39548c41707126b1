"""Where memory lies on machines with several nodes: the expert pool is spread over all of them, page by page.

Each expert is read by all threads, of whatever node, and by the GPU; spread, its reads use the memory of all nodes at
once, and no node runs full while another is empty.
"""

from __future__ import annotations

import ctypes
import logging
import os
import platform
from pathlib import Path

logger = logging.getLogger(__name__)

_SYS_NODE = Path("/sys/devices/system/node")
_STATUS = Path("/proc/self/status")
_MBIND = {"x86_64": 237, "aarch64": 235}  # the number of the system call, which libc does not offer
_MPOL_INTERLEAVE = 3
_MASK_BITS = 1024

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


def memory_nodes(root: Path = _SYS_NODE, status: Path = _STATUS) -> list[int]:
    """The nodes with memory that this process may use; empty where the kernel does not tell."""
    try:
        nodes = _parse((root / "has_memory").read_text())
        allowed = next(
            line for line in status.read_text().splitlines() if line.startswith("Mems_allowed_list:")
        )
        return sorted(nodes & _parse(allowed.partition(":")[2]))
    except (OSError, ValueError, StopIteration):
        return []


def spread(address: int, nbytes: int, nodes: list[int]) -> bool:
    """Spreads memory whose pages are not there yet; False where that is not possible, which only costs speed."""
    if len(nodes) < 2:
        return False
    number = _MBIND.get(platform.machine())
    if number is None:
        return False
    if error := _mbind(number, address, nbytes, nodes):
        logger.warning(
            "The expert pool is not spread over the %d memory nodes: %s (containers need CAP_SYS_NICE for it); "
            "`numactl --interleave=all` before the command does the same",
            len(nodes),
            os.strerror(error),
        )
        return False
    return True


def _mbind(number: int, address: int, nbytes: int, nodes: list[int]) -> int:
    """0 or an errno."""
    words = (ctypes.c_uint64 * (_MASK_BITS // 64))()
    for node in nodes:
        words[node // 64] |= 1 << node % 64
    result = _libc.syscall(
        ctypes.c_long(number),
        ctypes.c_void_p(address),
        ctypes.c_ulong(nbytes),
        ctypes.c_int(_MPOL_INTERLEAVE),
        ctypes.byref(words),
        ctypes.c_ulong(_MASK_BITS),
        ctypes.c_uint(0),
    )
    return ctypes.get_errno() if result else 0


def _parse(text: str) -> set[int]:
    """'0-1,3' -> {0, 1, 3}."""
    found: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return found
