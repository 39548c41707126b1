"""Puts a model's experts behind a cpu_worker, and into the cache of a GPU where there is one.

Builds the pool while the model loads, starts the worker after it, then fills what the GPU has room for.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from sglang.srt.configs.load_config import LoadFormat
from sglang.srt.plugins.hook_registry import HookType

from sglang_ft import checkpoint, metrics, runtime, startup
from sglang_ft.config import FtConfig
from sglang_ft.engine.allocation import Allotment
from sglang_ft.engine.hook import Hook
from sglang_ft.engine.loader import LazyReads
from sglang_ft.engine.moe import ExpertLayers, PooledMoEMethod
from sglang_ft.engine.pool import PoolSource
from sglang_ft.errors import CheckpointError, FtError, WorkerError
from sglang_ft.experts import synthetic
from sglang_ft.memory import planner
from sglang_ft.worker.memory import GIB
from sglang_ft.worker.protocol import Isa, WorkerState
from sglang_ft.worker.ring import Ring, RingSize
from sglang_ft.worker.supervisor import Supervisor, WorkerOptions
from sglang_ft.worker.topology import choose_cores, keep_off

if TYPE_CHECKING:
    from sglang_ft.engine.gpu_experts import GpuExperts

logger = logging.getLogger(__name__)

_METRICS_PERIOD_S = 0.5
_WORDS_PERIOD_S = 10.0
_MAX_ROWS = 4096
# A GPU cannot wake a sleeping worker: between the jobs of a forward pass it polls, then naps for some seconds.
_SPIN_US, _SPIN_US_GPU = 50, 2000
_NAP_NS_GPU = 5_000_000_000
_DUMMY_SEED = 1234


class ExpertServing:
    """The experts of this process's model and their worker; nothing when the model is dense."""

    def __init__(self, config: FtConfig, on_gpu: bool) -> None:
        self.config = config
        self.on_gpu = on_gpu
        self.experts: ExpertLayers | None = None
        self.source: PoolSource | None = None

    def adopt(self, model: torch.nn.Module, folder: Path | None, num_layers: int) -> None:
        """Gives the experts of a freshly built model their pool; from a converted folder their loading starts now.

        `folder` of the checkpoint, None without one; `num_layers` of the language model.

        Raises CheckpointError, MemoryBudgetError.
        """
        source = PoolSource(self.config, self.on_gpu, folder, num_layers)
        experts = ExpertLayers(model, self.on_gpu, source.take_kept)
        if not experts.layers:
            logger.info("No MoE layers: the model is served without an expert pool")
            return
        source.begin(experts.pool)
        self.experts, self.source = experts, source

    def reads(self) -> LazyReads | None:
        """The checkpoint's tensors, while they are loaded."""
        return self.source.reads if self.source else None

    def start(self, chunk_rows: int | None, model: str, export_metrics: bool) -> None:
        """Starts the worker once the pool is full. `chunk_rows`: the longest forward pass, in tokens."""
        if self.experts is None or self.source is None:
            return
        self.source.wait()
        startup.mark("weights", in_scheduler=True)
        self.source.keep(self.experts.pool)
        layers = [layer.spec for layer in self.experts.plan.layers]
        rows = self.config.worker_max_rows or min(
            chunk_rows if chunk_rows and chunk_rows > 0 else _MAX_ROWS, _MAX_ROWS
        )
        size = RingSize(
            self.config.worker_blocks, rows, self.experts.topk, max(spec.hidden for spec in layers)
        )
        spin_us = _SPIN_US_GPU if self.on_gpu else _SPIN_US
        if self.config.worker_spin_us >= 0:
            spin_us = self.config.worker_spin_us
        nap_ns = _NAP_NS_GPU if self.on_gpu else 0
        ring = Ring(size, self.experts.pool.file.size, spin_us * 1000, nap_ns)
        ring.write_layers(self.experts.plan)
        cores = choose_cores(self.config.worker_threads, self.config.worker_cores)
        options = WorkerOptions(tuple(cores), self.config.worker_isa, self.config.worker_stall_s)
        worker = Supervisor(ring, self.experts.pool, options, _publish_state)
        worker.start()
        self.experts.worker = worker
        startup.mark("cpu_worker", in_scheduler=True)
        isa = Isa(ring.header.worker_isa).name.lower()
        logger.info(
            "cpu_worker %d: %d threads on cores %s, %s",
            worker.pid,
            len(cores),
            ",".join(map(str, cores)),
            isa,
        )
        if self.on_gpu:
            keep_off(cores)
            self.experts.gpu = self._put_on_gpu(self.experts, self.source, worker, len(cores))
            startup.mark("expert cache and calibration", in_scheduler=True)
        if export_metrics:
            exporter = metrics.WorkerMetrics(model, self.experts.expert_tensor_bytes, len(cores))
            threading.Thread(target=_export, args=(exporter, worker), name="ft-metrics", daemon=True).start()
        if self.config.heat_list and self.experts.gpu is not None:
            gpu = self.experts.gpu
            threading.Thread(target=_save_heat, args=(gpu,), name="ft-heat", daemon=True).start()
        if export_metrics and self.experts.gpu is not None:
            plan = self.experts.gpu.plan
            cache = metrics.CacheMetrics(model, plan.slots, sum(spec.num_experts for spec in layers))
            args = (cache, self.experts.gpu)
            threading.Thread(target=_export_cache, args=args, name="ft-cache-metrics", daemon=True).start()

    def _put_on_gpu(
        self, experts: ExpertLayers, source: PoolSource, worker: Supervisor, threads: int
    ) -> GpuExperts:
        from sglang_ft.engine import gpu_experts

        specs = [layer.spec for layer in experts.plan.layers]
        for spec in specs:
            if spec.format.name not in ("bf16", "fp16"):
                raise CheckpointError(
                    f"experts of type {spec.format.name} do not run on a GPU; use --dtype bfloat16 or --ft-platform cpu"
                )
        mode, slots = self.config.moe_mode, self.config.slots
        if any(spec != specs[0] for spec in specs):
            logger.warning("MoE layers differ in shape: all experts run in the cpu_worker")
            mode = "cpu"
        shape = (specs[0].expert_bytes, specs[0].num_experts, len(specs))
        allotment = Allotment.inherited(os.environ)
        if allotment is None or mode == "cpu":
            plan = planner.divide(mode, slots, *shape, gpu_experts.available_memory())
        else:
            plan = gpu_experts.settle(allotment, mode, slots, shape)
        total = sum(spec.num_experts for spec in specs)
        gpu = gpu_experts.GpuExperts(
            experts.pool,
            worker,
            experts.topk,
            plan,
            threads,
            self.config,
            allotment,
            source.registration,
            source.heat_list(total),
        )
        if allotment is not None and allotment.budget:
            gpu_experts.cap_memory(allotment.budget - plan.slots * specs[0].expert_bytes)
        logger.info(
            "Experts: %s, %d of %d in slots (%.2f GiB), prefill %s",
            plan.mode,
            plan.slots,
            total,
            plan.slots * specs[0].expert_bytes / GIB,
            f"streams groups of {plan.group}"
            if plan.group
            else "over slots"
            if plan.mode == "resident"
            else "by the worker",
        )
        return gpu

    def fill_with_random(self, model: torch.nn.Module) -> None:
        """Weights for --load-format dummy: N(0, 0.02), norms 1, embeddings N(0, 1), routers as uneven as wanted."""
        generator = torch.Generator().manual_seed(_DUMMY_SEED)
        pooled = (
            {id(p) for _, layer in self.experts.layers for p in layer.parameters()} if self.experts else set()
        )
        for name, parameter in model.named_parameters():
            if id(parameter) in pooled or not parameter.is_floating_point():
                continue
            if "norm" in name:
                parameter.data.fill_(1.0)
            else:
                parameter.data.normal_(0.0, 1.0 if "embed" in name else 0.02)
        if self.experts is None:
            return
        synthetic.fill_pool(self.experts.pool, _DUMMY_SEED)
        for name, _ in self.experts.layers:
            parent = model.get_submodule(name.rpartition(".")[0])
            router = getattr(parent, "gate", None) or getattr(parent, "router", None)
            if router is not None:
                synthetic.scale_router(router.weight.data, self.config.dummy_locality, generator)

    def change(self, wanted: dict[str, Any]) -> dict[str, Any]:
        """Applies a change of /ft/experts between two batches; returns the state. Raises FtError."""
        if self.experts is None:
            return {"moe_mode": None}
        if self.experts.gpu is not None:
            return self.experts.gpu.change(wanted)
        if wanted:
            raise FtError("without a GPU there is nothing to change: all experts run in the cpu_worker")
        return {"moe_mode": "cpu", "slots": 0}

    def holds(self, module: torch.nn.Module) -> bool:
        """Whether a module's experts lie in the pool."""
        return isinstance(getattr(module, "quant_method", None), PooledMoEMethod)

    def expect(self, more_prompt: bool) -> None:
        """A batch is about to be launched; `more_prompt`: a prompt goes on in a later one."""
        if self.experts is not None and self.experts.gpu is not None:
            self.experts.gpu.more_prompt = more_prompt

    def take_failure(self) -> WorkerError | None:
        """The failure of the forward pass that just ended, if any."""
        return self.experts.take_failure() if self.experts else None

    def last_pass(self) -> int:
        """Number of the forward pass that was launched last, on a GPU."""
        return self.experts.gpu.passes if self.experts and self.experts.gpu else 0

    def failure_of(self, number: int) -> WorkerError | None:
        """Why a pass failed on the GPU, once it has ended."""
        return self.experts.gpu.failure_of(number) if self.experts and self.experts.gpu else None


