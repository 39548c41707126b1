"""Tensors of a checkpoint that are read when they are copied to their final place, in parallel and past the page cache.

Each model of SGLang has its own way to store the checkpoint's expert tensors into its parameters: slices, chunks,
copies. A `LazyTensor` goes through that code as shape and strides alone. The copy into a parameter is where its data
is wanted: there a read straight into the parameter's memory is queued. Whatever else is done with it reads it at once.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_map

from sglang_ft.errors import CheckpointError
from sglang_ft.tensor_files import read_header_entries, weight_files
from sglang_ft.weights.reader import FileReader
from sglang_ft.weights.transfers import ALIGN, Transfers, aligned_buffer

_PIECE = 4 << 20
"""Bytes of one read, a multiple of ALIGN."""
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
        self,
        folder: Path,
        progress: Callable[[int, int], None] = lambda address, nbytes: None,
        by_kernel: bool = True,
    ) -> None:
        """`progress` gets address and size of what has been written, from any thread. `by_kernel`: see Transfers."""
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
        self._readers: dict[Path, FileReader] = {}
        self._lock = threading.Lock()
        direct = all(self._reader(path).direct for path in {place[0] for place in self._places.values()})
        self._transfers = Transfers(_PIECE, by_kernel and direct)
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
        if meta.numel() == 0:
            return []
        if meta.is_contiguous() and to.is_contiguous() and to.dtype == meta.dtype and to.device.type == "cpu":
            return list(self._start_bytes(name, meta, to))
        pieces = [(meta, to)]
        if meta.dim() and meta.numel() * meta.element_size() > _PIECE and meta.shape[0] > 1:
            rows = max(1, _PIECE * meta.shape[0] // (meta.numel() * meta.element_size()))
            pieces = list(zip(meta.split(rows), to.split(rows), strict=True))
        return [self._start_view(name, part, target) for part, target in pieces]

    def _start_bytes(self, name: str, meta: torch.Tensor, to: torch.Tensor) -> Iterator[Future[None]]:
        """Reads that begin and end at borders of direct reads, and a plain copy out of each."""
        address, end = to.data_ptr(), to.data_ptr() + to.nbytes
        offset = self._places[name][1] + meta.storage_offset() * meta.element_size()
        while address < end:
            skipped = offset % ALIGN
            nbytes = min(_PIECE - skipped, end - address)
            done = functools.partial(self._copy_bytes, to, address, skipped, nbytes)
            yield self._read(name, offset - skipped, skipped + nbytes, done)
            address, offset = address + nbytes, offset + nbytes

    def _copy_bytes(
        self, to: torch.Tensor, address: int, skipped: int, nbytes: int, data: torch.Tensor
    ) -> None:
        """Of `data` into `to`, which is here to stay alive; torch would start threads of its own."""
        ctypes.memmove(address, data.data_ptr() + skipped, nbytes)
        self._progress(address, nbytes)

    def _start_view(self, name: str, meta: torch.Tensor, to: torch.Tensor) -> Future[None]:
        first, nbytes = _extent(meta)
        offset = self._places[name][1] + first
        skipped = offset % ALIGN

        def copy(data: torch.Tensor) -> None:
            _copy_view(meta, data[skipped : skipped + nbytes], to)
            self._progress(to.data_ptr(), to.numel() * meta.element_size())

        return self._read(name, offset - skipped, skipped + nbytes, copy)

    def _read(
        self, name: str, offset: int, nbytes: int, done: Callable[[torch.Tensor], None]
    ) -> Future[None]:
        reader = self._reader(self._places[name][0])
        length = _whole_blocks(nbytes, reader.size - offset)
        return self._transfers.submit_into_buffer(reader, offset, length, done, name)

    def read_now(self, name: str, meta: torch.Tensor) -> torch.Tensor:
        """A copy of that part of a tensor, not after but beside what is queued."""
        out = torch.empty(meta.shape, dtype=meta.dtype)
        if meta.numel() == 0:
            return out
        first, nbytes = _extent(meta)
        path, begin, _, _ = self._places[name]
        reader, skipped = self._reader(path), (begin + first) % ALIGN
        offset = begin + first - skipped
        buffer = aligned_buffer(_whole_blocks(skipped + nbytes, reader.size - offset))
        try:
            reader.read(offset, buffer)
        except CheckpointError as e:
            raise CheckpointError(f"{name}: {e}") from e
        _copy_view(meta, buffer[skipped : skipped + nbytes], out)
        self._progress(out.data_ptr(), out.nbytes)
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
        self._transfers.close()
        for reader in self._readers.values():
            reader.close()

    def _reader(self, path: Path) -> FileReader:
        with self._lock:
            if path not in self._readers:
                self._readers[path] = FileReader(path)
            return self._readers[path]


def _whole_blocks(nbytes: int, there: int) -> int:
    """As many bytes as blocks have that hold `nbytes`, so that all of them are read directly, if so many are there."""
    return max(nbytes, min(-(-nbytes // ALIGN) * ALIGN, there))


def _extent(meta: torch.Tensor) -> tuple[int, int]:
    """First byte of a view in its tensor, and the number of bytes from there to its last."""
    size = meta.element_size()
    last = sum((n - 1) * stride for n, stride in zip(meta.shape, meta.stride(), strict=True) if n > 1)
    return meta.storage_offset() * size, (last + 1) * size


def _copy_view(meta: torch.Tensor, data: torch.Tensor, to: torch.Tensor) -> None:
    """`data`: the bytes of the view's extent."""
    aligned = data.storage_offset() % meta.element_size() == 0
    view = data.view(meta.dtype) if aligned else data.clone().view(meta.dtype)
    to.copy_(view.as_strided(meta.shape, meta.stride(), view.storage_offset()))


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
