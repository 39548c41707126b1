"""Memory files shared with the cpu_worker: anonymous (memfd), private to the user, never in /dev/shm.

A memfd has no name in any file system; another process reaches it only through an inherited descriptor or,
as the same user, through /proc. Docker's small /dev/shm does not matter.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from sglang_ft.errors import MemoryBudgetError

GIB = 1 << 30
HUGE_PAGE = 2 << 20
_COLLAPSE = 25  # MADV_COLLAPSE, Linux 6.1
_PIECE = 32 * HUGE_PAGE
_MOST_THREADS = 16
_MAP_FIXED = 0x10
_MS_SYNC = 4
_DONTNEED = 4  # MADV_DONTNEED

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.msync.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


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
            self.address = _map_aligned(self.fd, size, 0)
        except OSError as e:
            os.close(self.fd)
            raise MemoryBudgetError(
                f"cannot map {size / GIB:.2f} GiB of shared memory for the {name}: {e}"
            ) from e
        self.bytes = _tensor_over(self.address, size)

    @classmethod
    def adopt(cls, fd: int) -> MemoryFile:
        """A memory file that another process has made and filled; owns `fd` from now on. Raises OSError.

        Where writes are sealed it is mapped read-only: whoever writes to its tensors ends the process.
        """
        self = cls.__new__(cls)
        self.fd, self.size = fd, os.fstat(fd).st_size
        try:
            try:
                self.address = _map_aligned(fd, self.size, 0)
            except PermissionError:
                self.address = _map_aligned(fd, self.size, 0, mmap.PROT_READ)
        except OSError:
            os.close(fd)
            raise
        self.bytes = _tensor_over(self.address, self.size)
        return self

    def allocate_huge(self) -> int:
        """Allocates all of it now, in pages of 2 MiB where the kernel finds them; returns the bytes that are.

        Reading gigabytes through pages of 4 KiB makes the CPU look up an address for every 4 KiB. The kernel's settings
        leave shared memory at those, but it collapses pages on request. To be called before anything is written: an
        empty page is cheaper to collapse, and to fill later.
        """

        def allocate(begin: int) -> int:
            end = min(begin + _PIECE, self.size // HUGE_PAGE * HUGE_PAGE)
            self.bytes[begin:end:HUGE_PAGE] = 0  # what is not there yet is not collapsed
            return end - begin if _libc.madvise(self.address + begin, end - begin, _COLLAPSE) == 0 else 0

        if self.size < HUGE_PAGE or allocate(0) == 0:
            return 0  # an older kernel, or no such memory left
        with ThreadPoolExecutor(min(_MOST_THREADS, len(os.sched_getaffinity(0)))) as executor:
            return sum(executor.map(allocate, range(0, self.size // HUGE_PAGE * HUGE_PAGE, _PIECE)))

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


class MappedFile(MemoryFile):
    """A part of a file on disk that is written by writing memory; the kernel brings it to disk as it sees fit."""

    def __init__(self, path: Path, offset: int, size: int) -> None:
        """The file must reach to offset + size; `offset` is a multiple of the page size. Raises OSError."""
        self.size = size
        self.fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            self.address = _map_aligned(self.fd, size, offset)
        except OSError:
            os.close(self.fd)
            raise
        self.bytes = _tensor_over(self.address, size)

    def allocate_huge(self) -> int:
        """Nothing: its pages are those of the page cache."""
        return 0

    def flush(self) -> None:
        """Waits until everything is on disk, and lets go of the pages. Raises OSError, as when the disk is full."""
        if _libc.msync(self.address, self.size, _MS_SYNC) != 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
        os.fsync(self.fd)
        _libc.madvise(self.address, self.size, _DONTNEED)


def _tensor_over(address: int, size: int) -> torch.Tensor:
    """The bytes of a mapping, which goes with the last tensor over it."""
    buffer = (ctypes.c_uint8 * size).from_address(address)
    weakref.finalize(buffer, _libc.munmap, address, _round_up(size))
    return torch.frombuffer(buffer, dtype=torch.uint8)


def _map_aligned(fd: int, size: int, offset: int, protection: int = mmap.PROT_READ | mmap.PROT_WRITE) -> int:
    """Maps a file from a border of a huge page on, which python's mmap cannot choose. Raises OSError.

    The mapping takes `size` rounded up to huge pages of the address space.
    """
    span = _round_up(size)
    reserved = _mmap(0, span + HUGE_PAGE, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1)
    address = _round_up(reserved)
    try:
        _mmap(address, size, protection, mmap.MAP_SHARED | _MAP_FIXED, fd, offset)
    except OSError:
        _libc.munmap(reserved, span + HUGE_PAGE)
        raise
    if address > reserved:
        _libc.munmap(reserved, address - reserved)
    _libc.munmap(address + span, reserved + HUGE_PAGE - address)
    return address


def _round_up(size: int) -> int:
    return -(-size // HUGE_PAGE) * HUGE_PAGE


def _mmap(address: int, size: int, protection: int, flags: int, fd: int, offset: int = 0) -> int:
    mapped = _libc.mmap(address, size, protection, flags, fd, offset)
    if mapped == ctypes.c_void_p(-1).value:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return mapped