def hooks(serving: ExpertServing, refuse: Callable[[FtError], NoReturn]) -> list[Hook]:
    """`refuse` ends the process with an error for the user."""

    def model_built(
        model: torch.nn.Module, model_config: Any, load_config: Any, *args: Any, **kwargs: Any
    ) -> None:
        files = load_config.load_format in (LoadFormat.AUTO, LoadFormat.SAFETENSORS)
        startup.mark("model", in_scheduler=True)
        try:
            folder = checkpoint.locate(model_config.model_path, model_config.revision) if files else None
            serving.adopt(model, folder, model_config.num_hidden_layers)
        except FtError as e:
            refuse(e)

    def model_loaded(result: Any, runner: Any) -> None:
        args = runner.server_args
        try:
            serving.start(args.chunked_prefill_size, args.served_model_name, args.enable_metrics)
        except FtError as e:
            refuse(e)

    def stay_on_host(
        original: Callable, module: torch.nn.Module, target_device: torch.device
    ) -> AbstractContextManager:
        # SGLang would copy a layer's parameters to the device and back, away from the pool.
        return contextlib.nullcontext(module) if serving.holds(module) else original(module, target_device)

    def dummy_weights(original: Callable, model: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
        serving.fill_with_random(model)

    return [
        Hook(
            "sglang.srt.model_loader.loader.device_loading_context",
            HookType.AROUND,
            stay_on_host,
            "(module, target_device)",
        ),
        Hook(
            "sglang.srt.model_loader.loader.initialize_dummy_weights",
            HookType.AROUND,
            dummy_weights,
            "(model, low=-0.001, high=0.001, seed=1234)",
        ),
        Hook(
            "sglang.srt.model_loader.loader._initialize_model",
            HookType.AFTER,
            model_built,
            "(model_config, load_config, quant_config=None)",
        ),
        Hook(
            "sglang.srt.model_executor.model_runner.ModelRunner.load_model",
            HookType.AFTER,
            model_loaded,
            "(self)",
        ),
    ]


def _publish_state(state: str, restarts: int, why: str) -> None:
    runtime.write("worker", state=state, restarts=restarts, why=why)


def _export(exporter: metrics.WorkerMetrics, worker: Supervisor) -> None:
    pause = threading.Event()
    while not pause.wait(_METRICS_PERIOD_S):
        up = worker.ring.header.worker_state == WorkerState.READY and worker.pid != 0
        exporter.update(worker.ring.header.stats, worker.restarts, up)


def _save_heat(gpu: GpuExperts) -> None:
    pause = threading.Event()
    while not pause.wait(_METRICS_PERIOD_S):
        gpu.save_heat()


def _export_cache(exporter: metrics.CacheMetrics, gpu: GpuExperts) -> None:
    pause = threading.Event()
    told = time.monotonic()
    while not pause.wait(_METRICS_PERIOD_S):
        exporter.update(gpu.last_counters(), gpu.passes)
        exporter.update_prompts(gpu.prompts.sums)
        if time.monotonic() - told >= _WORDS_PERIOD_S:
            told = time.monotonic()
            if words := exporter.words():
                logger.info("%s", words)
