"""The owner's view of the ring: lays it out, fills job blocks, rings and waits. One thread at a time.

It knows nothing of the process behind the ring; worker/supervisor.py does.
"""

from __future__ import annotations

import ctypes
import functools
import math
from typing import TYPE_CHECKING, NamedTuple

import torch

from sglang_ft.worker import native
from sglang_ft.worker import protocol as p
from sglang_ft.worker.memory import MemoryFile

if TYPE_CHECKING:
    from sglang_ft.experts.bank import BankPlan, LayerBanks

ROW_DTYPES = {torch.bfloat16: p.DType.BF16, torch.float16: p.DType.FP16, torch.float32: p.DType.FP32}
_MAX_ROW_BYTES = 4  # of one element
_CACHED_VIEWS = 1024


class RingSize(NamedTuple):
    """Capacity of a ring: `blocks` jobs of at most `rows` token rows with `topk` routes and `hidden` elements each."""

    blocks: int
    rows: int
    topk: int
    hidden: int


class JobOutcome(NamedTuple):
    """What the worker wrote about a finished job. Times are CLOCK_MONOTONIC nanoseconds."""

    status: p.Status | int
    status_arg: int
    rung_ns: int
    started_ns: int
    finished_ns: int
    experts: int
    nbytes: int


def _line(n: int) -> int:
    return math.ceil(n / p.LINE) * p.LINE


