"""Experts on the CPU: bytes a second against a plain read of the same pool, and a layer against torch.

Layers of Qwen3.6's shape (256 experts, hidden 2048, intermediate 512, top 8, BF16), as many as fit the
pool. Every job takes fresh random experts of a random layer, so that caches do not help. The read is the
worker's own (every thread, widest loads, same pinning), of as many bytes, just before each job; the share
is the median of these pairs.

    SGLANG_FT_BIN_DIR=build/cpu_worker PYTHONPATH=python python benchmark/cpu_experts.py
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import results_file
import torch
import torch.nn.functional as F

from sglang_ft.experts.bank import ExpertPool, plan_banks
from sglang_ft.experts.formats import LayerSpec, find_format
from sglang_ft.worker.protocol import Isa, Role
from sglang_ft.worker.ring import Ring, RingSize
from sglang_ft.worker.supervisor import Supervisor, WorkerOptions
from sglang_ft.worker.topology import choose_cores

SECOND = 1_000_000_000
READ_ALIGN = 1 << 20
MIN_PAIRS = 7


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pool-gib", type=float, default=8.0)
    parser.add_argument("--threads", type=int, nargs="+", default=[2], help="one run for each")
    parser.add_argument("--cores", default="", help="cores to pin to, like 0-5 (default: by topology)")
    parser.add_argument("--isa", default="auto")
    parser.add_argument("--experts", type=int, default=256, help="of a layer")
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--intermediate", type=int, default=512)
    parser.add_argument("--topk", type=int, default=8)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 8, 64, 512])
    parser.add_argument("--torch-rows", type=int, nargs="*", default=[1, 8, 64, 512])
    parser.add_argument("--seconds", type=float, default=4.0, help="for each point")
    parser.add_argument("--output", type=Path, default=results_file.RESULTS / "cpu_experts.json")
    return parser.parse_args()


def filled_pool(spec: LayerSpec, pool_bytes: float) -> ExpertPool:
    """Layers of `spec` that fit, with small random weights. Blocks repeat: values do not change the speed."""
    per_layer = spec.num_experts * spec.expert_bytes
    num_layers = int(pool_bytes // per_layer)
    if num_layers < 1:
        raise SystemExit(f"--pool-gib: one layer needs {per_layer / 2**30:.2f} GiB")
    pool = ExpertPool(plan_banks([spec] * num_layers))
    block = (torch.randn(1 << 25) * 0.03).to(torch.bfloat16)
    for layer in range(num_layers):
        for bank in pool.banks(layer).values():
            flat = bank.view(-1)
            for start in range(0, flat.numel(), block.numel()):
                part = flat[start : start + block.numel()]
                part.copy_(block[: part.numel()])
    pool.seal()
    return pool


class Bench:
    """One worker on one pool."""

    def __init__(self, args: argparse.Namespace, spec: LayerSpec, pool: ExpertPool, threads: int) -> None:
        self.spec, self.pool, self.topk, self.seconds = spec, pool, args.topk, args.seconds
        rows = max([*args.rows, *args.torch_rows])
        self.ring = Ring(RingSize(2, rows, args.topk, spec.hidden), pool.file.size, spin_ns=50_000)
        self.ring.write_layers(pool.plan)
        cores = tuple(choose_cores(threads, args.cores))
        self.worker = Supervisor(self.ring, pool, WorkerOptions(cores, args.isa, stall_s=60.0))
        self.worker.start()
        self.threads = self.ring.header.worker_threads
        self.isa = Isa(self.ring.header.worker_isa).name.lower()

    def inputs(self, rows: int) -> tuple[int, torch.Tensor, torch.Tensor, torch.Tensor]:
        """A random layer, rows, distinct experts for each row, and router weights that sum to 1."""
        ids = torch.rand(rows, self.spec.num_experts).topk(self.topk).indices.to(torch.int32)
        weights = torch.softmax(torch.randn(rows, self.topk), dim=1)
        layer = random.randrange(len(self.pool.plan.layers))
        return layer, torch.randn(rows, self.spec.hidden).to(torch.bfloat16), ids, weights

    def read_rate(self, nbytes: int) -> float:
        """Bytes a second of a plain read of `nbytes` at a random place."""
        nbytes = min(nbytes, self.pool.file.size) // READ_ALIGN * READ_ALIGN
        places = (self.pool.file.size - nbytes) // READ_ALIGN
        return self.worker.measure_read(random.randint(0, places) * READ_ALIGN, nbytes)

    def job(self, rows: int) -> tuple[float, float]:
        """Bytes a second inside the worker, and microseconds from doorbell to done."""
        sequence = self.ring.submit(*self.inputs(rows))
        while not self.ring.wait(sequence, 20_000, 60 * SECOND):
            raise SystemExit("a job was not done within 60 s")
        outcome = self.ring.outcome(sequence)
        if outcome.status:
            raise SystemExit(f"a job ended with status {outcome.status}")
        rate = outcome.nbytes / ((outcome.finished_ns - outcome.started_ns) * 1e-9)
        return rate, (outcome.finished_ns - outcome.rung_ns) / 1e3

    def share(self, rows: int) -> dict[str, float]:
        """Median of job rate / read rate over interleaved pairs."""
        touched = min(rows * self.topk, self.spec.num_experts) * self.spec.expert_bytes
        shares, rates, reads, times = [], [], [], []
        self.job(rows)
        end = time.monotonic() + self.seconds
        while time.monotonic() < end or len(shares) < MIN_PAIRS:
            read = self.read_rate(touched)
            rate, micros = self.job(rows)
            shares.append(rate / read)
            rates.append(rate / 1e9)
            reads.append(read / 1e9)
            times.append(micros)
        suffix = f"{rows}row{'s' if rows > 1 else ''}_{self.threads}threads"
        values = {"read_share": shares, "expert_gb_s": rates, "read_gb_s": reads, "job_us": times}
        return {f"{name}_{suffix}": statistics.median(v) for name, v in values.items()}


def torch_layer(pool: ExpertPool, layer: int, rows: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor):
    """What SGLang's native path does on a CPU: one pair of matrix products for each expert that has rows."""
    gate_up, down = pool.bank(layer, Role.GATE_UP), pool.bank(layer, Role.DOWN)
    pairs = ids.flatten().long()
    order = pairs.argsort()
    token_of = order // ids.shape[1]
    counts = torch.bincount(pairs, minlength=gate_up.shape[0]).tolist()
    sorted_rows, outputs, start = rows[token_of], [], 0
    for expert, count in enumerate(counts):
        if not count:
            continue
        gate, up = F.linear(sorted_rows[start : start + count], gate_up[expert]).chunk(2, dim=-1)
        outputs.append(F.linear(F.silu(gate) * up, down[expert]))
        start += count
    by_pair = torch.empty_like(sorted_rows)
    by_pair[order] = torch.cat(outputs)
    by_pair = by_pair.view(*ids.shape, -1).float() * weights.unsqueeze(-1)
    return by_pair.sum(dim=1).to(rows.dtype)


