"""Experts on a GPU: the expert cache for decode and short prompts, a stream of all experts for longer ones.

Decode steps take the cache, and a CUDA graph holds them. Prompts go the way that the measured times make the
shortest: the cache for the experts that few rows are routed to; all experts, group by group, through two buffers and
SGLang's own kernels; or the worker.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from typing import Any, get_args

import numpy as np
import torch
from sglang.srt.layers.moe.topk import TopKOutputChecker
from sglang.srt.plugins.hook_registry import HookType
from sglang.srt.runtime_context import get_schedule

from sglang_ft import startup
from sglang_ft.calibration import measure, store
from sglang_ft.config import FtConfig, MoeMode
from sglang_ft.engine.allocation import Allotment
from sglang_ft.engine.hook import Hook
from sglang_ft.errors import FtError, TraceError, WorkerError
from sglang_ft.experts import policy
from sglang_ft.experts.bank import ExpertPool
from sglang_ft.experts.decode import ExpertCache
from sglang_ft.experts.heat import HeatList
from sglang_ft.experts.prefill import CudaLanes, ExpertStream, Group
from sglang_ft.experts.registration import Registration, expert_borders
from sglang_ft.experts.slots import register
from sglang_ft.experts.step import FEATURE_STEP, Split
from sglang_ft.experts.traces import Trace, TraceHeader, TraceWriter, read_trace
from sglang_ft.memory import planner
from sglang_ft.memory.planner import GpuPlan
from sglang_ft.worker.protocol import Isa
from sglang_ft.worker.supervisor import Supervisor

logger = logging.getLogger(__name__)

_CORRECTION_PERIOD_S = 1.0
_ROWS_TO_CHECK = 512
"""Passes of fewer rows find room in what is kept free."""
_TRY_AGAIN_S = 60.0
"""After so long a CPU that was too slow gets jobs again."""
_HEAT_PERIOD_S = 20.0
_CHANGEABLE = ("cache", "hybrid", "cpu")
_SETTINGS = {"moe_mode", "reset", "split", "stamps", "prompt_path", "stream_ahead"}
_PROMPT_FIELDS = ("passes", "rows", "seconds", "predicted_seconds")


class GpuExperts:
    """Runs the MoE layers of one model on one GPU."""

    def __init__(
        self,
        pool: ExpertPool,
        worker: Supervisor,
        topk: int,
        plan: GpuPlan,
        threads: int,
        config: FtConfig,
        allotment: Allotment | None = None,
        registration: Registration | None = None,
        heat_list: HeatList | None = None,
    ) -> None:
        """`threads` of the worker. Raises TraceError for a trace that is not of this model.

        `registration` of the pool, if it has begun. `heat_list` of the model, if it is to be used.
        """
        self.plan, self.worker, self._allotment = plan, worker, allotment
        self._dense = torch.cuda.memory_allocated()
        device = torch.cuda.current_device()
        self.cache = ExpertCache(pool, worker.ring, topk, plan.slots, device, registration=registration)
        if self.cache.uncached_layers:
            logger.warning(
                "%d of %d layers could not be pinned (%s): their experts run in the cpu_worker only",
                self.cache.uncached_layers,
                len(self.cache.layers),
                self.cache.memory.failure,
            )
        self.stream: ExpertStream | None = None
        if plan.mode == "resident":
            self.cache.make_resident()
        elif plan.group and self.cache.uncached_layers < len(self.cache.layers):
            self.stream = ExpertStream(self.cache, plan.group, CudaLanes(self.cache.device))
        self.prompts = PromptStats()
        self.more_prompt = False
        """Whether the prompt of the pass that is launched next goes on in another one."""
        self._path: policy.PrefillPath | None = None
        self._prompt = False
        self._wanted_path: policy.PrefillPath | None = None
        """For measurements and tests; None: the shortest."""
        self._rows_of_split = 0
        self._times = (
            self._branch_times(threads, config.recalibrate) if plan.mode in ("hybrid", "cache") else None
        )
        self._correction = policy.Correction()
        self._corrected_at, self._hopeless_at = 0.0, math.inf
        self._corrected_from: tuple[int, int, int] | None = self._worker_sums()
        self._mode = plan.mode
        self._set_mode(plan.mode)
        if config.route_trace:
            self.cache.set_trace(_steps_of(read_trace(config.route_trace), self.cache))
        if config.stamps:
            self.cache.take_stamps()
        self._recorder: TraceWriter | None = None
        if config.record_routes:
            header = TraceHeader(
                len(self.cache.layers), self.cache.spec.num_experts, topk, made_by="sglang_ft"
            )
            self._recorder = TraceWriter(config.record_routes, header)
            self.cache.record()
        self._num_valid = torch.full((1,), 2**31 - 1, dtype=torch.int32, device=self.cache.device)
        self._valid_rows = 0
        self._correcting = True
        self._heat_list = heat_list if plan.mode in _CHANGEABLE and plan.slots else None
        self._heat: Callable[[], list[int] | None] | None = None
        self._heat_at = time.monotonic()
        self.passes = 0
        """Forward passes launched so far."""

    def warm(self) -> None:
        """Empties the slots, or fills them with the experts that were hot last time. No pass may be under way."""
        self.cache.reset()
        begin = time.monotonic()
        if self._heat_list is not None and (experts := self._heat_list.load()):
            seeded = self.cache.seed(experts)
            logger.info("Heat list: %d experts in slots, %.2f s", seeded, time.monotonic() - begin)

    def note_heat(self) -> None:
        """Now and then, behind a pass: has what lies in the slots copied, for `save_heat`."""
        if self._heat_list is not None and time.monotonic() - self._heat_at > _HEAT_PERIOD_S:
            self._heat_at = time.monotonic()
            self._heat = self.cache.state.begin_snapshot()

    def save_heat(self) -> None:
        """Writes down what `note_heat` had copied, if it has arrived; from any one thread."""
        if self._heat_list is not None and self._heat is not None and (experts := self._heat()) is not None:
            self._heat = None
            self._heat_list.save(experts)

    def _set_mode(self, mode: MoeMode) -> None:
        most, intermediate = self.cache.spec.num_experts, self.cache.spec.intermediate
        split = policy.fills_only(most)
        if mode == "cpu":
            split = policy.cpu_only(most)
        elif mode == "hybrid" and self._times is not None and not self._correction.hopeless:
            split = policy.balanced(most, self._correction.apply(self._times), intermediate)
        self.cache.state.set_split(split)
        self._mode = mode
        self._rows_of_split = 0

    def change(self, wanted: dict[str, Any]) -> dict[str, Any]:
        """Changes mode or contents; no forward pass may be under way. Returns mode, slots and counters."""
        unknown = set(wanted) - _SETTINGS
        if unknown:
            raise FtError(
                f"{', '.join(sorted(unknown))}: no such setting; known are {', '.join(sorted(_SETTINGS))}"
            )
        mode = wanted.get("moe_mode", self._mode)
        if mode != self._mode and (mode not in _CHANGEABLE or self._mode not in _CHANGEABLE):
            raise FtError(f"moe_mode {mode!r}: this server can change between {', '.join(_CHANGEABLE)}")
        torch.cuda.synchronize()
        if "moe_mode" in wanted:
            self._set_mode(mode)
            self._correcting = True
        if "split" in wanted:
            self._correcting = False  # it stays until a mode is chosen again
            self.cache.state.set_split(self._read_split(wanted["split"]))
        if "prompt_path" in wanted:
            self._wanted_path = self._read_path(wanted["prompt_path"])
        if "stream_ahead" in wanted and self.stream is not None:
            self.stream.ahead = bool(wanted["stream_ahead"])
        if "stamps" in wanted:
            self.cache.switch_stamps(bool(wanted["stamps"]))
        if wanted.get("reset") and self._mode != "resident":
            self.cache.reset()
        state: dict[str, Any] = {
            "moe_mode": self._mode,
            "slots": self.cache.slots.slots,
            "experts": len(self.cache.state.slot_of),
            "expert_bytes": self.cache.spec.expert_bytes,
            "memory": self._memory(),
            **self.cache.state.counters(),
            "prompts": self.prompts.sums,
            "stream_bytes": self.stream.bytes if self.stream else 0,
        }
        state["cpu_time_scale"] = self._correction.scale
        if self._times is not None:  # as calibrated
            state["link_us_an_expert"] = round(self._times.link_expert * 1e6, 1)
            state["cpu_us_an_expert"] = round(self._times.cpu_expert * 1e6, 1)
        return state | {"split": self._describe_split(), "stamps": self.cache.stamps()}

    def _memory(self) -> dict[str, int]:
        """Bytes of GPU memory: used by all that runs on it, and planned for this server (0: there was no plan)."""
        free, total = torch.cuda.mem_get_info()
        planned = self._allotment.total - self._allotment.dense + self._dense if self._allotment else 0
        return {"used_bytes": total - free, "planned_bytes": planned}

    def _read_split(self, pairs: Any) -> list[Split]:
        """A split for measurements: [fills, features] for 0, 1, ... misses. Raises FtError."""
        most = self.cache.spec.intermediate - FEATURE_STEP
        try:
            split = [Split(int(fills), int(features)) for fills, features in pairs]
        except (TypeError, ValueError):
            raise FtError("split: a list of [fills, features], one for 0, 1, ... misses") from None
        for misses, (fills, features) in enumerate(split):
            if not 0 <= fills <= misses or not 0 <= features <= most or features % FEATURE_STEP:
                raise FtError(
                    f"split: [{fills}, {features}] for {misses} misses; fills are at most the misses, features a "
                    f"multiple of {FEATURE_STEP} up to {most}, 0 for all"
                )
        if not split:
            raise FtError("split: empty")
        return split

    def _read_path(self, name: Any) -> policy.PrefillPath | None:
        """A path for prompts, for measurements. Raises FtError."""
        paths = get_args(policy.PrefillPath)
        if name not in (*paths, "auto"):
            raise FtError(f"prompt_path: {name!r} is none of auto, {', '.join(paths)}")
        if name == "stream" and self.stream is None:
            raise FtError("prompt_path: no slots are left for the buffers of a stream")
        return None if name == "auto" else name

    def _describe_split(self) -> list[list[int]]:
        """[fills, features] for 0 to k misses."""
        words = self.cache.state.split_words[: self.cache.topk + 1].tolist()
        return [[word & 0xFFFF, word >> 16] for word in words]

    def _branch_times(self, threads: int, recalibrate: bool) -> policy.BranchTimes | None:
        spec, isa = self.cache.spec, Isa(self.worker.ring.header.worker_isa).name.lower()
        key = store.machine_key(threads, isa, spec)
        if self.cache.memory.nbytes < measure.LEAST_EXPERTS * spec.expert_bytes:
            return None  # hardly anything is pinned
        times = None if recalibrate else store.load(key)
        if times is None:
            times = measure.measure(self.cache, self.worker)
            self.cache.state.set_sequence(self.worker.ring.sequence)
            store.save(key, times)
        self.cache.fill_blocks = times.fill_blocks
        logger.info(
            "An expert takes %.0f us over the link (%.1f GB/s) and %.0f us on the CPU (%.1f GB/s), both busy",
            times.link_expert * 1e6,
            spec.expert_bytes / times.link_expert / 1e9,
            times.cpu_expert * 1e6,
            spec.expert_bytes / times.cpu_expert / 1e9,
        )
        return times

    def _worker_sums(self) -> tuple[int, int, int]:
        """Jobs, bytes that they read and nanoseconds that they took, so far."""
        stats = self.worker.ring.header.stats
        return stats.jobs, stats.bytes, stats.busy_ns

    def _correct(self, times: policy.BranchTimes) -> None:
        """Once in a while: the time that the worker's jobs took lately corrects the split."""
        now = time.monotonic()
        if now - self._corrected_at < _CORRECTION_PERIOD_S:
            return
        self._corrected_at = now
        sums = self._worker_sums()
        if self._corrected_from is None:
            self._corrected_from = sums
            return
        jobs, nbytes, busy_ns = (new - old for new, old in zip(sums, self._corrected_from, strict=True))
        self._corrected_from = sums
        was_hopeless = self._correction.hopeless
        if was_hopeless and now - self._hopeless_at > _TRY_AGAIN_S:
            self._correction.try_again()
            self._set_mode(self._mode)
        elif jobs > 0 and self._correction.update(
            jobs, nbytes / self.cache.spec.expert_bytes, busy_ns * 1e-9, times
        ):
            self._set_mode(self._mode)
        if self._correction.hopeless and not was_hopeless:
            self._hopeless_at = now
            logger.warning(
                "The CPU takes %.0f times as long as measured: misses are only filled for the next %.0f s",
                policy.HOPELESS_SCALE,
                _TRY_AGAIN_S,
            )

    def before_forward(self, tokens: int, prompt: bool) -> None:
        """Called when a pass of `tokens` rows is about to be launched on the current stream.

        `prompt`: rows of prompts, maybe with those of running requests among them; else a decode step.
        """
        self.worker.wake()
        self._path, self._prompt = None, prompt
        if prompt:
            self._begin_prompt(tokens)
        elif self.stream is not None and self.stream.active:
            self.stream.decoded()
            if not self.more_prompt:
                self.stream.end()
        if self._mode == "hybrid" and self._correcting and self._times is not None and not prompt:
            self._correct(self._times)
        if tokens != self._valid_rows:
            self._num_valid.fill_(tokens)
            self._valid_rows = tokens

    def after_forward(self, tokens: int) -> None:
        """Called when the pass was launched; writes down the routes of a decode step if they are recorded."""
        if self._path is not None:
            self.prompts.end(self._path)
            self._path = None
        self.passes = self.cache.state.end_pass()
        self.note_heat()
        if self._recorder is not None and not self._prompt and tokens <= self.cache.max_rows:
            try:
                self._recorder.append(self.cache.recorded(tokens))
            except TraceError as e:
                logger.error("No routes are recorded any more: %s", e)
                self._recorder = None

    def give_memory(self, nbytes: int) -> int:
        """Gives slots back to the device until so many bytes are free of them, or none is left; waits for the device.

        What was used last stays. Returns the bytes; none when all experts are resident: graphs count on their places.
        """
        before, each = self.cache.slots.slots, self.cache.spec.expert_bytes
        slots = max(0, before - math.ceil(nbytes / each))
        if self.plan.mode == "resident" or slots == before:
            return 0
        if self.stream is not None and self.stream.active:
            self.stream.end()
        self.cache.shrink(slots)
        torch.cuda.synchronize()
        self.cache.slots.resize(slots)
        self._replace_stream(planner.buffer_group(slots, self.cache.spec.num_experts))
        torch.cuda.empty_cache()
        return (before - slots) * each

    def _replace_stream(self, group: int) -> None:
        """A stream through the last slots that are left; what was counted and chosen stays."""
        before = self.stream
        self.stream = ExpertStream(self.cache, group, CudaLanes(self.cache.device)) if group else None
        if before is not None and self.stream is not None:
            self.stream.bytes, self.stream.ahead = before.bytes, before.ahead

    def begin_again(self, rows: int) -> None:
        """The pass that was begun starts anew, on what is left of the slots."""
        if self._prompt:
            self._begin_prompt(rows)

    def _make_room(self, rows: int) -> None:
        """Slots go before a pass that would not find the memory it needs: another program may have taken it."""
        if rows < _ROWS_TO_CHECK or self._allotment is None:
            return
        free = torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
        lacking = rows * self._allotment.chunk_token - free
        if lacking > 0 and (given := self.give_memory(lacking)):
            logger.warning(
                "GPU memory got scarce: the expert cache gives back %.2f GiB, %d slots are left",
                given / planner.GIB,
                self.cache.slots.slots,
            )

    def _begin_prompt(self, rows: int) -> None:
        """Chooses how the experts of a prompt's rows run, and starts what can start already."""
        if self.plan.mode == "resident":
            return
        self._make_room(rows)
        self._path, seconds = self._choose_path(rows)
        self.prompts.begin(self._path, rows, seconds)
        if self._path == "stream":
            assert self.stream is not None
            self.stream.begin()
        else:
            # Its jobs say nothing about those of decode steps; they may run only after the next look at the sums.
            self._corrected_from, self._corrected_at = None, time.monotonic()
        if self._path == "slots":
            self._set_prompt_split(rows)

    def _choose_path(self, rows: int) -> tuple[policy.PrefillPath, float]:
        """The path for a pass of `rows` rows and the seconds that its experts should take; 0 if nothing is measured."""
        possible: list[policy.PrefillPath] = ["worker"]
        if self.stream is not None:
            possible.insert(0, "stream")
        if rows <= self.cache.most_rows:
            possible.insert(0, "slots")
        if self._wanted_path in possible:
            possible = [self._wanted_path]
        if self._times is None:
            return possible[0], 0.0
        times = self._correction.apply(self._times)
        seconds = policy.prefill_seconds(times, self._layers(), rows)
        path = min(possible, key=lambda one: seconds[one])
        return path, seconds[path]

    def _layers(self) -> policy.Layers:
        total = len(self.cache.layers) * self.cache.spec.num_experts
        return policy.Layers(
            len(self.cache.layers), self.cache.spec.num_experts, self.cache.topk, self.cache.live / total
        )

    def _set_prompt_split(self, rows: int) -> None:
        """The split of a prompt's steps goes by its rows, roughly."""
        rows = 1 << (rows - 1).bit_length()
        if rows == self._rows_of_split:
            return
        self._rows_of_split = rows
        most = self.cache.spec.num_experts
        split = policy.fills_only(most)
        if self._mode == "cpu":
            split = policy.cpu_only(most)
        elif self._mode == "hybrid" and self._times is not None and not self._correction.hopeless:
            split = policy.prompt_split(most, self._correction.apply(self._times), self._layers(), rows)
        self.cache.set_prompt_split(split)

    def run(self, index: int, layer: torch.nn.Module, stock: Any, dispatch_output: Any) -> torch.Tensor:
        """One step of MoE layer `index`: [T, H], the routed experts' sum. `stock`: the layer's first method."""
        x, topk = dispatch_output.hidden_states, dispatch_output.topk_output
        assert TopKOutputChecker.format_is_standard(topk), "needs --moe-runner-backend triton"
        rows = x.shape[0]
        if self._path == "slots" or (self._path is None and rows <= self.cache.max_rows):
            ids, weights = topk.topk_ids, topk.topk_weights
            return self.cache.step(index, x, ids, weights, self._num_valid, prompt=self._path is not None)
        if self.plan.mode == "resident":
            first = self.cache.layers[index].first_expert_id
            views = self.cache.slot_views(first, self.cache.spec.num_experts)
            return self._stock(layer, stock, dispatch_output, views)
        if torch.cuda.is_current_stream_capturing():
            raise FtError(
                f"--cuda-graph-max-bs: graphs hold the experts of at most {self.cache.max_rows} rows, not {rows}"
            )
        if self._path != "stream" or self.cache.layers[index].uncached:
            return self._in_worker(index, x, topk)
        return self._streamed(index, layer, stock, dispatch_output)

    def _streamed(self, index: int, layer: Any, stock: Any, dispatch_output: Any) -> torch.Tensor:
        """The sum over the groups of a layer, each in SGLang's own kernels while the next is copied."""
        assert self.stream is not None
        ids = dispatch_output.topk_output.topk_ids
        total: torch.Tensor | None = None
        for first in self.stream.firsts():
            group = self.stream.acquire(index, first)
            part = dispatch_output
            if group.count < self.cache.spec.num_experts:
                layer.moe_runner_config.num_experts = None  # SGLang then leaves routes of -1 out
                topk = dispatch_output.topk_output._replace(topk_ids=local_routes(ids, group))
                part = dispatch_output._replace(topk_output=topk)
            out = self._stock(layer, stock, part, group.experts)
            self.stream.release(index, group, ids, self.more_prompt)
            total = out if total is None else total.add_(out)
        assert total is not None
        return total

    def _stock(self, layer: torch.nn.Module, stock: Any, dispatch_output: Any, views: Any) -> torch.Tensor:
        for role, view in views.items():
            layer.get_parameter(self.cache.spec.format.parameters[role]).data = view
        return stock.apply(layer, dispatch_output).hidden_states

    def _in_worker(self, index: int, x: torch.Tensor, topk: Any) -> torch.Tensor:
        """On the CPU, over the host, while nothing else runs."""
        torch.cuda.current_stream().synchronize()
        self.worker.ring.resume_from_doorbells()
        try:
            out = self.worker.run(index, x.cpu(), topk.topk_ids.cpu(), topk.topk_weights.cpu())
        finally:  # the host's jobs have taken their numbers, whatever became of them
            self.cache.state.set_sequence(self.worker.ring.sequence)
        return out.to(x.device)

    def last_counters(self) -> dict[str, int]:
        """Counters as of the last finished pass or shortly before; from any thread, asks nothing of the GPU."""
        return self.cache.state.last_counters()

    def failure_of(self, number: int) -> WorkerError | None:
        """Why pass `number` failed, once it has ended; ask for each in order."""
        return self.cache.failure_of(number)