class Ring:
    """A ring file with its header, layer table and job blocks."""

    def __init__(self, size: RingSize, pool_bytes: int, spin_ns: int, nap_ns: int = 0) -> None:
        """`spin_ns`, `nap_ns`: how the worker waits, see ring.h; naps are for an owner that is a GPU."""
        self.size = size
        layers_offset = ctypes.sizeof(p.RingHeader)
        blocks_offset = layers_offset + p.MAX_LAYERS * ctypes.sizeof(p.Layer)
        routes = ctypes.sizeof(p.Block)
        weights = routes + _line(size.rows * size.topk * 4)
        rows = weights + _line(size.rows * size.topk * 4)
        results = rows + _line(size.rows * size.hidden * _MAX_ROW_BYTES)
        stride = results + _line(size.rows * size.hidden * 4)
        self._routes, self._weights, self._rows, self._results = routes, weights, rows, results
        total = blocks_offset + size.blocks * stride

        self.file = MemoryFile("sglang-ft-ring", total)
        self.address = self.file.address
        self.header = p.RingHeader.from_address(self.address)
        self.layers = (p.Layer * p.MAX_LAYERS).from_address(self.address + layers_offset)
        self._blocks = [
            p.Block.from_address(self.address + blocks_offset + i * stride) for i in range(size.blocks)
        ]
        self._block_offsets = [blocks_offset + i * stride for i in range(size.blocks)]
        # Copying one row takes a few microseconds; making its views anew would take several times that.
        self._view = functools.lru_cache(_CACHED_VIEWS)(functools.partial(_view, self.file))
        self._lib = native.client()
        self._sequence = 0
        self._command_sequence = 0

        h = self.header
        h.magic, h.version, h.num_blocks = p.MAGIC, p.VERSION, size.blocks
        h.ring_bytes, h.pool_bytes = total, pool_bytes
        h.layers_offset, h.blocks_offset, h.block_stride = layers_offset, blocks_offset, stride
        h.routes_offset, h.weights_offset, h.rows_offset, h.results_offset = routes, weights, rows, results
        h.max_rows, h.max_topk, h.max_hidden = size.rows, size.topk, size.hidden
        h.spin_ns, h.nap_ns = spin_ns, nap_ns

    def write_layers(self, plan: BankPlan) -> None:
        """Fills the layer table. A worker takes it up when it starts or on Command.ATTACH."""
        for entry, layer in zip(self.layers, plan.layers, strict=False):
            _fill_layer(entry, layer)
        self.header.num_layers = len(plan.layers)

    @property
    def sequence(self) -> int:
        """Number of the last job that `submit` rang."""
        return self._sequence

    def resume_from_doorbells(self) -> None:
        """Goes on after the last job that the GPU rang; none may be under way."""
        self._sequence = max(b.doorbell for b in self._blocks)

    def block(self, sequence: int) -> p.Block:
        """The block of job `sequence` (1, 2, ...)."""
        return self._blocks[(sequence - 1) % self.size.blocks]

    def submit(
        self, layer: int, rows: torch.Tensor, expert_ids: torch.Tensor, router_weights: torch.Tensor
    ) -> int:
        """Fills the next block and rings it; returns the job's sequence number.

        rows [T, H] of bfloat16, float16 or float32; expert_ids [T, k], any integer dtype, -1: skipped;
        router_weights [T, k]. The job that had the block before must have been waited for.
        """
        num_rows, topk = expert_ids.shape
        if not 0 < num_rows <= self.size.rows or topk > self.size.topk or rows.shape[1] > self.size.hidden:
            raise ValueError(
                f"{num_rows} rows, {topk} routes and {rows.shape[1]} elements do not fit {self.size}"
            )
        self._sequence += 1
        block = self.block(self._sequence)
        block.layer, block.rows, block.topk, block.row_dtype = layer, num_rows, topk, ROW_DTYPES[rows.dtype]
        block.shared_expert = -1
        start = self._start(self._sequence)
        self._view(start + self._routes, expert_ids.shape, torch.int32).copy_(expert_ids)
        self._view(start + self._weights, expert_ids.shape, torch.float32).copy_(router_weights)
        self._view(start + self._rows, rows.shape, rows.dtype).copy_(rows)
        self._lib.ring(self.address, self._sequence)
        return self._sequence

    def wait(self, sequence: int, spin_ns: int, timeout_ns: int) -> bool:
        """Whether job `sequence` is done within the time; nothing is lost when it is not."""
        return self._lib.wait(self.address, sequence, spin_ns, timeout_ns) == 0

    def outcome(self, sequence: int) -> JobOutcome:
        """Status, times and counts of a finished job."""
        b = self.block(sequence)
        return JobOutcome(b.status, b.status_arg, b.rung_ns, b.started_ns, b.finished_ns, b.experts, b.bytes)

    def results(self, sequence: int, hidden: int) -> torch.Tensor:
        """float32 [T, H] of a finished job, a view that lives until its block is used again."""
        shape = (self.block(sequence).rows, hidden)
        return self._view(self._start(sequence) + self._results, shape, torch.float32)

    def outstanding(self) -> list[int]:
        """Sequence numbers of rung jobs that are not done."""
        return sorted(b.doorbell for b in self._blocks if b.doorbell > b.done)

    def give_up(self, sequence: int, status: int) -> None:
        """Marks a job done with an error. Only while no worker process exists: it writes the worker's words."""
        self._lib.give_up(self.address, sequence, status)

    def wake(self) -> None:
        """Wakes the worker before a GPU rings jobs by itself; takes about a microsecond."""
        self._lib.wake(self.address)

    def abort(self, value: bool) -> None:
        """While it is set every wait for a job ends, a GPU's too."""
        self._lib.abort(self.address, value)

    def command(self, kind: p.Command, *args: int) -> int:
        """Issues a command and returns its sequence number."""
        for i, value in enumerate(args):
            self.header.arg[i] = value
        self.header.command = kind
        self._command_sequence += 1
        self._lib.command(self.address, self._command_sequence)
        return self._command_sequence

    def command_wait(self, sequence: int, timeout_ns: int) -> bool:
        """Whether command `sequence` is done within the time."""
        return self._lib.command_wait(self.address, sequence, timeout_ns) == 0

    def state_wait(self, state: p.WorkerState, timeout_ns: int) -> bool:
        """Whether the worker left `state` within the time."""
        return self._lib.state_wait(self.address, state, timeout_ns) == 0

    def _start(self, sequence: int) -> int:
        return self._block_offsets[(sequence - 1) % self.size.blocks]


@torch.inference_mode(False)  # a view made in inference mode could not be written outside of it
def _view(file: MemoryFile, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return file.view(offset, shape, dtype)


def _fill_layer(entry: p.Layer, layer: LayerBanks) -> None:
    spec = layer.spec
    flags = p.LayerFlag(0)
    flags |= p.LayerFlag.GATED if spec.gated else p.LayerFlag(0)
    flags |= p.LayerFlag.INTERLEAVED if spec.interleaved else p.LayerFlag(0)
    flags |= p.LayerFlag.WEIGHT_ON_INPUT if spec.weight_on_input else p.LayerFlag(0)
    entry.format, entry.activation, entry.flags = spec.format.wire, spec.activation, flags
    entry.num_experts, entry.hidden, entry.intermediate = spec.num_experts, spec.hidden, spec.intermediate
    entry.first_expert_id, entry.output_scale = layer.first_expert_id, spec.output_scale
    entry.act_alpha, entry.act_limit = spec.act_alpha, spec.act_limit
    for role, view in layer.roles.items():
        entry.role[role] = p.RoleView(view.offset, view.stride)
