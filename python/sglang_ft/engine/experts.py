"""Puts a model's experts behind a cpu_worker: builds the pool while the model loads, starts the worker after it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any, NoReturn

import psutil
import torch
from sglang.srt.plugins.hook_registry import HookType

from sglang_ft import metrics, runtime
from sglang_ft.config import FtConfig
from sglang_ft.engine.hook import Hook
from sglang_ft.engine.moe import ExpertLayers
from sglang_ft.errors import FtError, MemoryBudgetError, WorkerError
from sglang_ft.worker.memory import GIB
from sglang_ft.worker.protocol import Isa, WorkerState
from sglang_ft.worker.ring import Ring, RingSize
from sglang_ft.worker.supervisor import Supervisor, WorkerOptions
from sglang_ft.worker.topology import choose_cores

logger = logging.getLogger(__name__)

_METRICS_PERIOD_S = 0.5
_MAX_ROWS = 4096
_SPIN_US = 50


class ExpertServing:
    """The experts of this process's model and their worker; nothing when the model is dense."""

    def __init__(self, config: FtConfig) -> None:
        self.config = config
        self.experts: ExpertLayers | None = None

    def adopt(self, model: torch.nn.Module) -> None:
        """Gives the experts of a freshly built model their pool. Raises CheckpointError, MemoryBudgetError."""
        experts = ExpertLayers(model)
        if not experts.layers:
            logger.info("No MoE layers: the model is served without an expert pool")
            return
        free = psutil.virtual_memory().available
        reserve = int(self.config.ram_reserve_gib * GIB)
        if experts.plan.nbytes + reserve > free:
            raise MemoryBudgetError(
                f"the expert pool needs {experts.plan.nbytes / GIB:.2f} GiB and must leave {reserve / GIB:.2f} GiB "
                f"(--ft-ram-reserve-gib) of host memory free; {free / GIB:.2f} GiB are available"
            )
        self.experts = experts

    def start(self, chunk_rows: int | None, model: str, export_metrics: bool) -> None:
        """Starts the worker once the pool is full. `chunk_rows`: the longest forward pass, in tokens."""
        if self.experts is None:
            return
        self.experts.pool.seal()
        layers = [layer.spec for layer in self.experts.plan.layers]
        rows = self.config.worker_max_rows or min(chunk_rows or _MAX_ROWS, _MAX_ROWS)
        size = RingSize(
            self.config.worker_blocks, rows, self.experts.topk, max(spec.hidden for spec in layers)
        )
        spin_us = self.config.worker_spin_us if self.config.worker_spin_us >= 0 else _SPIN_US
        ring = Ring(size, self.experts.pool.file.size, spin_us * 1000)
        ring.write_layers(self.experts.plan)
        cores = choose_cores(self.config.worker_threads, self.config.worker_cores)
        options = WorkerOptions(tuple(cores), self.config.worker_isa, self.config.worker_stall_s)
        worker = Supervisor(ring, self.experts.pool, options, _publish_state)
        worker.start()
        self.experts.worker = worker
        isa = Isa(ring.header.worker_isa).name.lower()
        logger.info(
            "cpu_worker %d: %d threads on cores %s, %s",
            worker.pid,
            len(cores),
            ",".join(map(str, cores)),
            isa,
        )
        if export_metrics:
            exporter = metrics.WorkerMetrics(model, self.experts.expert_tensor_bytes, len(cores))
            threading.Thread(target=_export, args=(exporter, worker), name="ft-metrics", daemon=True).start()

    def take_failure(self) -> WorkerError | None:
        """The failure of the forward pass that just ended, if any."""
        return self.experts.take_failure() if self.experts else None


def hooks(serving: ExpertServing, refuse: Callable[[FtError], NoReturn]) -> list[Hook]:
    """`refuse` ends the process with an error for the user."""

    def model_built(model: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
        try:
            serving.adopt(model)
        except FtError as e:
            refuse(e)

    def model_loaded(result: Any, runner: Any) -> None:
        args = runner.server_args
        try:
            serving.start(args.chunked_prefill_size, args.served_model_name, args.enable_metrics)
        except FtError as e:
            refuse(e)

    return [
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
