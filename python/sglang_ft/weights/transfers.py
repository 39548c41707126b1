"""Many reads of files at once, and something done with each when it has arrived.

By io_uring where the kernel offers it, a few threads with several reads under way each; else a thread for each read.
Containers often forbid io_uring, and file systems that refuse direct reads gain nothing by it.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch

from sglang_ft.errors import CheckpointError
from sglang_ft.worker import native

if TYPE_CHECKING:
    from sglang_ft.weights.reader import FileReader

READS = 16
"""Reads under way at once: so many keep any disk busy."""
ALIGN = 4096
"""Of direct reads: memory, offset and length."""
_FEW_CORES = 4
_HUGE_PAGE = 2 << 20
_MOST_OF_ONE_READ = 1 << 30


def aligned_buffer(nbytes: int) -> torch.Tensor:
    """Memory for direct reads, in huge pages where it can be: a disk's request holds few pages, of whatever size.

    Measured: reads of 16 MiB into pages of 4 KiB come at two thirds of the speed of the disk.
    """
    memory = mmap.mmap(-1, nbytes + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    begin = -whole.data_ptr() % _HUGE_PAGE
    return whole[begin : begin + nbytes]


class _Read(NamedTuple):
    """`to`: where the bytes stay; None: `nbytes` into a buffer that is free again after `done`."""

    file: FileReader
    offset: int
    nbytes: int
    to: torch.Tensor | None
    done: Callable[[torch.Tensor], None]
    future: Future[None]
    what: str = ""


class Transfers:
    """Reads in the order in which they are submitted, READS at a time. Close it, also after an error."""

    def __init__(self, buffer_bytes: int, by_kernel: bool = True) -> None:
        """`buffer_bytes`: of one buffer; longer reads get one of their own. `by_kernel`: io_uring, if there is any."""
        self._buffer_bytes = buffer_bytes
        self._queue: queue.SimpleQueue[_Read | None] = queue.SimpleQueue()
        self._closed = False
        threads = 2 if len(os.sched_getaffinity(0)) < _FEW_CORES else _FEW_CORES
        ways: list[_Way] = []
        if by_kernel:
            with contextlib.suppress(OSError):
                ways += [_ByKernel(READS // threads) for _ in range(threads)]
        self.by_kernel = len(ways) == threads
        """Whether io_uring is used."""
        if not self.by_kernel:
            for way in ways:
                way.close()
            ways = [_ByThread() for _ in range(READS)]
        self._threads = [
            threading.Thread(target=self._work, args=(way,), name="ft-read", daemon=True) for way in ways
        ]
        for thread in self._threads:
            thread.start()

    def submit(
        self, file: FileReader, offset: int, to: torch.Tensor, done: Callable[[torch.Tensor], None]
    ) -> Future[None]:
        """Reads from `offset` on into `to`, uint8, then calls `done(to)` in some thread.

        The future is done after that; it raises what the read or `done` raised.
        """
        return self._submit(_Read(file, offset, to.numel(), to, done, Future()))

    def submit_into_buffer(
        self,
        file: FileReader,
        offset: int,
        nbytes: int,
        done: Callable[[torch.Tensor], None],
        what: str = "",
    ) -> Future[None]:
        """As `submit`, into memory that `done` may use until it returns. `what` is read, for errors."""
        return self._submit(_Read(file, offset, nbytes, None, done, Future(), what))

    def _submit(self, read: _Read) -> Future[None]:
        assert not self._closed
        self._queue.put(read)
        return read.future

    def close(self) -> None:
        """Ends what is under way and cancels the rest."""
        self._closed = True
        for _ in self._threads:
            self._queue.put(None)
        for thread in self._threads:
            thread.join()

    def _work(self, way: _Way) -> None:
        free = list(range(way.depth))
        buffers: dict[int, torch.Tensor] = {}
        under_way: dict[int, tuple[_Read, torch.Tensor]] = {}
        ended = False
        while under_way or not ended:
            while free and not ended:
                try:
                    read = self._queue.get(block=not under_way)
                except queue.Empty:
                    break
                if read is None:
                    ended = True
                elif self._closed:
                    read.future.cancel()
                elif (to := self._place(read, buffers, free[-1])) is not None:
                    slot = free.pop()
                    under_way[slot] = read, to
                    way.begin(slot, read.file, read.offset, to)
            if under_way:
                slot, failure = way.wait()
                self._finish(*under_way.pop(slot), failure)
                free.append(slot)
        way.close()

    def _place(self, read: _Read, buffers: dict[int, torch.Tensor], slot: int) -> torch.Tensor | None:
        """Where a read goes; None if there is no memory for it, which ends it."""
        if read.to is not None:
            return read.to
        try:
            if read.nbytes > self._buffer_bytes:
                return aligned_buffer(read.nbytes)
            if slot not in buffers:
                buffers[slot] = aligned_buffer(self._buffer_bytes)
        except (OSError, MemoryError) as e:
            read.future.set_exception(e)
            return None
        return buffers[slot][: read.nbytes]

    def _finish(self, read: _Read, to: torch.Tensor, failure: BaseException | None) -> None:
        try:
            if failure is not None:
                raise CheckpointError(f"{read.what}: {failure}") if read.what else failure
            read.done(to)
        except BaseException as e:
            read.future.set_exception(e)
        else:
            read.future.set_result(None)


class _Way(Protocol):
    """How one thread reads, `depth` reads at a time, told apart by a number below `depth`."""

    depth: int

    def begin(self, slot: int, file: FileReader, offset: int, to: torch.Tensor) -> None:
        """Fills `to`. Raises nothing."""

    def wait(self) -> tuple[int, BaseException | None]:
        """A read that has ended, and why it failed."""

    def close(self) -> None: ...


class _ByThread:
    depth = 1

    def __init__(self) -> None:
        self._ended: tuple[int, BaseException | None] = 0, None

    def begin(self, slot: int, file: FileReader, offset: int, to: torch.Tensor) -> None:
        self._ended = slot, _read_now(file, offset, to)

    def wait(self) -> tuple[int, BaseException | None]:
        return self._ended

    def close(self) -> None: ...


class _ByKernel:
    """io_uring. What it leaves, for whatever reason, is read as a thread would, which also finds the words."""

    def __init__(self, depth: int) -> None:
        """Raises OSError where there is none."""
        self.depth = depth
        self._client = native.client()
        error = ctypes.c_int()
        self._queue = self._client.reads_open(depth, ctypes.byref(error))
        if not self._queue:
            raise OSError(error.value, os.strerror(error.value))
        self._tag, self._got = ctypes.c_uint64(), ctypes.c_int32()
        self._reads: dict[int, tuple[FileReader, int, torch.Tensor]] = {}
        self._refused: list[int] = []

    def begin(self, slot: int, file: FileReader, offset: int, to: torch.Tensor) -> None:
        self._reads[slot] = file, offset, to
        nbytes = min(to.numel(), _MOST_OF_ONE_READ) // ALIGN * ALIGN
        direct = file.direct and offset % ALIGN == 0 and to.data_ptr() % ALIGN == 0 and nbytes > 0
        if not direct or self._client.reads_begin(self._queue, file.fd, offset, to.data_ptr(), nbytes, slot):
            self._refused.append(slot)

    def wait(self) -> tuple[int, BaseException | None]:
        if self._refused:
            slot, got = self._refused.pop(), 0
        else:
            self._client.reads_wait(self._queue, ctypes.byref(self._tag), ctypes.byref(self._got))
            slot, got = self._tag.value, self._got.value
        file, offset, to = self._reads.pop(slot)
        done = max(got, 0) // ALIGN * ALIGN
        return slot, _read_now(file, offset + done, to[done:]) if done < to.numel() else None

    def close(self) -> None:
        if self._queue:
            self._client.reads_close(self._queue)
            self._queue = None


def _read_now(file: FileReader, offset: int, to: torch.Tensor) -> BaseException | None:
    try:
        file.read(offset, to)
    except Exception as e:
        return e
    return None