def local_routes(ids: torch.Tensor, group: Group) -> torch.Tensor:
    """Routes [T, k] within a group: its experts from 0 on, -1 for all others."""
    local = ids - group.first
    return torch.where((local >= 0) & (local < group.count), local, -1)


class PromptStats:
    """How prompts ran: passes, rows, seconds and what was predicted for the experts alone, by path."""

    def __init__(self) -> None:
        paths = get_args(policy.PrefillPath)
        self.sums = {path: dict.fromkeys(_PROMPT_FIELDS, 0.0) for path in paths}
        self._began = torch.cuda.Event(enable_timing=True)
        self._under_way: list[tuple[policy.PrefillPath, torch.cuda.Event, torch.cuda.Event]] = []

    def begin(self, path: policy.PrefillPath, rows: int, predicted: float) -> None:
        """A pass starts on the current stream."""
        while self._under_way and self._under_way[0][2].query():
            ended, began, end = self._under_way.pop(0)
            self.sums[ended]["seconds"] += began.elapsed_time(end) * 1e-3
        sums = self.sums[path]
        sums["passes"] += 1
        sums["rows"] += rows
        sums["predicted_seconds"] += predicted
        self._began = torch.cuda.Event(enable_timing=True)
        self._began.record()

    def end(self, path: policy.PrefillPath) -> None:
        """All work of the pass is enqueued."""
        end = torch.cuda.Event(enable_timing=True)
        end.record()
        self._under_way.append((path, self._began, end))


