"""A pool of random experts, a worker and the cache on the GPU, for tests and benchmarks."""

from __future__ import annotations

import os

import torch

from sglang_ft.experts.bank import ExpertPool, plan_banks
from sglang_ft.experts.decode import ExpertCache
from sglang_ft.experts.formats import LayerSpec
from sglang_ft.experts.reference import moe_layer
from sglang_ft.worker.ring import Ring, RingSize
from sglang_ft.worker.supervisor import Supervisor, WorkerOptions
from sglang_ft.worker.topology import keep_off

CORES = tuple(sorted(os.sched_getaffinity(0)))


class GpuStack:
    """Everything below the engine. `close` it."""

    def __init__(
        self, specs: list[LayerSpec], slots: int, topk: int = 4, threads: int = 4, rows: int = 256
    ) -> None:
        self.specs, self.topk = specs, topk
        self.pool = ExpertPool(plan_banks(specs))
        self.pool.file.allocate_huge()
        for index, spec in enumerate(specs):
            for bank in self.pool.banks(index).values():
                bank.copy_(torch.randn(bank.shape, device="cuda", dtype=bank.dtype) * spec.hidden**-0.5)
        self.pool.seal()
        size = RingSize(4, rows, topk, max(spec.hidden for spec in specs))
        self.ring = Ring(size, self.pool.file.size, spin_ns=2_000_000, nap_ns=5_000_000_000)
        self.ring.write_layers(self.pool.plan)
        cores = CORES[-threads:]
        self.worker = Supervisor(self.ring, self.pool, WorkerOptions(cores, "auto", 2.0))
        self.worker.start()
        keep_off(list(cores))
        self.cache = ExpertCache(self.pool, self.ring, topk, slots, torch.cuda.current_device())

    def inputs(self, rows: int, layer: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Random x, routes and weights on the GPU."""
        spec = self.specs[layer]
        x = torch.randn(rows, spec.hidden).to(spec.format.dtype)
        routes = torch.rand(rows, spec.num_experts).topk(self.topk).indices.int()
        return x.cuda(), routes.cuda(), torch.rand(rows, self.topk).cuda()

    def reference(
        self, layer: int, x: torch.Tensor, routes: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """float64 [T, H] by the readable reference."""
        args = (x.cpu(), routes.cpu().long(), weights.cpu())
        return moe_layer(*args, self.specs[layer], self.pool.banks(layer))

    def error(self, layer: int, rows: int) -> float:
        """Relative error of one step with fresh random inputs."""
        x, routes, weights = self.inputs(rows, layer)
        self.worker.wake()
        got = self.cache.step(layer, x, routes, weights)
        return relative_error(got, self.reference(layer, x, routes, weights))

    def close(self) -> None:
        self.cache.close()
        self.worker.stop()


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    got = got.double().cpu()
    return ((got - want).norm() / want.norm().clamp(min=1e-30)).item()
