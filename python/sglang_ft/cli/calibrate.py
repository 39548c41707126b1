"""sglang-ft calibrate: how long an expert of a model takes over the link and on the CPU, both busy, and the split.

Takes the shape of the experts from the model's headers and measures with random weights, so nothing is loaded. The
next server start with this shape, these threads and this machine uses the result.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence

import torch

from sglang_ft import checkpoint, gpu
from sglang_ft.calibration import measure, store
from sglang_ft.checkpoint import ModelSummary
from sglang_ft.config import FtConfig
from sglang_ft.errors import CheckpointError, FtError
from sglang_ft.experts import policy
from sglang_ft.experts.bank import ExpertPool, plan_banks
from sglang_ft.experts.decode import ExpertCache
from sglang_ft.experts.formats import LayerSpec, find_format
from sglang_ft.experts.synthetic import fill_pool
from sglang_ft.worker.protocol import Isa
from sglang_ft.worker.ring import Ring, RingSize
from sglang_ft.worker.supervisor import Supervisor, WorkerOptions
from sglang_ft.worker.topology import choose_cores

_LAYERS = 2
_SPIN_NS, _NAP_NS = 2_000_000, 5_000_000_000


def main(argv: Sequence[str]) -> int:
    config, rest = FtConfig.parse(argv, os.environ)
    parser = argparse.ArgumentParser(
        prog="sglang-ft calibrate",
        description="Measure link and CPU for the experts of a model; takes --ft-worker-* flags of the server too.",
    )
    parser.add_argument("model", help="folder of a checkpoint, or of a config.json alone")
    args = parser.parse_args(rest)
    if missing := gpu.what_is_missing():
        raise FtError(f"nothing to calibrate: {missing}")
    summary = checkpoint.summarize_config(checkpoint.locate(args.model))
    if not summary.is_moe:
        raise CheckpointError(f"{args.model}: a dense model has no experts to calibrate")
    spec, times = _measure(summary, config)
    _print(spec, summary.top_k, times)
    return 0


def _measure(summary: ModelSummary, config: FtConfig) -> tuple[LayerSpec, policy.BranchTimes]:
    fmt = find_format(None, summary.dtype)
    if fmt is None:
        raise CheckpointError(f"experts of type {summary.dtype} are not supported")
    spec = LayerSpec(fmt, summary.num_experts, summary.hidden, summary.moe_intermediate)
    pool = ExpertPool(plan_banks([spec] * _LAYERS))
    pool.file.allocate_huge()
    fill_pool(pool, seed=0)
    pool.seal()
    ring = Ring(RingSize(2, measure.MANY_ROWS, summary.top_k, spec.hidden), pool.file.size, _SPIN_NS, _NAP_NS)
    ring.write_layers(pool.plan)
    cores = tuple(choose_cores(config.worker_threads, config.worker_cores))
    worker = Supervisor(ring, pool, WorkerOptions(cores, config.worker_isa, config.worker_stall_s))
    worker.start()
    try:
        cache = ExpertCache(pool, ring, summary.top_k, 0, torch.cuda.current_device())
        times = measure.measure(cache, worker)
        isa = Isa(ring.header.worker_isa).name.lower()
        store.save(store.machine_key(len(cores), isa, spec), times)
        cache.close()
        return spec, times
    finally:
        worker.stop()


def _print(spec: LayerSpec, topk: int, times: policy.BranchTimes) -> None:
    def line(name: str, fixed: float, each: float) -> str:
        rate = spec.expert_bytes / each / 1e9
        return f"  {name:<6}{each * 1e6:8.1f} us an expert ({rate:.1f} GB/s) + {fixed * 1e6:.1f} us"

    print(f"an expert has {spec.expert_bytes / 1e6:.2f} MB; both branches busy:")
    print(line("link", times.link_fixed, times.link_expert) + f", {times.fill_blocks} blocks")
    print(line("CPU", times.cpu_fixed, times.cpu_expert))
    print("split of a layer's misses (of the last fill: features computed on the GPU):")
    for misses, split in enumerate(policy.balanced(topk, times, spec.intermediate)[1:], 1):
        shared = f", {split.features} of {spec.intermediate} features" if split.features else ""
        print(f"  {misses} missing: {split.fills} filled{shared}")
