"""Parallel reads of weight files straight into their final place, past the page cache where the file system lets us.

Every chunk is checked as it arrives. Several reads of 16 MiB under way keep any disk busy; an own thread for each costs
less than a percent of a core.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from sglang_ft.weights.manifest import CHUNK, DATA_OFFSET, EXPERTS, File, Manifest, WeightsError
from sglang_ft.worker import native

THREADS = 16
_ALIGN = 4096  # of direct reads: memory, offset and length


def checksum(data: torch.Tensor) -> int:
    """CRC-32C of a contiguous uint8 tensor."""
    result: int = native.client().crc32c(0, data.data_ptr(), data.numel())
    return result


class FileReader:
    """One file, opened for direct reads, or for buffered ones where the file system refuses those."""

    def __init__(self, path: Path) -> None:
        self.path, self.direct = path, True
        try:
            self.fd = os.open(path, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
        except OSError as e:
            if e.errno != errno.EINVAL:
                raise WeightsError(f"{path}: cannot be opened: {e.strerror}") from e
            self.fd, self.direct = os.open(path, os.O_RDONLY | os.O_CLOEXEC), False
        self.size = os.fstat(self.fd).st_size
        self._buffered = -1
        self._lock = threading.Lock()

    def read(self, offset: int, to: torch.Tensor) -> None:
        """Fills the uint8 tensor `to` from `offset` on. Raises WeightsError."""
        view = memoryview(to.numpy())
        done, whole = 0, len(view) // _ALIGN * _ALIGN if self.direct else 0
        aligned = to.data_ptr() % _ALIGN == 0 and offset % _ALIGN == 0
        try:
            while aligned and done < whole:
                got = self._read_direct(view[done:whole], offset + done)
                done += got
                if got == 0 or got % _ALIGN:
                    break
            while done < len(view):  # what is no whole block, and all of it where direct reads are refused
                got = os.preadv(self._plain(), [view[done:]], offset + done)
                if got == 0:
                    raise WeightsError(
                        f"{self.path}: ends at offset {offset + done}; copy or convert it again"
                    )
                done += got
        except OSError as e:
            raise WeightsError(f"{self.path}: reading at offset {offset + done} failed: {e.strerror}") from e

    def _read_direct(self, view: memoryview, offset: int) -> int:
        try:
            return os.preadv(self.fd, [view], offset)
        except OSError as e:
            if e.errno != errno.EINVAL:
                raise
            return 0  # larger blocks than we align to: through the cache then

    def _plain(self) -> int:
        with self._lock:
            if self._buffered < 0:
                self._buffered = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC) if self.direct else self.fd
            return self._buffered

    def close(self) -> None:
        for fd in {self.fd, self._buffered} - {-1}:
            os.close(fd)


def read_experts(
    folder: Path,
    manifest: Manifest,
    pool: torch.Tensor,
    progress: Callable[[int], None],
    threads: int = THREADS,
) -> None:
    """Reads the experts of a folder into `pool` (uint8, at least as long) and checks them.

    `progress` gets the bytes of each chunk, from any thread. Raises WeightsError.
    """
    path = folder / EXPERTS

    def describe(at: int) -> str:
        return f"{manifest.place_of(at)}, offset {DATA_OFFSET + at}"

    _read_chunks(
        path, DATA_OFFSET, manifest.experts, lambda at, n: pool[at : at + n], describe, progress, threads
    )


def check_experts(
    folder: Path, manifest: Manifest, progress: Callable[[int], None], threads: int = THREADS
) -> None:
    """Reads the experts of a folder and checks them. Raises WeightsError."""

    def describe(at: int) -> str:
        return f"{manifest.place_of(at)}, offset {DATA_OFFSET + at}"

    _read_chunks(folder / EXPERTS, DATA_OFFSET, manifest.experts, _scratch(), describe, progress, threads)


def check_file(
    folder: Path,
    name: str,
    file: File,
    progress: Callable[[int], None],
    threads: int = THREADS,
) -> None:
    """Reads one of the other files and checks it. Raises WeightsError."""
    _read_chunks(folder / name, 0, file, _scratch(), lambda at: f"offset {at}", progress, threads)


def _scratch() -> Callable[[int, int], torch.Tensor]:
    """Gives each thread a buffer of its own."""
    own = threading.local()

    def buffer(at: int, count: int) -> torch.Tensor:
        if not hasattr(own, "buffer"):
            own.buffer = aligned_buffer(CHUNK)
        piece: torch.Tensor = own.buffer[:count]
        return piece

    return buffer


def aligned_buffer(nbytes: int) -> torch.Tensor:
    """Memory for direct reads; in huge pages where it can be, of which a read has fewer to hold."""
    memory = mmap.mmap(-1, nbytes)
    with contextlib.suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)


def _read_chunks(
    path: Path,
    begin: int,
    file: File,
    place: Callable[[int, int], torch.Tensor],
    describe: Callable[[int], str],
    progress: Callable[[int], None],
    threads: int,
) -> None:
    reader = FileReader(path)
    stop = threading.Event()

    def one(number: int) -> None:
        if stop.is_set():
            return
        at = number * CHUNK
        to = place(at, min(CHUNK, file.nbytes - at))
        try:
            reader.read(begin + at, to)
            if checksum(to) != file.checksums[number]:
                raise WeightsError(
                    f"{path}: damaged at {describe(at)} or up to {CHUNK >> 20} MiB after it: the checksum is another; "
                    "copy or convert it again"
                )
        except WeightsError:
            stop.set()
            raise
        progress(to.numel())

    try:
        with ThreadPoolExecutor(threads) as executor:
            for done in [executor.submit(one, i) for i in range(len(file.checksums))]:
                done.result()
    finally:
        reader.close()


def checksums_of(data: torch.Tensor, threads: int = THREADS) -> Sequence[int]:
    """Of each CHUNK of a uint8 tensor."""
    with ThreadPoolExecutor(threads) as executor:
        return list(executor.map(lambda at: checksum(data[at : at + CHUNK]), range(0, data.numel(), CHUNK)))
