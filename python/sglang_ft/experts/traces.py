"""Route traces: which experts every token row was routed to, in every MoE layer, step by step.

What a trace is used for (replay.py, the engine's recorder and playback) is not decided here.

The file, little endian:

    8 bytes   b"FTROUTES"
    uint32    version: 1
    uint32    length of the text that follows
    text      JSON: num_layers, num_experts, top_k, model, made_by
    records   one a token row, all of the same size, rows of a step one after another:
        int32                       rows of this step that still follow; 0 ends the step
        int16 [num_layers, top_k]   experts, numbered within the layer; -1: no route

Records of one size let a reader map the file and find all steps at once, whatever their rows; a file cut anywhere is
good up to the last record that ends a step.
"""

from __future__ import annotations

import dataclasses
import json
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch

from sglang_ft.errors import TraceError

MAGIC = b"FTROUTES"
VERSION = 1
MAX_EXPERTS = np.iinfo(np.int16).max + 1
_PREFIX = struct.Struct("<8sII")
_MAX_TEXT = 1 << 16  # bytes
_CHUNK_STEPS = 64  # of a synthetic trace, drawn at once


@dataclass(frozen=True)
class TraceHeader:
    """What the routes belong to. `num_layers` counts MoE layers, in model order; the rest is as in config.json."""

    num_layers: int
    num_experts: int
    top_k: int
    model: str = ""
    made_by: str = ""

    def __post_init__(self) -> None:
        sizes = (self.num_layers, self.num_experts, self.top_k)
        if any(not isinstance(size, int) or size < 1 for size in sizes) or self.num_experts > MAX_EXPERTS:
            raise TraceError(
                f"a route trace needs layers, experts and top_k of at least 1 and at most {MAX_EXPERTS:,} experts, "
                f"not {self.num_layers}, {self.num_experts} and {self.top_k}"
            )

    @property
    def record(self) -> np.dtype[np.void]:
        return np.dtype([("left", "<i4"), ("routes", "<i2", (self.num_layers, self.top_k))])


@dataclass(frozen=True, eq=False)
class Trace:
    """Routes of consecutive steps.

    `routes` [rows, layers, top_k] int16: the rows of all steps, in order; read-only where it is a map of a file.
    `starts` [steps + 1] int64: where each step begins in it. `cut_bytes`: what was left over at the end of the file.
    """

    header: TraceHeader
    routes: np.ndarray
    starts: np.ndarray
    cut_bytes: int = 0

    @property
    def num_steps(self) -> int:
        return len(self.starts) - 1

    def step(self, number: int) -> np.ndarray:
        """Routes of one step, [rows, layers, top_k] int16."""
        return self.routes[self.starts[number] : self.starts[number + 1]]

    def __iter__(self) -> Iterator[np.ndarray]:
        return (self.step(number) for number in range(self.num_steps))

    def last(self, count: int) -> Trace:
        """The last `count` steps."""
        if not 1 <= count <= self.num_steps:
            raise TraceError(f"a trace of {self.num_steps} steps has no last {count}")
        starts = self.starts[-count - 1 :]
        return Trace(self.header, self.routes[starts[0] : starts[-1]], starts - starts[0])

    def stretches(self, count: int) -> list[Trace]:
        """`count` consecutive traces of equally many steps; what does not divide is left out."""
        if not 1 <= count <= self.num_steps:
            raise TraceError(f"a trace of {self.num_steps} steps cannot be cut into {count} stretches")
        steps = self.num_steps // count
        borders = [self.starts[i * steps : (i + 1) * steps + 1] for i in range(count)]
        return [Trace(self.header, self.routes[b[0] : b[-1]], b - b[0]) for b in borders]


def side_by_side(traces: Sequence[Trace]) -> Trace:
    """The traces as concurrent requests: step i has the rows of step i of every trace. Ends with the shortest."""
    shapes = {(t.header.num_layers, t.header.num_experts, t.header.top_k) for t in traces}
    if len(shapes) != 1:
        raise TraceError(f"traces of different models cannot run side by side: {sorted(shapes)}")
    steps = min(t.num_steps for t in traces)
    parts = [t.step(i) for i in range(steps) for t in traces]
    rows = [sum(len(part) for part in parts[i : i + len(traces)]) for i in range(0, len(parts), len(traces))]
    return Trace(traces[0].header, np.concatenate(parts), np.cumsum([0, *rows]))


class TraceWriter:
    """Appends steps to a new file. Every step is handed to the system at once, so a crash loses none before it."""

    def __init__(self, path: str | Path, header: TraceHeader) -> None:
        """Raises TraceError if the file exists or cannot be made."""
        self.path, self.header = Path(path), header
        text = json.dumps(dataclasses.asdict(header)).encode()
        try:
            self._file: BinaryIO = open(self.path, "xb", buffering=0)
        except FileExistsError:
            raise TraceError(f"{path}: exists; name another file or remove it") from None
        except OSError as e:
            raise TraceError(f"{path}: cannot be made: {e.strerror}") from e
        self._end = 0
        self._write(_PREFIX.pack(MAGIC, VERSION, len(text)) + text)

    def append(self, routes: np.ndarray | torch.Tensor) -> None:
        """Adds one step: [rows, layers, top_k], any integer type. A step without rows adds nothing.

        Raises TraceError for another shape or an expert that the model has not, and if the disk is full; the file
        then ends with the step before.
        """
        routes = np.asarray(routes)
        rows = len(routes)
        if routes.shape[1:] != (self.header.num_layers, self.header.top_k):
            raise TraceError(
                f"{self.path}: a step has the shape [rows, {self.header.num_layers} layers, "
                f"{self.header.top_k} routes], not {list(routes.shape)}"
            )
        _check_range(self.path, routes, self.header)
        records = np.empty(rows, self.header.record)
        records["left"] = np.arange(rows)[::-1]
        records["routes"] = routes
        self._write(records.tobytes())

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> TraceWriter:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _write(self, data: bytes) -> None:
        left = memoryview(data)
        try:
            while left:
                left = left[self._file.write(left) :]
        except OSError as e:
            self._file.truncate(self._end)
            self._file.seek(self._end)
            raise TraceError(f"{self.path}: cannot be written: {e.strerror}") from e
        self._end += len(data)


