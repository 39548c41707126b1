"""A cpu_worker on random experts, for tests."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import threading
import time
from collections.abc import Iterator

import torch

from sglang_ft.experts.bank import ExpertPool, plan_banks
from sglang_ft.experts.formats import LayerSpec, find_format
from sglang_ft.experts.reference import SharedExpert, moe_layer
from sglang_ft.worker import protocol as p
from sglang_ft.worker.ring import ROW_DTYPES, Ring, RingSize
from sglang_ft.worker.supervisor import Supervisor, WorkerOptions

BF16 = find_format(None, "bfloat16")
FP32 = find_format(None, "float32")
CORES = tuple(sorted(os.sched_getaffinity(0)))[:2]


class Stack:
    """A pool with random experts, a ring and a supervised worker."""

    def __init__(
        self,
        specs: list[LayerSpec],
        isa: str = "auto",
        rows: int = 128,
        stall_s: float = 1.0,
        nap_ns: int = 0,
    ) -> None:
        torch.manual_seed(torch.seed() % 2**31)
        self.pool = ExpertPool(plan_banks(specs))
        for index, spec in enumerate(specs):
            for bank in self.pool.banks(index).values():
                bank.copy_(torch.randn(bank.shape) * spec.hidden**-0.5)
        self.pool.seal()
        topk, hidden = 8, max(spec.hidden for spec in specs)
        self.ring = Ring(RingSize(2, rows, topk, hidden), self.pool.file.size, spin_ns=50_000, nap_ns=nap_ns)
        self.ring.write_layers(self.pool.plan)
        self.states: list[str] = []
        options = WorkerOptions(CORES, isa, stall_s)
        self.worker = Supervisor(
            self.ring, self.pool, options, lambda state, n, why: self.states.append(state)
        )
        self.worker.start()

    @contextlib.contextmanager
    def every_worker_killed(self) -> Iterator[None]:
        """Kills each worker as soon as it is there, for as long as the body runs."""
        stop = threading.Event()

        def keep_killing() -> None:
            while not stop.wait(0.002):
                if pid := self.worker.pid:
                    os.kill(pid, signal.SIGKILL)

        killer = threading.Thread(target=keep_killing)
        killer.start()
        try:
            yield
        finally:
            stop.set()
            killer.join()

    def step(
        self, rows: int, dtype: torch.dtype, layer: int = 0, topk: int = 4
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """A step with random routes: what the worker and what the reference say."""
        spec = self.pool.plan.layers[layer].spec
        x = torch.randn(rows, spec.hidden).to(dtype)
        ids = torch.rand(rows, spec.num_experts).topk(topk).indices
        weights = torch.rand(rows, topk)
        got = self.worker.run(layer, x, ids, weights)
        return got.double(), moe_layer(x, ids, weights, spec, self.pool.banks(layer))


class FakeGpu:
    """An owner that rings jobs as a kernel does: plain stores into the mapped ring, no calls, nobody is woken."""

    def __init__(self, stack: Stack) -> None:
        self.stack, self.ring = stack, stack.ring
        self.sequence = 0

    def job(self, rows: int, layer: int = 0, topk: int = 4, dtype: torch.dtype = torch.float32) -> dict:
        """Random arguments of `publish` and moe_layer."""
        spec = self.stack.pool.plan.layers[layer].spec
        x, weights = torch.randn(rows, spec.hidden).to(dtype), torch.rand(rows, topk)
        ids = torch.rand(rows, spec.num_experts).topk(topk).indices
        return {"rows": x, "expert_ids": ids, "router_weights": weights}

    def publish(
        self,
        rows: torch.Tensor,
        expert_ids: torch.Tensor,
        router_weights: torch.Tensor,
        layer: int = 0,
        shared: SharedExpert | None = None,
    ) -> p.Block:
        """Fills the next block, which must be free, and stores its doorbell."""
        self.sequence += 1
        block = self.ring.block(self.sequence)
        assert block.done == max(0, self.sequence - self.ring.size.blocks)
        block.layer, block.row_dtype, block.rung_ns = layer, ROW_DTYPES[rows.dtype], 0
        block.rows, block.topk = expert_ids.shape
        block.shared_expert, block.shared_begin = shared or (-1, 0)
        header = self.ring.header
        self._part(header.routes_offset, expert_ids.to(torch.int32))
        self._part(header.weights_offset, router_weights)
        self._part(header.rows_offset, rows)
        block.doorbell = self.sequence
        return block

    def spin(self, timeout_s: float = 20.0) -> int | None:
        """Status of the last job once it is done; None when `abort` ends the wait before."""
        block, deadline = self.ring.block(self.sequence), time.monotonic() + timeout_s
        while block.done != self.sequence:
            if self.ring.header.abort:
                return None
            assert time.monotonic() < deadline, "the job never ends"
            time.sleep(1e-5)
        return block.status

    def results(self, hidden: int) -> torch.Tensor:
        return self.ring.results(self.sequence, hidden).double()

    def _part(self, offset: int, values: torch.Tensor) -> None:
        start = ctypes.addressof(self.ring.block(self.sequence)) - self.ring.address
        self.ring.file.view(start + offset, tuple(values.shape), values.dtype).copy_(values)


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    return ((got - want).norm() / want.norm()).item()


def available_isas() -> list[str]:
    flags = set(open("/proc/cpuinfo").read().split("flags", 1)[1].split("\n", 1)[0].split())
    needs = {
        "scalar": set(),
        "avx2": {"avx2", "fma", "f16c"},
        "avx512": {"avx512f", "avx512bw", "avx512vl", "avx512dq"},
        "avx512_bf16": {"avx512_bf16"},
        "amx": {"amx_bf16", "amx_tile"},
    }
    return [isa for isa, need in needs.items() if need <= flags]
