"""Starts a cpu_worker on one small layer, runs a job and stops it, to see that it works on this machine."""

from __future__ import annotations

import torch

from sglang_ft.config import FtConfig
from sglang_ft.errors import WorkerError
from sglang_ft.experts.bank import ExpertPool, plan_banks
from sglang_ft.experts.formats import LayerSpec
from sglang_ft.experts.formats.bf16 import BF16
from sglang_ft.experts.reference import moe_layer
from sglang_ft.worker.protocol import Isa
from sglang_ft.worker.ring import Ring, RingSize
from sglang_ft.worker.supervisor import Supervisor, WorkerOptions
from sglang_ft.worker.topology import choose_cores

HIDDEN, INTERMEDIATE, EXPERTS, TOP_K = 256, 128, 4, 2
_TOLERANCE = 0.02  # relative, of a bfloat16 result


def try_worker(config: FtConfig) -> tuple[int, str]:
    """Threads and instruction set of a worker that computed a layer right. Raises WorkerError otherwise."""
    spec = LayerSpec(BF16(), EXPERTS, HIDDEN, INTERMEDIATE)
    pool = ExpertPool(plan_banks([spec]))
    for bank in pool.banks(0).values():
        bank.copy_(torch.randn(bank.shape) * HIDDEN**-0.5)
    pool.seal()
    ring = Ring(RingSize(1, 1, TOP_K, HIDDEN), pool.file.size, spin_ns=0)
    ring.write_layers(pool.plan)
    cores = tuple(choose_cores(config.worker_threads, config.worker_cores))
    worker = Supervisor(ring, pool, WorkerOptions(cores, config.worker_isa, config.worker_stall_s))
    try:
        worker.start()
        _check_one_job(worker, spec, pool)
        return len(cores), Isa(ring.header.worker_isa).name.lower()
    finally:
        worker.stop()


def _check_one_job(worker: Supervisor, spec: LayerSpec, pool: ExpertPool) -> None:
    x = torch.randn(1, HIDDEN).bfloat16()
    ids, weights = torch.tensor([[0, EXPERTS - 1]]), torch.full((1, TOP_K), 0.5)
    got, want = worker.run(0, x, ids, weights), moe_layer(x, ids, weights, spec, pool.banks(0))
    error = ((got - want).norm() / want.norm()).item()
    if not error < _TOLERANCE:
        raise WorkerError(
            f"the cpu_worker computes wrong results here (relative error {error:.3g}); please report it"
        )