def median_us(run: Callable[[], object], seconds: float) -> float:
    run()
    times: list[float] = []
    end = time.monotonic() + seconds
    while time.monotonic() < end or len(times) < 3:
        start = time.monotonic_ns()
        run()
        times.append((time.monotonic_ns() - start) / 1e3)
    return statistics.median(times)


def against_torch(bench: Bench, rows: int) -> dict[str, float]:
    """Times of the whole layer both ways on the same inputs, drawn anew for each, and their difference."""
    suffix = f"{rows}row{'s' if rows > 1 else ''}_{bench.threads}threads"
    layer, x, ids, weights = bench.inputs(rows)
    ours = bench.worker.run(layer, x, ids, weights).float()
    theirs = torch_layer(bench.pool, layer, x, ids, weights).float()
    error = ((ours - theirs).abs().max() / theirs.abs().max()).item()
    ours_us = median_us(lambda: bench.worker.run(*bench.inputs(rows)), bench.seconds)
    theirs_us = median_us(lambda: torch_layer(bench.pool, *bench.inputs(rows)), bench.seconds)
    return {
        f"layer_us_{suffix}": ours_us,
        f"torch_us_{suffix}": theirs_us,
        f"speedup_over_torch_{suffix}": theirs_us / ours_us,
        f"difference_to_torch_{suffix}": error,
    }


def report(metrics: dict[str, float], into: dict[str, float]) -> None:
    print("  " + "  ".join(f"{name} {value:.3f}" for name, value in metrics.items()), flush=True)
    into.update(metrics)


def main() -> None:
    args = arguments()
    bf16 = find_format(None, "bfloat16")
    assert bf16 is not None
    spec = LayerSpec(bf16, args.experts, args.hidden, args.intermediate)
    start = time.monotonic()
    pool = filled_pool(spec, args.pool_gib * 2**30)
    gib = pool.plan.nbytes / 2**30
    print(
        f"{gib:.2f} GiB, {len(pool.plan.layers)} layers, filled in {time.monotonic() - start:.1f} s",
        flush=True,
    )
    metrics: dict[str, float] = {"pool_gib": gib}
    for threads in args.threads:
        bench = Bench(args, spec, pool, threads)
        torch.set_num_threads(bench.threads)
        print(f"{bench.threads} threads, {bench.isa}", flush=True)
        for rows in args.rows:
            report(bench.share(rows), metrics)
        for rows in args.torch_rows:
            report(against_torch(bench, rows), metrics)
        bench.worker.stop()
    results_file.write(args.output, "cpu_experts", metrics)


if __name__ == "__main__":
    main()
