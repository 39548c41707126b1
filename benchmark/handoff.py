"""Hand-off of a job: from the doorbell to the worker's first instruction, and from its last to the waiter.

One tiny expert, so that only the hand-off costs. States of the machine:

    asleep   the worker sleeps (it does after its spin time without a job) and is woken by a futex
    warm     the worker polls
    busy     as asleep, while a burner process keeps each core busy: the worst a desktop does to us

The headline numbers are those of `asleep`, since without a GPU the layers of one step are further apart
than the default spin time. Adds its metrics to benchmark/results/cpu_experts.json.

    SGLANG_FT_BIN_DIR=build/cpu_worker PYTHONPATH=python python benchmark/handoff.py
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import time
from pathlib import Path

import results_file
import torch

from sglang_ft.experts.bank import ExpertPool, plan_banks
from sglang_ft.experts.formats import LayerSpec, find_format
from sglang_ft.worker.ring import Ring, RingSize
from sglang_ft.worker.supervisor import Supervisor, WorkerOptions
from sglang_ft.worker.topology import choose_cores

HIDDEN, INTERMEDIATE, EXPERTS = 64, 32, 4
DEFAULT_SPIN_NS, WARM_SPIN_NS = 50_000, 100_000_000
WAIT_SPIN_NS = 20_000


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--jobs", type=int, default=2000, help="for each state")
    parser.add_argument("--threads", type=int, default=0, help="0: by topology")
    parser.add_argument("--pause-us", type=float, default=1000, help="between jobs; lets the worker sleep")
    parser.add_argument("--output", type=Path, default=results_file.RESULTS / "cpu_experts.json")
    return parser.parse_args()


def burn() -> None:
    while True:
        pass


class Handoff:
    """A worker on a pool of a few tiny experts."""

    def __init__(self, spin_ns: int, threads: int) -> None:
        bf16 = find_format(None, "bfloat16")
        assert bf16 is not None
        pool = ExpertPool(plan_banks([LayerSpec(bf16, EXPERTS, HIDDEN, INTERMEDIATE)]))
        self.ring = Ring(RingSize(2, 1, 1, HIDDEN), pool.file.size, spin_ns)
        self.ring.write_layers(pool.plan)
        self.worker = Supervisor(self.ring, pool, WorkerOptions(tuple(choose_cores(threads, ""))))
        self.worker.start()
        self.job = (
            0,
            torch.ones(1, HIDDEN, dtype=torch.bfloat16),
            torch.zeros(1, 1, dtype=torch.int32),
            torch.ones(1, 1),
        )

    def once(self) -> tuple[float, float]:
        """Microseconds there and back of one job."""
        sequence = self.ring.submit(*self.job)
        if not self.ring.wait(sequence, WAIT_SPIN_NS, 10_000_000_000):
            raise SystemExit("a job was not done within 10 s")
        seen_ns = time.monotonic_ns()
        outcome = self.ring.outcome(sequence)
        return (outcome.started_ns - outcome.rung_ns) / 1e3, (seen_ns - outcome.finished_ns) / 1e3


def measure(state: str, spin_ns: int, pause_us: float, args: argparse.Namespace) -> dict[str, float]:
    """Median and 99th percentile of both ways and their sum, in microseconds."""
    handoff = Handoff(spin_ns, args.threads)
    samples = []
    for _ in range(args.jobs):
        if pause_us:
            time.sleep(pause_us * 1e-6)
        samples.append(handoff.once())
    handoff.worker.stop()
    there, back = zip(*samples[args.jobs // 20 :], strict=True)
    values = {"there": there, "back": back, "total": [a + b for a, b in samples[args.jobs // 20 :]]}
    metrics = {}
    for name, times in values.items():
        metrics[f"handoff_{state}_{name}_median_us"] = statistics.median(times)
        metrics[f"handoff_{state}_{name}_p99_us"] = statistics.quantiles(times, n=100)[98]
    print("  ".join(f"{name} {value:.1f}" for name, value in metrics.items()), flush=True)
    return metrics


def main() -> None:
    args = arguments()
    metrics = measure("asleep", DEFAULT_SPIN_NS, args.pause_us, args)
    metrics |= measure("warm", WARM_SPIN_NS, 0, args)
    burners = [multiprocessing.Process(target=burn, daemon=True) for _ in os.sched_getaffinity(0)]
    for burner in burners:
        burner.start()
    metrics |= measure("busy", DEFAULT_SPIN_NS, args.pause_us, args)
    for burner in burners:
        burner.kill()
    metrics["handoff_median_us"] = metrics["handoff_asleep_total_median_us"]
    metrics["handoff_p99_us"] = metrics["handoff_asleep_total_p99_us"]
    results_file.write(args.output, "cpu_experts", metrics, replace=False)


if __name__ == "__main__":
    main()
