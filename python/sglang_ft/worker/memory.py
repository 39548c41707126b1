"""Memory files shared with the cpu_worker: anonymous (memfd), private to the user, never in /dev/shm.

A memfd has no name in any file system; another process reaches it only through an inherited descriptor or,
as the same user, through /proc. Docker's small /dev/shm does not matter.
"""

from __future__ import annotations

import fcntl
import mmap
import os

import torch

from sglang_ft.errors import MemoryBudgetError

GIB = 1 << 30


class MemoryFile:
    """A memfd of a fixed size, mapped once, writable by this process.

    Pages are allocated when they are first written; `size` alone costs nothing.
    """

    def __init__(self, name: str, size: int) -> None:
        self.size = size
        self.fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.fd, size)
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
            self._map = mmap.mmap(self.fd, size, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        except OSError as e:
            os.close(self.fd)
            raise MemoryBudgetError(
                f"cannot map {size / GIB:.2f} GiB of shared memory for the {name}: {e}"
            ) from e
        self.bytes = torch.frombuffer(self._map, dtype=torch.uint8)
        self.address = self.bytes.data_ptr()

    def seal_writes(self) -> None:
        """Forbids new writable mappings (Linux 5.1): from now on nobody but this mapping can change it."""
        try:
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, 0x0010)  # F_SEAL_FUTURE_WRITE
        except OSError:
            pass  # an older kernel; the worker maps read-only anyway

    def view(self, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Tensor over the bytes at `offset`, sharing memory; it keeps the mapping alive."""
        count = 1
        for n in shape:
            count *= n
        return self.bytes[offset : offset + count * dtype.itemsize].view(dtype).view(shape)

    def close(self) -> None:
        """Closes the descriptor. The mapping goes with the last tensor over it."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