def _steps_of(trace: Trace, cache: ExpertCache) -> torch.Tensor:
    """[steps, layers, rows, k] of a trace, as many rows as every step has. Raises TraceError if it does not fit."""
    header = trace.header
    wanted = (len(cache.layers), cache.spec.num_experts, cache.topk)
    if (header.num_layers, header.num_experts, header.top_k) != wanted:
        raise TraceError(
            f"--ft-route-trace: made for {header.num_layers} layers x {header.num_experts} experts, "
            f"top {header.top_k}; this model has {wanted[0]} x {wanted[1]}, top {wanted[2]}"
        )
    rows = int(np.diff(trace.starts).min())
    steps = np.stack([step[:rows].transpose(1, 0, 2) for step in trace])
    return torch.from_numpy(steps.astype(np.int32))


def begin_registration(pool: ExpertPool) -> Registration:
    """Pins the pool piece by piece, as it is told what is full. Raises KernelError."""
    size = pool.file.size
    experts = sum(layer.spec.expert_bytes * layer.spec.num_experts for layer in pool.plan.layers)
    return register(pool.file, expert_borders(pool.plan, size), padding=size - experts)


def available_memory() -> int:
    """Bytes that experts and KV cache can share now: what is free, less the slack that SGLang keeps for its work."""
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return int(free - (1 - get_schedule().mem_fraction_static) * total)


