"""Our counters on SGLang's /metrics, all named sglang_ft_*.

SGLang's metrics are multi-process: what the scheduler process counts here, the HTTP process shows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sglang_ft.worker.protocol import Stats

_COUNTERS = {
    "jobs": ("worker_jobs", "MoE layer steps run by the cpu_worker", 1.0),
    "failed_jobs": ("worker_failed_jobs", "jobs that the cpu_worker refused", 1.0),
    "rows": ("worker_rows", "token rows of those jobs", 1.0),
    "expert_rows": ("worker_expert_rows", "routed (row, expert) pairs computed", 1.0),
    "experts": ("worker_experts", "distinct experts, summed over jobs", 1.0),
    "bytes": ("worker_expert_bytes", "expert bytes read, summed over jobs", 1.0),
    "busy_ns": ("worker_busy_seconds", "time inside jobs", 1e-9),
    "handoff_ns": ("worker_handoff_seconds", "time from doorbell to the job's first instruction", 1e-9),
}


class WorkerMetrics:
    """Exports the ring's monotonic counters. Made once, in the scheduler process, after SGLang chose its folder."""

    def __init__(self, model: str, pool_bytes: int, threads: int) -> None:
        from prometheus_client import Counter, Gauge

        labels = {"model_name": model}
        names = list(labels)

        def counter(name: str, help: str) -> Counter:
            return Counter(f"sglang_ft_{name}", help, names).labels(**labels)

        def gauge(name: str, help: str) -> Gauge:
            return Gauge(f"sglang_ft_{name}", help, names, multiprocess_mode="mostrecent").labels(**labels)

        self._counters = {field: counter(name, help) for field, (name, help, _) in _COUNTERS.items()}
        self._restarts = counter("worker_restarts", "times the cpu_worker was replaced")
        self._up = gauge("worker_up", "1 while a cpu_worker is ready")
        gauge("expert_pool_bytes", "size of the expert pool in host memory").set(pool_bytes)
        gauge("worker_threads", "threads of the cpu_worker").set(threads)
        self._seen = dict.fromkeys([*_COUNTERS, "restarts"], 0)

    def update(self, stats: Stats, restarts: int, up: bool) -> None:
        """Adds what happened since the last call."""
        for field, (_, _, scale) in _COUNTERS.items():
            now = getattr(stats, field)
            self._counters[field].inc((now - self._seen[field]) * scale)
            self._seen[field] = now
        self._restarts.inc(restarts - self._seen["restarts"])
        self._seen["restarts"] = restarts
        self._up.set(up)
