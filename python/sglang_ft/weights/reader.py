"""Reads of weight files straight into their final place, past the page cache where the file system lets us.

Every chunk is checked as it arrives.
"""

from __future__ import annotations

import errno
import functools
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch

from sglang_ft.weights.manifest import CHUNK, DATA_OFFSET, EXPERTS, File, Manifest, WeightsError
from sglang_ft.weights.transfers import ALIGN, READS, Transfers
from sglang_ft.worker import native


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
        done, whole = 0, len(view) // ALIGN * ALIGN if self.direct else 0
        aligned = to.data_ptr() % ALIGN == 0 and offset % ALIGN == 0
        try:
            while aligned and done < whole:
                got = self._read_direct(view[done:whole], offset + done)
                done += got
                if got == 0 or got % ALIGN:
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


class CheckedReads:
    """Reads of the files of an FTW folder, one after another without a pause, each chunk checked as it arrives."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self._folder, self._manifest = folder, manifest
        self._files: list[FileReader] = []
        self._chunks: list[Future[None]] = []
        self._transfers: Transfers | None = None

    def experts(self, pool: torch.Tensor | None, progress: Callable[[int, int], None]) -> None:
        """Queues the experts, into `pool` (uint8, at least as long), or only to be checked.

        `progress` gets offset and size of each chunk that is in place, from any thread. Raises WeightsError.
        """

        def describe(at: int) -> str:
            return f"{self._manifest.place_of(at)}, offset {DATA_OFFSET + at}"

        self._queue(EXPERTS, DATA_OFFSET, self._manifest.experts, pool, describe, progress)

    def others(self, progress: Callable[[int, int], None]) -> None:
        """Queues all other files, to be checked. Raises WeightsError."""
        for name, file in self._manifest.others.items():
            self._queue(name, 0, file, None, lambda at: f"offset {at}", progress)

    def wait(self) -> None:
        """Until everything queued so far is there. Raises WeightsError."""
        chunks, self._chunks = self._chunks, []
        for chunk in chunks:
            chunk.result()

    def close(self) -> None:
        """Whatever is under way or queued is given up."""
        if self._transfers is not None:
            self._transfers.close()
        for file in self._files:
            file.close()

    def _queue(
        self,
        name: str,
        begin: int,
        file: File,
        to: torch.Tensor | None,
        describe: Callable[[int], str],
        progress: Callable[[int, int], None],
    ) -> None:
        reader = FileReader(self._folder / name)
        self._files.append(reader)
        if self._transfers is None:
            self._transfers = Transfers(CHUNK, reader.direct)

        def check(number: int, data: torch.Tensor) -> None:
            at = number * CHUNK
            if checksum(data) != file.checksums[number]:
                raise WeightsError(
                    f"{reader.path}: damaged at {describe(at)} or up to {CHUNK >> 20} MiB after it: the checksum is "
                    "another; copy or convert it again"
                )
            progress(at, data.numel())

        for number in range(len(file.checksums)):
            at, done = number * CHUNK, functools.partial(check, number)
            end = min(at + CHUNK, file.nbytes)
            if to is None:
                chunk = self._transfers.submit_into_buffer(reader, begin + at, end - at, done)
            else:
                chunk = self._transfers.submit(reader, begin + at, to[at:end], done)
            self._chunks.append(chunk)


def read_experts(folder: Path, manifest: Manifest, pool: torch.Tensor) -> None:
    """Reads the experts of a folder into `pool` (uint8, at least as long) and checks them. Raises WeightsError."""
    reads = CheckedReads(folder, manifest)
    try:
        reads.experts(pool, lambda at, nbytes: None)
        reads.wait()
    finally:
        reads.close()


def checksums_of(data: torch.Tensor, threads: int = READS) -> Sequence[int]:
    """Of each CHUNK of a uint8 tensor."""
    with ThreadPoolExecutor(threads) as executor:
        return list(executor.map(lambda at: checksum(data[at : at + CHUNK]), range(0, data.numel(), CHUNK)))
