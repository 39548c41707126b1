"""Counters of the expert cache on /metrics and in the log."""

import pytest
from prometheus_client import REGISTRY

from sglang_ft.kernels import abi
from sglang_ft.metrics import CacheMetrics


@pytest.fixture(scope="module")
def exporter() -> CacheMetrics:
    return CacheMetrics("m", slots=50, experts=96)


def counters(**values: int) -> dict[str, int]:
    return dict.fromkeys(abi.COUNTERS, 0) | values


def exported(name: str) -> float | None:
    return REGISTRY.get_sample_value(f"sglang_ft_{name}", {"model_name": "m"})


def test_counters_grow_by_what_happened_and_survive_a_reset(exporter):
    assert (exported("cache_slots"), exported("experts")) == (50, 96)
    assert exporter.words() == "", "nothing has happened"
    exporter.update(
        counters(steps=40, hits=270, misses=50, fills=30, job_experts=25, wait_ns=80_000), passes=1
    )
    assert (exported("cache_hits_total"), exported("forward_passes_total")) == (270, 1)
    assert exported("cache_wait_seconds_total") == pytest.approx(80e-6)
    words = exporter.words()
    assert (
        "hit rate 84.4%" in words and "1.25 misses, 0.75 filled, 0.62 by the cpu_worker, 2 us waited" in words
    )
    assert exporter.words() == "", "it was told already"
    exporter.update(counters(steps=4, hits=3), passes=2)  # after a reset
    assert (exported("cache_hits_total"), exported("cache_steps_total")) == (273, 44)
    assert exporter.words().startswith("expert hit rate 100.0%; a layer step: 0.00 misses")


def test_prompts_are_counted_by_their_path(exporter):
    def sums(**stream: float) -> dict[str, dict[str, float]]:
        fields = ("passes", "rows", "seconds", "predicted_seconds")
        return {path: dict.fromkeys(fields, 0.0) for path in ("slots", "stream", "worker")} | {
            "stream": dict.fromkeys(fields, 0.0) | stream
        }

    def of(path: str, field: str) -> float | None:
        return REGISTRY.get_sample_value(f"sglang_ft_prompt_{field}_total", {"model_name": "m", "path": path})

    exporter.update_prompts(sums(passes=1, rows=8192, predicted_seconds=0.7))
    exporter.update_prompts(sums(passes=2, rows=9000, predicted_seconds=1.4, seconds=0.75))
    assert [of("stream", f) for f in ("passes", "rows", "seconds", "predicted_seconds")] == [
        2,
        9000,
        0.75,
        1.4,
    ]
    assert of("slots", "passes") == of("worker", "rows") == 0
