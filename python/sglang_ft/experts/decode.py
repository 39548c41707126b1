"""Decode steps on the GPU: the expert cache, with every decision made by kernels, so that a CUDA graph holds it.

`ExpertCache` owns the device state; `step` enqueues one step of one layer: plan, hits beside fills beside the job of
the worker, then one join. sgl-ft-kernel's api.h describes the kernels, experts/step.py their rules.
"""

from __future__ import annotations

import ctypes
from ctypes import byref
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from sglang_ft import kernels
from sglang_ft.errors import MemoryBudgetError, WorkerError
from sglang_ft.experts.cache_state import CacheState
from sglang_ft.experts.compact import keep_latest
from sglang_ft.experts.slots import RegisteredMemory, SlotPool
from sglang_ft.kernels import abi, check
from sglang_ft.worker.protocol import DType, LayerFlag, Status

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sglang_ft.experts.bank import ExpertPool, LayerBanks
    from sglang_ft.experts.registration import Registration
    from sglang_ft.experts.step import Split
    from sglang_ft.worker.protocol import Role
    from sglang_ft.worker.ring import Ring

MAX_ROWS = 64
"""Rows of a step that a CUDA graph may hold."""
MAX_PROMPT_ROWS = 256
"""Rows of a step that is a part of a short prompt; more than that touch nearly every expert."""
_GATHER_BLOCKS = 8
"""Of an expert. A hundred experts together keep any GPU busy."""
_ROW_DTYPES = {torch.bfloat16: DType.BF16, torch.float16: DType.FP16}