def settle(allotment: Allotment, mode: MoeMode, slots: int, shape: tuple[int, int, int]) -> GpuPlan:
    """What was planned for the experts, or less where the dense weights took more than their files.

    `shape`: bytes of an expert, experts of a layer, layers.
    """
    torch.cuda.empty_cache()
    room, total = torch.cuda.mem_get_info()
    if allotment.budget:
        ours = torch.cuda.memory_reserved() + planner.CUDA_BYTES
        room = min(room, allotment.budget - ours)
    room -= allotment.beside
    if allotment.experts.slots * shape[0] <= room:
        return allotment.experts
    found = planner.divide(mode, min(slots, max(room, 0) // shape[0]), *shape, room, kv_least=0, kv_most=0)
    logger.warning(
        "%d slots were planned, there is room for %d: %.2f GiB are free beside what follows",
        allotment.experts.slots,
        found.slots,
        room / planner.GIB,
    )
    return found


def cap_memory(nbytes: int) -> None:
    """torch takes no more than that; slots and CUDA's own memory come on top."""
    total = torch.cuda.mem_get_info()[1]
    torch.cuda.set_per_process_memory_fraction(min(max((nbytes - planner.CUDA_BYTES) / total, 0.001), 1.0))


def hooks(executor: Callable[[], GpuExperts | None]) -> list[Hook]:
    """`executor` gives the experts of this process once they are loaded."""

    def on_host(original: Callable, layer: Any, *args: Any, **kwargs: Any) -> None:
        # Views of the pool replace the parameters before anything is loaded; pages that nobody touches cost nothing.
        with torch.device("cpu"):
            original(layer, *args, **kwargs)

    def before_forward(runner: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> None:
        experts = executor()
        if experts is not None and not runner.is_draft_worker:
            prompt = forward_batch.forward_mode.is_extend_without_speculative()
            experts.before_forward(forward_batch.positions.shape[-1], prompt)

    def after_forward(result: Any, runner: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> None:
        experts = executor()
        if experts is not None and not runner.is_draft_worker:
            experts.after_forward(forward_batch.positions.shape[-1])

    def before_capture(*args: Any, **kwargs: Any) -> None:
        startup.mark("KV cache", in_scheduler=True)

    def captured(result: Any, runner: Any, *args: Any, **kwargs: Any) -> None:
        startup.mark("graph capture", in_scheduler=True)
        experts = executor()
        if experts is not None and experts.plan.mode != "resident":
            torch.cuda.synchronize()
            experts.warm()  # warm-up passes are no traffic

    forward = "sglang.srt.model_executor.model_runner.ModelRunner.forward"
    signature = (
        "(self, forward_batch, skip_attn_backend_init=None, pp_proxy_tensors=None, reinit_attn_backend=False, "
        "split_forward_count=1)"
    )
    return [
        Hook(forward, HookType.BEFORE, before_forward, signature),
        Hook(forward, HookType.AFTER, after_forward, signature),
        Hook(
            "sglang.srt.layers.moe.fused_moe_triton.layer.FusedMoE.__init__", HookType.AROUND, on_host, None
        ),
        Hook(
            "sglang.srt.model_executor.model_runner.ModelRunner.init_cuda_graphs",
            HookType.BEFORE,
            before_capture,
            "(self, capture_decode_cuda_graph=True)",
        ),
        Hook(
            "sglang.srt.model_executor.model_runner.ModelRunner.init_cuda_graphs",
            HookType.AFTER,
            captured,
            "(self, capture_decode_cuda_graph=True)",
        ),
    ]
