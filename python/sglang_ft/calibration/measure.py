"""Measures how long fills and jobs take while the other branch is busy too: they may share one memory bus."""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch

from sglang_ft.experts.policy import HANDOFF_S, BranchTimes
from sglang_ft.kernels import check

if TYPE_CHECKING:
    from sglang_ft.experts.decode import ExpertCache
    from sglang_ft.worker.supervisor import Supervisor

LEAST_EXPERTS = 8
"""So many must lie in pinned memory."""
_REPEATS = 15
_IN_A_ROW = 4
_BLOCKS = (2, 3, 4, 6, 8, 12, 16, 24)
MANY_ROWS = 64
"""Of a job that measures what rows take; the ring should have room for them."""
_NEARLY = 1.02
"""A copy by fewer blocks may take so much longer than the fastest."""
_JOIN_S = 5e-6
"""Kernels that run a fill after its copy."""


def measure(cache: ExpertCache, worker: Supervisor) -> BranchTimes:
    """Takes well under a second. The pool must be full and registered, and nothing else may use ring or GPU."""
    link = _Link(cache)
    link.choose_blocks()
    jobs = _Jobs(cache, worker)
    counts = [n for n in (1, 2, 3, 4, 6, 8) if n <= cache.topk]
    jobs.seconds(counts[-1])  # pages and threads warm
    with link.kept_busy():
        cpu = [(n, jobs.seconds(n)) for n in counts]
    cpu_pair = jobs.pair_seconds()
    with jobs.kept_busy():
        fills = [(n, link.seconds(n)) for n in (1, 2, 4, 8)]
    link_fixed, link_expert = _line(fills)
    cpu_fixed, cpu_expert = _line(cpu)
    return BranchTimes(
        link_fixed + _JOIN_S, link_expert, cpu_fixed + HANDOFF_S, cpu_expert, link.blocks, cpu_pair
    )


def _line(points: list[tuple[int, float]]) -> tuple[float, float]:
    """Least squares: (value at 0, slope), neither below 0. One point alone goes through 0."""
    if len(points) == 1:
        return 0.0, points[0][1] / points[0][0]
    mean_n = sum(n for n, _ in points) / len(points)
    mean_s = sum(s for _, s in points) / len(points)
    over = sum((n - mean_n) * (s - mean_s) for n, s in points)
    slope = max(over / sum((n - mean_n) ** 2 for n, _ in points), 1e-9)
    return max(mean_s - slope * mean_n, 0.0), slope


class _Link:
    """Copies of whole experts by the kernel that fills slots."""

    def __init__(self, cache: ExpertCache) -> None:
        self._cache = cache
        self._stream = torch.cuda.Stream(cache.device)
        self._bytes = cache.spec.expert_bytes // 16 * 16
        self._target = torch.empty(LEAST_EXPERTS * self._bytes, dtype=torch.uint8, device=cache.device)
        self._most = cache.memory.nbytes - LEAST_EXPERTS * self._bytes
        self.blocks = _BLOCKS[-1]

    def choose_blocks(self) -> None:
        """Takes the fewest blocks that fill the link."""
        seconds = {}
        for self.blocks in _BLOCKS:
            seconds[self.blocks] = self.seconds(1)
        self.blocks = next(n for n in _BLOCKS if seconds[n] <= _NEARLY * min(seconds.values()))

    def _copy(self, experts: int) -> None:
        at = random.randrange(max(1, self._most // self._bytes)) * self._bytes
        source = self._cache.memory.device_address(at)
        function = self._cache._lib.ft_copy_from_host
        stream = self._stream.cuda_stream
        check(function(self._target.data_ptr(), source, experts * self._bytes, self.blocks, stream), "copy")

    def seconds(self, experts: int) -> float:
        """Median time of a copy of so many experts."""
        times = []
        for _ in range(_REPEATS):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            self._copy(8)  # meanwhile the host gets ahead, so that its launches take no part
            begin.record(self._stream)
            for _ in range(_IN_A_ROW):
                self._copy(experts)
            end.record(self._stream)
            end.synchronize()
            times.append(begin.elapsed_time(end) * 1e-3 / _IN_A_ROW)
        return sorted(times)[len(times) // 2]

    @contextlib.contextmanager
    def kept_busy(self) -> Iterator[None]:
        with _repeated(self._copy_and_wait):
            yield

    def _copy_and_wait(self) -> None:
        for _ in range(4):
            self._copy(8)
        self._stream.synchronize()


class _Jobs:
    """Jobs of one row for the worker."""

    def __init__(self, cache: ExpertCache, worker: Supervisor) -> None:
        self._worker, self._spec, self._topk = worker, cache.spec, cache.topk
        self._layers = len(cache.layers)
        self._x = torch.randn(1, self._spec.hidden).to(torch.bfloat16)

    def _run(self, experts: int, rows: int = 1) -> None:
        routes = torch.full((1, self._topk), -1)
        routes[0, :experts] = torch.tensor(random.sample(range(self._spec.num_experts), experts))
        layer = random.randrange(self._layers)
        x, weights = self._x.expand(rows, -1), torch.ones(rows, self._topk)
        self._worker.run(layer, x.contiguous(), routes.expand(rows, -1).contiguous(), weights)

    def seconds(self, experts: int, rows: int = 1, repeats: int = _REPEATS) -> float:
        """Median time inside a job of so many experts, each with all the rows."""
        times = []
        for _ in range(repeats):
            before = self._worker.ring.header.stats.busy_ns
            self._run(experts, rows)
            times.append((self._worker.ring.header.stats.busy_ns - before) * 1e-9)
        return sorted(times)[len(times) // 2]

    def pair_seconds(self) -> float:
        """Of a row of an expert, where an expert has many."""
        rows = min(MANY_ROWS, self._worker.ring.size.rows)
        return self.seconds(self._topk, rows, 3) / (rows * self._topk)

    @contextlib.contextmanager
    def kept_busy(self) -> Iterator[None]:
        with _repeated(lambda: self._run(self._topk)):
            yield


@contextlib.contextmanager
def _repeated(work: Callable[[], None]) -> Iterator[None]:
    """Runs `work` over and over on a thread, from before the body starts until it ends."""
    stop, started = threading.Event(), threading.Event()

    def loop() -> None:
        while not stop.is_set():
            work()
            started.set()

    thread = threading.Thread(target=loop, daemon=True)
    thread.start()
    started.wait(5)
    try:
        yield
    finally:
        stop.set()
        thread.join()