class ExpertCache:
    """The experts of a model on the GPU: some in slots, all in the pool. One process, one device."""

    def __init__(
        self,
        pool: ExpertPool,
        ring: Ring,
        topk: int,
        slots: int,
        device: int,
        most_slots: int = 0,
        registration: Registration | None = None,
    ) -> None:
        """`slots` have memory at first, `most_slots` at most ever. All layers must be of one shape and format.

        `registration` of the pool, if it has begun.
        """
        self.pool, self.ring, self.topk = pool, ring, topk
        self.device = torch.device("cuda", device)
        self._lib = kernels.library()
        specs = [layer.spec for layer in pool.plan.layers]
        self.spec = specs[0]
        assert not slots or all(spec == self.spec for spec in specs), "the slots of a pool have one shape"
        self.most_rows = min(MAX_PROMPT_ROWS, abi.MAX_PAIRS // topk, ring.size.rows)
        self.max_rows = min(MAX_ROWS, self.most_rows)
        self.memory = RegisteredMemory(pool.file, registration)
        self._ring_memory = RegisteredMemory(ring.file)
        while not self._ring_memory.complete and self.memory.give_back_last():
            self._ring_memory.close()  # it is small and needed; the pool has what may be pinned beside it
            self._ring_memory = RegisteredMemory(ring.file)
        if not self._ring_memory.complete:
            raise MemoryBudgetError(
                f"the {ring.file.size >> 20} MiB that the GPU and the cpu_worker share cannot be pinned: "
                f"{self._ring_memory.failure}; raise the limit of locked memory (ulimit -l)"
            )
        self.slots = SlotPool(self.spec, max(slots, most_slots, 1), device)
        self.slots.resize(slots)
        self.live = slots
        """Slots that steps may use; those behind them hold something else."""
        self.resident = False
        self.fill_blocks = 16
        """Of the kernel that copies experts, see BranchTimes; for steps enqueued from now on."""
        self.state = CacheState(sum(spec.num_experts for spec in specs), max(slots, most_slots), self.device)
        self._allocate()
        self.layers = [self._describe(i, banks) for i, banks in enumerate(pool.plan.layers)]
        self._fill_stream = torch.cuda.Stream(self.device)
        self._planned, self._filled, self._summed, self._tail_done = (torch.cuda.Event() for _ in range(4))
        self.ring_view = self._view_ring()
        self.reset()

    def _allocate(self) -> None:
        """What a step needs beside the state."""
        pairs = self.most_rows * self.topk
        intermediate = max(layer.spec.intermediate for layer in self.pool.plan.layers)
        hidden = max(layer.spec.hidden for layer in self.pool.plan.layers)
        self._work = [
            torch.zeros(ctypes.sizeof(abi.Work), dtype=torch.uint8, device=self.device) for _ in range(2)
        ]
        self._h = torch.zeros(pairs, intermediate, dtype=torch.float32, device=self.device)
        self._partial = torch.zeros(pairs, hidden, dtype=torch.float32, device=self.device)
        self._trace: torch.Tensor | None = None
        self._recorded: torch.Tensor | None = None
        self._stamps: torch.Tensor | None = None

    def _describe(self, index: int, banks: LayerBanks) -> abi.Layer:
        spec = banks.spec
        flags = LayerFlag.GATED if spec.gated else LayerFlag(0)
        flags |= LayerFlag.INTERLEAVED if spec.interleaved else LayerFlag(0)
        flags |= LayerFlag.WEIGHT_ON_INPUT if spec.weight_on_input else LayerFlag(0)
        layer = abi.Layer(index, banks.first_expert_id, spec.num_experts, spec.hidden, spec.intermediate)
        layer.activation, layer.flags, layer.format = spec.activation, flags, spec.format.wire
        layer.act_alpha, layer.act_limit, layer.output_scale = (
            spec.act_alpha,
            spec.act_limit,
            spec.output_scale,
        )
        ends = [view.offset + view.stride * spec.num_experts for view in banks.roles.values()]
        layer.uncached = max(ends) > self.memory.nbytes
        for role, view in banks.roles.items():
            reached = 0 if layer.uncached else self.memory.device_address(view.offset)
            layer.role[role] = abi.RoleMemory(reached, self.slots.ranges[role].address, view.stride)
        return layer

    @property
    def uncached_layers(self) -> int:
        """Layers whose experts the link cannot reach because their memory could not be pinned."""
        return sum(layer.uncached for layer in self.layers)

    # -- state, changed at safe points only -------------------------------------------------------

    def reset(self) -> None:
        """Empties the slots and zeroes the counters. The sequence of jobs goes on."""
        self.state.reset(self.live)

    def set_prompt_split(self, split: Sequence[Split]) -> None:
        """What steps of prompts do with their misses; other steps have the state's own."""
        self.state.set_prompt_split(split)

    def shrink(self, live: int) -> None:
        """Goes on with fewer slots; what was used last stays in them. Waits for the device."""
        tables = self.state.tables()
        self._fill_stream.synchronize()
        compaction = keep_latest(*tables, live)
        copies = []
        for source, to in compaction.moves:
            for role in self.slots.roles:
                size, address = self.slots.roles[role].nbytes, self.slots.ranges[role].address
                copies.append((address + to * size, address + source * size, size))
        self.copy(copies, torch.cuda.current_stream(self.device))
        self.state.shrink(compaction, live)
        self.live = live

    def grow(self, live: int) -> None:
        """Goes on with more slots, the new ones empty; they must have memory. In the order of the current stream."""
        assert live <= self.slots.slots
        self.state.grow(self.live, live)
        self.live = live

    def make_resident(self) -> None:
        """Copies every expert into the slot of its id, for good. Needs a slot for each expert."""
        assert self.slots.slots >= len(self.state.slot_of)
        for banks in self.pool.plan.layers:
            for role, view in banks.roles.items():
                to = self.slots.view(role, banks.first_expert_id, banks.spec.num_experts)
                self.memory.copy(to, view.offset)
        self.state.make_identity(self.slots.slots)
        self.resident = True

    def seed(self, experts: list[int]) -> int:
        """Fills the slots of an empty cache with these experts, hottest first, as many as fit; returns how many.

        Waits for the device.
        """
        layers = self.pool.plan.layers
        reached = [e for e in experts if not self.layers[e // self.spec.num_experts].uncached]
        chosen = reached[: self.live]
        for slot, expert in enumerate(chosen):
            layer, row = divmod(expert, self.spec.num_experts)
            for role, view in layers[layer].roles.items():
                self.memory.copy(self.slots.view(role, slot, 1), view.offset + row * view.stride)
        self.state.seed(chosen, self.live)
        torch.cuda.synchronize(self.device)
        return len(chosen)

    def set_trace(self, routes: torch.Tensor | None) -> None:
        """Takes routes from `routes` [steps, layers, rows, k], cycled, instead of the router's; None: not any more.

        Steps of more rows than it has keep the router's, and steps captured before keep what they had.
        """
        self._trace = None if routes is None else routes.to(self.device, torch.int32).contiguous()

    def take_stamps(self) -> None:
        """Steps enqueued from now on leave the times of their parts for `stamps` when these are switched on."""
        self._stamps = torch.zeros(len(self.layers), abi.STAMPS, dtype=torch.int64, device=self.device)

    def switch_stamps(self, on: bool) -> None:
        """Starts or stops them for steps that were enqueued after `take_stamps`."""
        if self._stamps is not None:
            self._stamps[:, abi.Stamp.ON] = int(on)

    def stamps(self) -> list[list[int]] | None:
        """Of each layer's last step, see abi.Stamp; nanoseconds of the GPU's clock. None: they are not taken."""
        return None if self._stamps is None else self._stamps.tolist()

    def record(self) -> None:
        """Steps enqueued from now on leave their routes for `recorded`."""
        shape = (len(self.layers), self.max_rows, self.topk)
        self._recorded = torch.full(shape, -1, dtype=torch.int32, device=self.device)

    def recorded(self, rows: int) -> torch.Tensor:
        """int32 [rows, layers, k]: the routes of the last step of every layer; waits for the device."""
        assert self._recorded is not None, "record() comes first"
        routes = self._recorded[:, :rows].transpose(0, 1)
        return torch.where((routes >= 0) & (routes < self.spec.num_experts), routes, -1).cpu()

    def failure_of(self, number: int) -> WorkerError | None:
        """Why a job of pass `number` failed, see CacheState.failed; None: none did."""
        if not self.state.failed(number):
            return None
        status = int(self.state.failure.item())
        if status == abi.FAILED_NO_WORKER:
            return WorkerError("a step needed the cpu_worker, which does not run in this mode")
        if status == abi.FAILED_ABORTED:
            return WorkerError("the cpu_worker was stopped")
        if status in Status._value2member_map_:
            return WorkerError(f"the cpu_worker refused a job: {Status(status).name}")
        return WorkerError("the cpu_worker process died or hung twice in the same step; this request is lost")

    # -- experts brought together for a prefill -----------------------------------------------------

    def copy(self, copies: Sequence[tuple[int, int, int]], stream: torch.cuda.Stream) -> None:
        """Enqueues copies (to, from, bytes) of device memory or registered host memory."""
        if not copies:
            return
        table = bytearray(np.array(copies, dtype=np.uint64).tobytes())
        array = (abi.Copy * len(copies)).from_buffer(table)
        self._launch(self._lib.ft_copy_runs, array, len(copies), stream.cuda_stream)

    def fetch(self, layer: int, experts: Sequence[int], first: int, slot: int) -> list[tuple[int, int, int]]:
        """The copies that bring local experts from the pool: expert e of them to slot `slot + e - first`."""
        copies = []
        for role, bank in self.pool.plan.layers[layer].roles.items():
            size, address = self.slots.roles[role].nbytes, self.slots.ranges[role].address
            for begin, count in runs(experts):
                to, offset = address + (slot + begin - first) * size, bank.offset + begin * size
                for start, end in self.memory.pieces(offset, count * size):
                    copies.append((to + start - offset, self.pool.file.address + start, end - start))
        return copies

    def gather(self, layer: int, experts: torch.Tensor, first: int, slot: int) -> None:
        """Enqueues copies of local experts [n] int32, on the device, from their slots: as `fetch` places them.

        One that has lost its slot by then comes over the link.
        """
        gathering = abi.Gathering(experts.data_ptr(), len(experts), first)
        for role, one in self.slots.roles.items():
            gathering.to[role] = self.slots.ranges[role].address + slot * one.nbytes
        stream = torch.cuda.current_stream(self.device).cuda_stream
        state = byref(self.state.struct)
        self._launch(
            self._lib.ft_gather, state, byref(self.layers[layer]), byref(gathering), _GATHER_BLOCKS, stream
        )

    def slot_views(self, first: int, count: int) -> dict[Role, torch.Tensor]:
        """Slots [first, first + count), [count, ...] a role."""
        return {role: self.slots.view(role, first, count) for role in self.slots.roles}

    # -- a step -----------------------------------------------------------------------------------

    def step(
        self,
        index: int,
        x: torch.Tensor,
        routes: torch.Tensor,
        weights: torch.Tensor,
        num_valid: torch.Tensor | None = None,
        prompt: bool = False,
    ) -> torch.Tensor:
        """Enqueues one step of layer `index` on the current stream: [T, H] -> [T, H], the routed experts' sum.

        x [T, H] bfloat16 or float16, T up to `most_rows`, in a CUDA graph up to `max_rows`; routes [T, k] int32, what
        is outside the layer's experts is no route; weights [T, k] float32; num_valid int32 [1]: rows from there on are
        padding; `prompt`: a part of one, which takes the split for prompts and leaves in the cache what decode steps
        have brought there.
        """
        x, routes, weights = x.contiguous(), routes.to(torch.int32).contiguous(), weights.float().contiguous()
        out = torch.empty_like(x)
        layer = self.layers[index]
        step = self._step(index, x, routes, weights, out, num_valid)
        step.transient = prompt
        main = torch.cuda.current_stream(self.device)
        if self._recorded is not None and routes.shape[0] <= self.max_rows:
            self._recorded[index, : routes.shape[0]].copy_(routes)
        state = byref(self.state.prompt_struct if prompt else self.state.struct)
        planned = not self.resident or self._trace is not None
        on_gpu = self.resident or not (self.slots.slots == 0 or layer.uncached)
        if planned:
            self._launch(self._lib.ft_plan, state, byref(layer), byref(step), main.cuda_stream)
        else:
            step.work = None
        if planned and on_gpu:
            self._fill_beside_hits(layer, step, main)
        if on_gpu:
            self._experts(layer, step, int(planned), main)
        # Early: ft_down on `main` was launched last.
        self._launch(self._lib.ft_combine, state, byref(layer), byref(step), on_gpu, main.cuda_stream)
        if planned and on_gpu:
            self._finish_fills(index, layer, step, main)
        return out

    def _fill_beside_hits(self, layer: abi.Layer, step: abi.Step, main: torch.cuda.Stream) -> None:
        """Fills on the side stream, hits on `main`, which then goes on with the fills."""
        side = self._fill_stream
        self._planned.record(main)
        side.wait_event(self._planned)
        self._launch(self._lib.ft_fill, byref(layer), byref(step), 0, self.fill_blocks, side.cuda_stream)
        self._filled.record(side)
        self._experts(layer, step, 0, main)
        main.wait_event(self._filled)

    def _finish_fills(self, index: int, layer: abi.Layer, step: abi.Step, main: torch.cuda.Stream) -> None:
        """The rest of a shared expert, beside whatever follows the layer: the sum needs the link for the job."""
        side = self._fill_stream
        self._summed.record(main)
        side.wait_event(self._summed)
        self._launch(self._lib.ft_fill, byref(layer), byref(step), 1, self.fill_blocks, side.cuda_stream)
        if index + 1 == len(self.layers) or self.layers[index + 1].uncached:
            # The next layer does not join the side stream; what follows may use the slot or this step's work.
            self._tail_done.record(side)
            main.wait_event(self._tail_done)

    def _experts(self, layer: abi.Layer, step: abi.Step, fills: int, stream: torch.cuda.Stream) -> None:
        self._launch(self._lib.ft_gate_up, byref(layer), byref(step), fills, stream.cuda_stream)
        self._launch(self._lib.ft_down, byref(layer), byref(step), fills, stream.cuda_stream)

    def _step(
        self,
        index: int,
        x: torch.Tensor,
        routes: torch.Tensor,
        weights: torch.Tensor,
        out: torch.Tensor,
        num_valid: torch.Tensor | None,
    ) -> abi.Step:
        step = abi.Step(routes.data_ptr(), weights.data_ptr(), x.data_ptr(), out.data_ptr())
        step.num_valid = None if num_valid is None else num_valid.data_ptr()
        step.rows, step.topk, step.row_dtype = x.shape[0], routes.shape[1], _ROW_DTYPES[x.dtype]
        step.h, step.partial = self._h.data_ptr(), self._partial.data_ptr()
        # A tail may still read its step's work while the next layer is planned.
        step.work = self._work[index % 2].data_ptr()
        step.ring = self.ring_view
        if self._stamps is not None:
            step.stamps = self._stamps[index].data_ptr()
        if self._trace is not None and self._trace.shape[2] >= step.rows:
            steps, layers, rows, topk = self._trace.shape
            step.trace = self._trace[0, index].data_ptr()
            step.trace_steps, step.trace_stride = steps, layers * rows * topk
            step.trace_last = index == len(self.layers) - 1
        return step

    def _view_ring(self) -> abi.RingView:
        header, at = self.ring.header, self._ring_memory.device_address()
        fields = (header.block_stride, header.routes_offset, header.weights_offset, header.rows_offset)
        abort = at + type(header).abort.offset
        return abi.RingView(
            at + header.blocks_offset, abort, *fields, header.results_offset, header.num_blocks
        )

    def _launch(self, function: Any, *args: object) -> None:
        check(function(*args), function.__name__)

    def close(self) -> None:
        """Gives all memory back; no step may be in flight."""
        torch.cuda.synchronize(self.device)
        self.slots.close()
        self.memory.close()
        self._ring_memory.close()


def runs(experts: Sequence[int]) -> list[tuple[int, int]]:
    """(first, count) of each run of consecutive numbers; `experts` ascend."""
    found: list[tuple[int, int]] = []
    for expert in experts:
        if found and sum(found[-1]) == expert:
            found[-1] = (found[-1][0], found[-1][1] + 1)
        else:
            found.append((expert, 1))
    return found
