"""Tensors of a checkpoint that are read when they are copied to their final place, in parallel and past the page cache.

Each model of SGLang has its own way to store the checkpoint's expert tensors into its parameters: slices, chunks,
copies. A `LazyTensor` goes through that code as shape and strides alone. The copy into a parameter is where its data
is wanted: there a read straight into the parameter's memory is queued. Whatever else is done with it reads it at once.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_map

from sglang_ft.errors import CheckpointError
from sglang_ft.tensor_files import read_header_entries, weight_files
from sglang_ft.weights.reader import THREADS, FileReader, aligned_buffer

_PIECE = 8 << 20
_ALIGN = 4096
_aten = torch.ops.aten
_DTYPES = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F64": torch.float64,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
}


class Reads:
    """Queued reads of one checkpoint. `wait` for them before anybody looks at what they fill."""

    def __init__(
        self, folder: Path, progress: Callable[[int], None] = lambda _: None, threads: int = THREADS
    ) -> None:
        self._places: dict[str, tuple[Path, int, str, tuple[int, ...]]] = {}
        for path in weight_files(folder):
            begin, header = read_header_entries(path)
            for name, entry in header.items():
                self._places[name] = (
                    path,
                    begin + entry["data_offsets"][0],
                    entry["dtype"],
                    tuple(entry["shape"]),
                )
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix="ft-read")
        self._readers: dict[Path, FileReader] = {}
        self._lock = threading.Lock()
        self._own = threading.local()
        self._queued: list[Future[None]] = []
        self._progress = progress

    def tensor(self, name: str) -> LazyTensor | None:
        """The tensor of that name; None if no file has it or its type is not known here."""
        place = self._places.get(name)
        if place is None or place[2] not in _DTYPES:
            return None
        meta = torch.empty(place[3], dtype=_DTYPES[place[2]], device="meta")
        return LazyTensor(self, name, meta)

    def names(self) -> list[str]:
        """Of all tensors, file by file, in the order in which they lie there."""
        return sorted(self._places, key=lambda name: self._places[name][:2])

    def queue(self, name: str, meta: torch.Tensor, to: torch.Tensor) -> None:
        """Reads the part of tensor `name` that `meta` is a view of into `to`."""
        reads = self._start(name, meta if meta.shape == to.shape else meta.expand(to.shape), to)
        with self._lock:
            self._queued += reads

    def start(self, name: str) -> tuple[torch.Tensor, list[Future[None]]] | None:
        """Begins to read a whole tensor: it is there when all futures are done. None as with `tensor`."""
        lazy = self.tensor(name)
        if lazy is None:
            return None
        out = torch.empty(lazy.shape, dtype=lazy.dtype)
        return out, self._start(name, lazy._meta, out)

    def _start(self, name: str, meta: torch.Tensor, to: torch.Tensor) -> list[Future[None]]:
        pieces = [(meta, to)]
        if meta.dim() and meta.numel() * meta.element_size() > _PIECE and meta.shape[0] > 1:
            rows = max(1, _PIECE * meta.shape[0] // (meta.numel() * meta.element_size()))
            pieces = list(zip(meta.split(rows), to.split(rows), strict=True))
        return [self._executor.submit(self._read, name, part, target) for part, target in pieces]

    def read_now(self, name: str, meta: torch.Tensor) -> torch.Tensor:
        """A copy of that part of a tensor."""
        out = torch.empty(meta.shape, dtype=meta.dtype)
        self._read(name, meta, out)
        return out

    def wait(self) -> None:
        """Until everything queued so far is in place. Raises CheckpointError."""
        while True:
            with self._lock:
                queued, self._queued = self._queued, []
            if not queued:
                return
            for future in queued:
                future.result()

    def close(self) -> None:
        self._executor.shutdown(cancel_futures=True)
        for reader in self._readers.values():
            reader.close()

    def _read(self, name: str, meta: torch.Tensor, to: torch.Tensor) -> None:
        path, begin, _, _ = self._places[name]
        size = meta.element_size()
        first = meta.storage_offset() * size
        last = sum((n - 1) * stride for n, stride in zip(meta.shape, meta.stride(), strict=True) if n > 1)
        nbytes = (last + 1) * size if meta.numel() else 0
        if nbytes == 0:
            return
        data = self._bytes(path, name, begin + first, nbytes)
        if meta.is_contiguous() and to.is_contiguous() and to.dtype == meta.dtype and to.device.type == "cpu":
            ctypes.memmove(to.data_ptr(), data.data_ptr(), nbytes)  # torch would start threads of its own
            self._progress(nbytes)
            return
        view = data.view(meta.dtype) if data.storage_offset() % size == 0 else data.clone().view(meta.dtype)
        to.copy_(view.as_strided(meta.shape, meta.stride(), view.storage_offset()))
        self._progress(to.numel() * size)

    def _bytes(self, path: Path, name: str, offset: int, nbytes: int) -> torch.Tensor:
        """Part of a file, in this thread's own memory, whose borders are those of direct reads."""
        skipped = offset % _ALIGN
        length = -(-(skipped + nbytes) // _ALIGN) * _ALIGN
        buffer: torch.Tensor | None = getattr(self._own, "buffer", None)
        if buffer is None or buffer.numel() < length:
            self._own.buffer = buffer = aligned_buffer(
                -(-max(length, _PIECE) // mmap.PAGESIZE) * mmap.PAGESIZE
            )
        reader = self._reader(path)
        if offset + nbytes > reader.size:
            raise CheckpointError(
                f"{name}: {path} ends at {reader.size}, before the tensor; download it again"
            )
        try:
            reader.read(offset - skipped, buffer[: min(length, reader.size - (offset - skipped))])
        except CheckpointError as e:
            raise CheckpointError(f"{name}: {e}") from e
        return buffer[skipped : skipped + nbytes]

    def _reader(self, path: Path) -> FileReader:
        with self._lock:
            if path not in self._readers:
                self._readers[path] = FileReader(path)
            return self._readers[path]


class Ahead:
    """Tensors of a checkpoint one after another, the next ones being read already."""

    def __init__(self, reads: Reads, names: list[str], most_bytes: int = 1 << 30) -> None:
        """`names` in the order in which they will be asked for, more or less; up to `most_bytes` are read ahead."""
        self._reads, self._most = reads, most_bytes
        self._order = {name: position for position, name in enumerate(names)}
        self._names = names
        self._started: dict[str, tuple[torch.Tensor, list[Future[None]]]] = {}
        self._next = self._bytes = 0

    def take(self, name: str) -> torch.Tensor | None:
        """The tensor, in memory of its own; None if it is not among the names or of an unknown type.

        Raises CheckpointError.
        """
        position = self._order.get(name)
        if position is None:
            return None
        if name not in self._started:
            self._next = max(self._next, position)
        while self._next < len(self._names) and (self._bytes < self._most or self._next <= position):
            self._start(self._names[self._next])
            self._next += 1
        if name not in self._started and not self._start(name):
            return None
        tensor, reads = self._started.pop(name)
        self._bytes -= tensor.nbytes
        for read in reads:
            read.result()
        return tensor

    def _start(self, name: str) -> bool:
        started = self._reads.start(name)
        if started is None:
            return False
        self._started[name] = started
        self._bytes += started[0].nbytes
        return True


class LazyTensor(torch.Tensor):
    """A tensor of a checkpoint, or a view of one, that has not been read."""

    _reads: Reads
    _name: str
    _meta: torch.Tensor

    @staticmethod
    def __new__(cls, reads: Reads, name: str, meta: torch.Tensor) -> LazyTensor:  # noqa: D102
        self: LazyTensor = torch.Tensor._make_wrapper_subclass(
            cls,
            meta.size(),
            strides=meta.stride(),
            storage_offset=meta.storage_offset(),
            dtype=meta.dtype,
            device="cpu",
        )
        self._reads, self._name, self._meta = reads, name, meta
        return self

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: D102
        kwargs = kwargs or {}
        if func is _aten.copy_.default and not isinstance(args[0], LazyTensor):
            args[1]._reads.queue(args[1]._name, args[1]._meta, args[0])
            return args[0]
        if func.is_view or func is _aten.detach.default:
            lazy = args[0]
            metas = func(*tree_map(_meta_of, args), **tree_map(_meta_of, kwargs))
            return tree_map(
                lambda t: LazyTensor(lazy._reads, lazy._name, t) if isinstance(t, torch.Tensor) else t, metas
            )
        return func(*tree_map(_data_of, args), **tree_map(_data_of, kwargs))

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # noqa: D105
        return f"LazyTensor({self._name}, {tuple(self.shape)}, {self.dtype})"


def _meta_of(value: Any) -> Any:
    return value._meta if isinstance(value, LazyTensor) else value


def _data_of(value: Any) -> Any:
    return value._reads.read_now(value._name, value._meta) if isinstance(value, LazyTensor) else value
