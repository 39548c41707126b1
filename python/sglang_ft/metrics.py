"""Our counters on SGLang's /metrics, all named sglang_ft_*.

SGLang's metrics are multi-process: what the scheduler process counts here, the HTTP process shows.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from prometheus_client import Counter, Gauge

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


_CACHE_COUNTERS = {
    "steps": ("cache_steps", "MoE layer steps of the expert cache", 1.0),
    "hits": ("cache_hits", "routed experts that were in a slot, counted once a step", 1.0),
    "misses": ("cache_misses", "routed experts that were not in a slot, counted once a step", 1.0),
    "fills": ("cache_fills", "misses copied into a slot", 1.0),
    "evictions": ("cache_evictions", "experts that lost their slot", 1.0),
    "job_experts": ("cache_job_experts", "misses run by the cpu_worker, shared ones too", 1.0),
    "shared": ("cache_shared_fills", "fills of which the cpu_worker computed a part", 1.0),
    "fill_bytes": ("cache_link_bytes", "expert bytes copied to the GPU by fills", 1.0),
    "wait_ns": ("cache_wait_seconds", "time that the GPU waited for the cpu_worker", 1e-9),
    "failed_jobs": ("cache_failed_jobs", "jobs that ended in an error", 1.0),
}


PROMPT_PATHS = ("slots", "stream", "worker")
_PROMPT_COUNTERS = {
    "passes": "passes over rows of prompts, by how their experts ran",
    "rows": "rows of those passes",
    "seconds": "time of those passes on the GPU",
    "predicted_seconds": "what their experts alone should have taken by the measured times",
}


def _counter(name: str, help: str, model: str, **labels: str) -> Counter:
    from prometheus_client import Counter

    return _made(Counter, name, help, tuple(labels)).labels(model_name=model, **labels)


@functools.cache
def _made(kind: type, name: str, help: str, labels: tuple[str, ...]) -> Any:
    return kind(f"sglang_ft_{name}", help, ["model_name", *labels])


def _gauge(name: str, help: str, model: str) -> Gauge:
    from prometheus_client import Gauge

    gauge = Gauge(f"sglang_ft_{name}", help, ["model_name"], multiprocess_mode="mostrecent")
    return gauge.labels(model_name=model)


class AnchorMetrics:
    """Counts states of recurrent layers by the kind of their anchor; `model` None: counts nothing."""

    def __init__(self, model: str | None) -> None:
        self._model = model
        if model is None:
            return
        from prometheus_client import Counter

        def counter(name: str, help: str, *labels: str) -> Counter:
            return Counter(f"sglang_ft_{name}", help, ["model_name", *labels])

        self._kept = counter("anchor_states_kept", "states stored in the prefix cache", "kind")
        self._reused = counter("anchor_states_reused", "requests that began from a stored state", "kind")
        self._tokens = counter("anchor_reused_tokens", "prompt tokens before those states", "kind")
        self._dropped = counter("anchor_states_dropped", "states dropped to make room", "kind")
        self._refused = counter("anchor_states_refused", "states with NaN or infinity, not stored")

    def kept(self, kind: str) -> None:
        self._count("_kept", kind)

    def reused(self, kind: str, tokens: int) -> None:
        self._count("_reused", kind)
        self._count("_tokens", kind, tokens)

    def dropped(self, kind: str) -> None:
        self._count("_dropped", kind)

    def refused(self) -> None:
        if self._model is not None:
            self._refused.labels(model_name=self._model).inc()

    def _count(self, name: str, kind: str, amount: int = 1) -> None:
        if self._model is not None:
            getattr(self, name).labels(model_name=self._model, kind=str(kind)).inc(amount)


class CacheMetrics:
    """Exports the counters of the expert cache, and says now and then in words how it does."""

    def __init__(self, model: str, slots: int, experts: int) -> None:
        self._counters = {f: _counter(name, help, model) for f, (name, help, _) in _CACHE_COUNTERS.items()}
        self._passes = _counter("forward_passes", "forward passes launched", model)
        self._prompts = {
            (path, field): _counter(f"prompt_{field}", help, model, path=path)
            for path in PROMPT_PATHS
            for field, help in _PROMPT_COUNTERS.items()
        }
        self._seen_prompts = dict.fromkeys(self._prompts, 0.0)
        _gauge("cache_slots", "experts that GPU memory has room for", model).set(slots)
        _gauge("experts", "experts of all MoE layers", model).set(experts)
        self._seen = dict.fromkeys([*_CACHE_COUNTERS, "passes"], 0)
        self._untold = dict.fromkeys(_CACHE_COUNTERS, 0)

    def update(self, now: Mapping[str, int], passes: int) -> None:
        """Adds what happened since the last call; counters that were set back start anew."""
        for field, (_, _, scale) in _CACHE_COUNTERS.items():
            before = self._seen[field] if now[field] >= self._seen[field] else 0
            self._counters[field].inc((now[field] - before) * scale)
            self._untold[field] += now[field] - before
            self._seen[field] = now[field]
        self._passes.inc(passes - self._seen["passes"])
        self._seen["passes"] = passes

    def update_prompts(self, now: Mapping[str, Mapping[str, float]]) -> None:
        """Adds the prompts since the last call; `now`: sums by path and field."""
        for (path, field), counter in self._prompts.items():
            counter.inc(now[path][field] - self._seen_prompts[path, field])
            self._seen_prompts[path, field] = now[path][field]

    def words(self) -> str:
        """What happened since the last call of this, for the log; empty when nothing did."""
        done, self._untold = self._untold, dict.fromkeys(_CACHE_COUNTERS, 0)
        steps, routed = done["steps"], done["hits"] + done["misses"]
        if not steps or not routed:
            return ""
        return (
            f"expert hit rate {done['hits'] / routed:.1%}; a layer step: {done['misses'] / steps:.2f} misses, "
            f"{done['fills'] / steps:.2f} filled, {done['job_experts'] / steps:.2f} by the cpu_worker, "
            f"{done['wait_ns'] / steps / 1e3:.0f} us waited for it"
        )


class WorkerMetrics:
    """Exports the ring's monotonic counters. Made once, in the scheduler process, after SGLang chose its folder."""

    def __init__(self, model: str, pool_bytes: int, threads: int) -> None:
        self._counters = {field: _counter(name, help, model) for field, (name, help, _) in _COUNTERS.items()}
        self._restarts = _counter("worker_restarts", "times the cpu_worker was replaced", model)
        self._up = _gauge("worker_up", "1 while a cpu_worker is ready", model)
        _gauge("expert_pool_bytes", "size of the expert pool in host memory", model).set(pool_bytes)
        _gauge("worker_threads", "threads of the cpu_worker", model).set(threads)
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