def write_trace(path: str | Path, trace: Trace) -> None:
    """Writes a whole trace into a new file. Raises TraceError as TraceWriter does."""
    with TraceWriter(path, trace.header) as writer:
        for routes in trace:
            writer.append(routes)


def read_trace(path: str | Path) -> Trace:
    """Maps a trace file. What follows the last whole step is left out and counted in `cut_bytes`.

    Raises TraceError if it is missing, not a trace, of another version, damaged, or without a whole step.
    """
    path = Path(path)
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            header, begin = _read_header(path, file)
    except OSError as e:
        raise TraceError(f"{path}: cannot be read: {e.strerror}") from e
    count = (size - begin) // header.record.itemsize
    records = (
        np.memmap(path, header.record, "r", begin, (count,)) if count > 0 else np.empty(0, header.record)
    )
    ends = np.flatnonzero(records["left"] == 0) + 1
    if not len(ends):
        raise TraceError(f"{path}: cut before the end of the first step ({size} bytes)")
    starts = np.concatenate([[0], ends])
    records = records[: starts[-1]]
    wrong = np.flatnonzero(records["left"] != np.repeat(ends, np.diff(starts)) - np.arange(len(records)) - 1)
    if len(wrong):
        raise TraceError(f"{path}: damaged at byte {begin + int(wrong[0]) * header.record.itemsize}")
    routes = records["routes"]
    _check_range(path, routes, header)
    return Trace(header, routes, starts, cut_bytes=size - begin - int(starts[-1]) * header.record.itemsize)


def _read_header(path: Path, file: BinaryIO) -> tuple[TraceHeader, int]:
    """The header and where the records begin."""
    prefix = file.read(_PREFIX.size)
    if len(prefix) < _PREFIX.size or prefix[: len(MAGIC)] != MAGIC:
        raise TraceError(f"{path}: not a route trace; --ft-record-routes and sglang-ft bench trace write one")
    _, version, length = _PREFIX.unpack(prefix)
    if version != VERSION:
        raise TraceError(f"{path}: a trace of version {version}; this sglang_ft reads version {VERSION}")
    text = file.read(min(length, _MAX_TEXT))
    try:
        fields: dict[str, Any] = json.loads(text)
        known = {f.name for f in dataclasses.fields(TraceHeader)}
        header = TraceHeader(**{name: value for name, value in fields.items() if name in known})
    except (ValueError, TypeError, AttributeError) as e:
        raise TraceError(f"{path}: cut or damaged in its header: {e}") from e
    return header, _PREFIX.size + length


def _check_range(path: Path, routes: np.ndarray, header: TraceHeader) -> None:
    if routes.size and not (-1 <= routes.min() and routes.max() < header.num_experts):
        raise TraceError(
            f"{path}: routes from {routes.min()} to {routes.max()}, but the model has {header.num_experts} experts"
        )


def router_scales(num_experts: int, locality: float) -> torch.Tensor:
    """[num_experts] float32, ascending: exp(locality * n), n the quantiles of a standard normal.

    Quantiles, because drawn numbers gave miss rates that differed by points from seed to seed.
    """
    middles = (torch.arange(num_experts, dtype=torch.float64) + 0.5) / num_experts
    return torch.exp(locality * torch.special.ndtri(middles)).float()


def synthetic_trace(
    num_layers: int,
    num_experts: int,
    top_k: int,
    steps: int,
    locality: float,
    seed: int,
    sequences: int = 1,
) -> Trace:
    """Routes of a random model whose router rows are multiplied by `router_scales`, in random order in each layer.

    The hidden state is drawn afresh for each row and layer: a random model's hardly depends on the token before, and
    the miss rate is steady once the cache is full. So logits are independent normals with the scale of their expert
    (exact as the hidden size grows), of which each row takes the top_k. Locality 0 routes uniformly; a larger one
    prefers some experts of each layer, each at most every second time. `sequences` rows a step share the router.
    """
    header = TraceHeader(
        num_layers, num_experts, top_k, made_by=f"synthetic, locality {locality:g}, seed {seed}"
    )
    random = np.random.default_rng(seed)
    scale = random.permuted(np.tile(router_scales(num_experts, locality), (num_layers, 1)), axis=1)
    routes = np.empty((steps * sequences, num_layers, top_k), np.int16)
    for begin in range(0, len(routes), _CHUNK_STEPS):
        chunk = routes[begin : begin + _CHUNK_STEPS]
        logits = scale * random.standard_normal((len(chunk), *scale.shape), dtype=np.float32)
        chunk[:] = np.argpartition(-logits, top_k - 1, axis=-1)[..., :top_k]
    return Trace(header, routes, np.arange(steps + 1) * sequences)
