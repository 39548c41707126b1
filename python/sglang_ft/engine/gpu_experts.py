"""Experts on a GPU: the expert cache for decode, streamed layers or the worker for prefill.

Few rows take the cache, whose steps a CUDA graph holds. Many rows touch nearly every expert: their layers stream
through two buffers and run in SGLang's own kernels; where no memory is left for buffers, the worker runs them.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from sglang.srt.layers.moe.topk import TopKOutputChecker
from sglang.srt.plugins.hook_registry import HookType
from sglang.srt.runtime_context import get_schedule

from sglang_ft import startup
from sglang_ft.calibration import measure, store
from sglang_ft.config import FtConfig, MoeMode
from sglang_ft.engine.hook import Hook
from sglang_ft.errors import FtError, TraceError, WorkerError
from sglang_ft.experts import policy
from sglang_ft.experts.bank import ExpertPool
from sglang_ft.experts.decode import ExpertCache
from sglang_ft.experts.heat import HeatList
from sglang_ft.experts.prefill import LayerStream
from sglang_ft.experts.registration import Registration, expert_borders
from sglang_ft.experts.slots import register
from sglang_ft.experts.step import FEATURE_STEP, Split
from sglang_ft.experts.traces import Trace, TraceHeader, TraceWriter, read_trace
from sglang_ft.memory.planner import GpuPlan
from sglang_ft.worker.protocol import Isa
from sglang_ft.worker.supervisor import Supervisor

logger = logging.getLogger(__name__)

_CORRECTION_PERIOD_S = 1.0
_TRY_AGAIN_S = 60.0
"""After so long a CPU that was too slow gets jobs again."""
_HEAT_PERIOD_S = 20.0
_CHANGEABLE = ("cache", "hybrid", "cpu")


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
        registration: Registration | None = None,
        heat_list: HeatList | None = None,
    ) -> None:
        """`threads` of the worker. Raises TraceError for a trace that is not of this model.

        `registration` of the pool, if it has begun. `heat_list` of the model, if it is to be used.
        """
        self.plan, self.worker = plan, worker
        device = torch.cuda.current_device()
        self.cache = ExpertCache(pool, worker.ring, topk, plan.slots, device, registration=registration)
        if self.cache.uncached_layers:
            logger.warning(
                "%d of %d layers could not be pinned (%s): their experts run in the cpu_worker only",
                self.cache.uncached_layers,
                len(self.cache.layers),
                self.cache.memory.failure,
            )
        self.stream: LayerStream | None = None
        if plan.mode == "resident":
            self.cache.make_resident()
        elif plan.buffers:
            reached = [not layer.uncached for layer in self.cache.layers]
            self.stream = LayerStream(pool, self.cache.memory, reached, self.cache.device)
        self._times = (
            self._branch_times(threads, config.recalibrate) if plan.mode in ("hybrid", "cache") else None
        )
        self._correction = policy.Correction()
        self._corrected_at, self._hopeless_at = 0.0, math.inf
        self._corrected_from = self._worker_sums()
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

    def change(self, wanted: dict[str, Any]) -> dict[str, Any]:
        """Changes mode or contents; no forward pass may be under way. Returns mode, slots and counters."""
        unknown = set(wanted) - {"moe_mode", "reset", "split", "stamps"}
        if unknown:
            raise FtError(
                f"{', '.join(sorted(unknown))}: no such setting; known are moe_mode, split, stamps and reset"
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
        if "stamps" in wanted:
            self.cache.switch_stamps(bool(wanted["stamps"]))
        if wanted.get("reset") and self._mode != "resident":
            self.cache.reset()
        state: dict[str, Any] = {
            "moe_mode": self._mode,
            "slots": self.cache.slots.slots,
            **self.cache.state.counters(),
        }
        state["cpu_time_scale"] = self._correction.scale
        if self._times is not None:  # as calibrated
            state["link_us_an_expert"] = round(self._times.link_expert * 1e6, 1)
            state["cpu_us_an_expert"] = round(self._times.cpu_expert * 1e6, 1)
        return state | {"split": self._describe_split(), "stamps": self.cache.stamps()}

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

    def before_forward(self, tokens: int) -> None:
        """Called when a forward pass of `tokens` rows is about to be launched on the current stream."""
        self.worker.wake()
        if self._mode == "hybrid" and self._correcting and self._times is not None:
            self._correct(self._times)
        if tokens != self._valid_rows:
            self._num_valid.fill_(tokens)
            self._valid_rows = tokens

    def after_forward(self, tokens: int) -> None:
        """Called when the pass was launched; writes down its routes if they are recorded."""
        self.passes = self.cache.state.end_pass()
        self.note_heat()
        if self._recorder is not None and tokens <= self.cache.max_rows:
            try:
                self._recorder.append(self.cache.recorded(tokens))
            except TraceError as e:
                logger.error("No routes are recorded any more: %s", e)
                self._recorder = None

    def run(self, index: int, layer: torch.nn.Module, stock: Any, dispatch_output: Any) -> torch.Tensor:
        """One step of MoE layer `index`: [T, H], the routed experts' sum. `stock`: the layer's first method."""
        x, topk = dispatch_output.hidden_states, dispatch_output.topk_output
        assert TopKOutputChecker.format_is_standard(topk), "needs --moe-runner-backend triton"
        if x.shape[0] <= self.cache.max_rows:
            return self.cache.step(index, x, topk.topk_ids, topk.topk_weights, self._num_valid)
        if self.plan.mode == "resident":
            spec = self.cache.spec
            first = self.cache.layers[index].first_expert_id
            views = {
                role: self.cache.slots.view(role, first, spec.num_experts) for role in spec.format.roles(spec)
            }
            return self._stock(layer, stock, dispatch_output, views)
        if torch.cuda.is_current_stream_capturing():
            raise FtError(
                f"--cuda-graph-max-bs: graphs hold the experts of at most {self.cache.max_rows} rows, not {x.shape[0]}"
            )
        if self.stream is None or self.cache.layers[index].uncached:
            return self._in_worker(index, x, topk)
        out = self._stock(layer, stock, dispatch_output, self.stream.acquire(index))
        self.stream.release(index)
        return out

    def _stock(self, layer: torch.nn.Module, stock: Any, dispatch_output: Any, views: Any) -> torch.Tensor:
        for role, view in views.items():
            layer.get_parameter(self.cache.spec.format.parameters[role]).data = view
        return stock.apply(layer, dispatch_output).hidden_states

    def _in_worker(self, index: int, x: torch.Tensor, topk: Any) -> torch.Tensor:
        """Many rows without buffers: over the host, while nothing else runs."""
        torch.cuda.current_stream().synchronize()
        self.worker.ring.resume_from_doorbells()
        try:
            out = self.worker.run(index, x.cpu(), topk.topk_ids.cpu(), topk.topk_weights.cpu())
        finally:  # the host's jobs have taken their numbers, whatever became of them
            self.cache.state.set_sequence(self.worker.ring.sequence)
            self._corrected_from = self._worker_sums()  # of decode steps only
        return out.to(x.device)

    def last_counters(self) -> dict[str, int]:
        """Counters as of the last finished pass or shortly before; from any thread, asks nothing of the GPU."""
        return self.cache.state.last_counters()

    def failure_of(self, number: int) -> WorkerError | None:
        """Why pass `number` failed, once it has ended; ask for each in order."""
        return self.cache.failure_of(number)


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


def hooks(executor: Callable[[], GpuExperts | None]) -> list[Hook]:
    """`executor` gives the experts of this process once they are loaded."""

    def on_host(original: Callable, layer: Any, *args: Any, **kwargs: Any) -> None:
        # Views of the pool replace the parameters before anything is loaded; pages that nobody touches cost nothing.
        with torch.device("cpu"):
            original(layer, *args, **kwargs)

    def before_forward(runner: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> None:
        experts = executor()
        if experts is not None and not runner.is_draft_worker:
            experts.before_forward(forward_batch.positions.shape[-1])

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
