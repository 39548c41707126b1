"""Kernels of the expert cache, one layer at a time, inside CUDA graphs; against SGLang's own MoE kernels and memcpy.

    python benchmark/decode_kernels.py --threads 6

Layers of Qwen3.6-35B-A3B's shape with random weights, driven without a server. Prints a table and writes
benchmark/results/decode_kernels.json.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Callable
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
sys.path[:0] = [str(REPOSITORY / "benchmark"), str(REPOSITORY / "test" / "gpu")]

import results_file  # noqa: E402
import torch  # noqa: E402
from gpu_stack import GpuStack  # noqa: E402

from sglang_ft.experts import policy  # noqa: E402
from sglang_ft.experts.decode import FILL_BLOCKS  # noqa: E402
from sglang_ft.experts.formats import LayerSpec, find_format  # noqa: E402
from sglang_ft.kernels import check  # noqa: E402

STEPS = 40  # layer steps of one graph, as in the model
REPLAYS = 30


def graph_us(enqueue: Callable[[int], object], wake: Callable[[], None] = lambda: None) -> float:
    """Median microseconds of one of STEPS calls in a graph."""
    enqueue(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    wake()
    with torch.cuda.graph(graph):
        for i in range(STEPS):
            enqueue(i)
    times = []
    for _ in range(REPLAYS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        wake()
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / STEPS)
    return sorted(times[3:])[len(times[3:]) // 2]


def memcpy_rate(stack: GpuStack) -> float:
    """Bytes a second of cudaMemcpyAsync from the registered pool."""
    source = stack.pool.file.bytes[: 1 << 30]
    target = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    return _rate(lambda: target.copy_(source, non_blocking=True), 1 << 30)


def kernel_rate(stack: GpuStack, nbytes: int, blocks: int) -> float:
    """The same by our copy kernel."""
    target = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
    lib, at, address = stack.cache._lib, [0], stack.cache.memory.device_address()

    def copy() -> None:
        at[0] = (at[0] + nbytes) % (1 << 30)
        stream = torch.cuda.current_stream().cuda_stream
        check(lib.ft_copy_from_host(target.data_ptr(), address + at[0], nbytes, blocks, stream), "copy")

    return _rate(copy, nbytes)


def _rate(copy: Callable[[], object], nbytes: int) -> float:
    rates = []
    for _ in range(12):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        copy()
        end.record()
        torch.cuda.synchronize()
        rates.append(nbytes / (begin.elapsed_time(end) * 1e-3))
    return sorted(rates)[len(rates) // 2]


def layer_times(stack: GpuStack, layers: int) -> dict[str, float]:
    """Of a layer whose experts are all in slots: with the plan, and resident without it, for several batch sizes."""
    cache, metrics = stack.cache, {}
    for rows in (1, 2, 4, 8, 16, 32):
        inputs = [stack.inputs(rows, i % layers) for i in range(STEPS)]
        cache.resident = False
        metrics[f"hit_layer_us_{rows}"] = graph_us(lambda i, t=inputs: cache.step(i % layers, *t[i]))
        cache.resident = True
        metrics[f"resident_layer_us_{rows}"] = graph_us(lambda i, t=inputs: cache.step(i % layers, *t[i]))
        with contextlib.suppress(ImportError):
            metrics[f"stock_layer_us_{rows}"] = stock_us(stack, inputs, layers)
    cache.resident = False
    return metrics


def stock_us(stack: GpuStack, inputs: list, layers: int) -> float:
    """SGLang's Triton kernels over the same weights."""
    from sglang.srt.layers.moe.moe_runner.triton_utils import fused_moe

    roles = list(stack.cache.slots.roles)
    experts = stack.specs[0].num_experts
    views = [
        [stack.cache.slots.view(role, i * experts, experts) for role in roles[:2]] for i in range(layers)
    ]

    def run(i: int) -> torch.Tensor:
        x, routes, weights = inputs[i]
        return fused_moe.fused_experts_impl(x, *views[i % layers], weights, routes, inplace=False)

    return graph_us(run)


def parts(stack: GpuStack, layers: int) -> dict[str, float]:
    """The kernels of a layer with hits only, each alone."""
    cache, lib = stack.cache, stack.cache._lib
    inputs = [stack.inputs(1, i % layers) for i in range(STEPS)]
    outs = [torch.empty_like(x) for x, _, _ in inputs]
    steps = [cache._step(i % layers, *inputs[i], outs[i], None) for i in range(STEPS)]
    layer_of = [cache.layers[i % layers] for i in range(STEPS)]

    def one(name: str, *extra: int, cached: bool = False) -> float:
        def enqueue(i: int) -> None:
            stream = torch.cuda.current_stream().cuda_stream
            first = (cache.state.struct,) if cached else ()
            check(getattr(lib, name)(*first, layer_of[i], steps[i], *extra, stream), name)

        return graph_us(enqueue)

    metrics = {"plan_us": one("ft_plan", cached=True)}
    metrics |= {"gate_up_us": one("ft_gate_up", 0), "down_us": one("ft_down", 0)}
    metrics |= {"no_fills_gate_up_us": one("ft_gate_up", 1), "combine_us": one("ft_combine", 1, cached=True)}
    return metrics | {"no_fill_us": one("ft_fill", 0, FILL_BLOCKS)}


def handoff(spec: LayerSpec, threads: int) -> dict[str, float]:
    """A layer whose only expert the worker runs: what it takes beyond the job itself and beyond an empty layer."""
    stack = GpuStack([spec] * 2, 0, topk=1, threads=threads)
    try:
        inputs = [stack.inputs(1, i % 2) for i in range(STEPS)]
        stack.cache.state.set_split(policy.cpu_only(1024))
        whole = graph_us(lambda i: stack.cache.step(i % 2, *inputs[i]), stack.worker.wake)
        before = stack.ring.header.stats
        jobs, busy = before.jobs, before.busy_ns
        again = graph_us(lambda i: stack.cache.step(i % 2, *inputs[i]), stack.worker.wake)
        after = stack.ring.header.stats
        job = (after.busy_ns - busy) / (after.jobs - jobs) / 1e3
        none = [(x, torch.full_like(routes, -1), weights) for x, routes, weights in inputs]
        empty = graph_us(lambda i: stack.cache.step(i % 2, *none[i]))
        metrics = {"job_layer_us": min(whole, again), "job_us": job, "empty_layer_us": empty}
        metrics["handoff_us"] = min(whole, again) - job - empty
        return metrics
    finally:
        stack.close()


def fill_times(stack: GpuStack, layers: int) -> dict[str, float]:
    """Layers with 1, 2 and 4 misses of 8, filled, run by the worker or split."""
    metrics: dict[str, float] = {}
    cache, experts = stack.cache, stack.specs[0].num_experts
    splits = {"fill": policy.fills_only(1024), "cpu": policy.cpu_only(1024)}
    for misses in (1, 2, 4):
        for name, split in splits.items():
            cache.reset()
            cache.state.set_split(split)
            # Each step asks for experts that it has not asked for lately, beside ones that stay.
            inputs = []
            for i in range(STEPS):
                x, _, weights = stack.inputs(1, i % layers)
                fixed = list(range(8 - misses))
                moving = [8 + (i // layers * misses + j) % (experts - 8) for j in range(misses)]
                inputs.append((x, torch.tensor([fixed + moving], dtype=torch.int32).cuda(), weights))
            time_us = graph_us(lambda i, t=inputs: cache.step(i % layers, *t[i]), stack.worker.wake)
            counters = cache.state.counters()
            metrics[f"{name}_{misses}_us"] = time_us
            metrics[f"{name}_{misses}_misses"] = counters["misses"] / counters["steps"]
    return metrics


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=6)
    parser.add_argument("--layers", type=int, default=4, help="layers of the pool, 1.6 GB each")
    parser.add_argument("--experts", type=int, default=256)
    parser.add_argument("--output", type=Path, default=results_file.RESULTS / "decode_kernels.json")
    args = parser.parse_args()
    spec = LayerSpec(find_format(None, "bfloat16"), args.experts, 2048, 512)
    metrics: dict[str, float] = {"threads": args.threads}
    start = time.monotonic()
    stack = GpuStack([spec] * args.layers, args.layers * args.experts, topk=8, threads=args.threads)
    try:
        stack.cache.make_resident()
        metrics |= layer_times(stack, args.layers) | parts(stack, args.layers)
        rate = memcpy_rate(stack)
        metrics["memcpy_gb_s"] = rate / 1e9
        for blocks in (16, 32, 64, 128):
            for count in (1, 2, 8):
                metrics[f"link_share_{count}_experts_{blocks}_blocks"] = (
                    kernel_rate(stack, count * spec.expert_bytes, blocks) / rate
                )
        metrics["worker_read_gb_s"] = stack.worker.measure_read(0, 2 << 30) / 1e9
        # Few enough slots that what moves is always evicted before it comes back.
        stack.cache.slots.resize(args.layers * 9)
        stack.cache.resident = False
        metrics |= fill_times(stack, args.layers)
    finally:
        stack.close()
    metrics |= handoff(spec, args.threads)
    metrics["floor_us"] = 8 * spec.expert_bytes / 4.3e12 * 1e6
    metrics["seconds"] = time.monotonic() - start
    results_file.write(args.output, "decode_kernels", metrics)
    for name, value in metrics.items():
        print(f"{name:<36}{value:12.3f}")


if __name__ == "__main__":
    main()
