"""Kernels of the expert cache, one layer at a time, inside CUDA graphs; against SGLang's own MoE kernels and memcpy.

    python benchmark/decode_kernels.py --threads 6

Layers of Qwen3.6-35B-A3B's shape with random weights, driven without a server. Prints a table and writes
benchmark/results/decode_kernels.json.
"""

from __future__ import annotations

import argparse
import functools
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
from sglang_ft.experts.decode import ExpertCache  # noqa: E402
from sglang_ft.experts.formats import LayerSpec, find_format  # noqa: E402
from sglang_ft.kernels import check  # noqa: E402

STEPS = 40  # layer steps of one graph, as in the model
REPLAYS = 30


def graph_us(
    enqueue: Callable[[int], object], wake: Callable[[], None] = lambda: None, warm_up: int = 3
) -> float:
    """Median microseconds of one of STEPS calls in a graph, after `warm_up` replays."""
    enqueue(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    wake()
    with torch.cuda.graph(graph):
        for i in range(STEPS):
            enqueue(i)
    times = []
    for _ in range(warm_up + REPLAYS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        wake()
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / STEPS)
    return sorted(times[warm_up:])[REPLAYS // 2]


def memcpy_rate(stack: GpuStack, nbytes: int) -> float:
    """Bytes a second of cudaMemcpyAsync from the registered pool."""
    source = stack.pool.file.bytes[:nbytes]
    target = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
    return _rate(lambda: target.copy_(source, non_blocking=True), nbytes)


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
        copy()  # meanwhile the host gets ahead, so that its launches take no part
        begin.record()
        for _ in range(4):
            copy()
        end.record()
        torch.cuda.synchronize()
        rates.append(4 * nbytes / (begin.elapsed_time(end) * 1e-3))
    return sorted(rates)[len(rates) // 2]


def layer_times(stack: GpuStack, layers: int, with_stock: bool) -> dict[str, float]:
    """Of a layer whose experts are all in slots: with the plan, and resident without it, for several batch sizes."""
    cache, metrics = stack.cache, {}
    for rows in (1, 2, 4, 8, 16, 32):
        inputs = [stack.inputs(rows, i % layers) for i in range(STEPS)]
        cache.resident = False
        metrics[f"hit_layer_us_{rows}"] = graph_us(lambda i, t=inputs: cache.step(i % layers, *t[i]))
        cache.resident = True
        metrics[f"resident_layer_us_{rows}"] = graph_us(lambda i, t=inputs: cache.step(i % layers, *t[i]))
        if with_stock:
            metrics[f"stock_layer_us_{rows}"] = stock_us(stack, inputs, layers)
    cache.resident = False
    if with_stock:
        metrics["hit_layer_over_stock"] = metrics["hit_layer_us_1"] / metrics["stock_layer_us_1"]
        metrics["resident_layer_over_stock"] = metrics["resident_layer_us_1"] / metrics["stock_layer_us_1"]
    return metrics


def prepare_stock() -> bool:
    """Makes SGLang's own MoE kernels callable without a server; False where sglang is not installed."""
    try:
        from sglang.srt import distributed
        from sglang.srt.runtime_context import publish
        from sglang.srt.server_args import ServerArgs
        from sglang.srt.utils.network import get_open_port
    except ImportError:
        return False
    publish(ServerArgs(model_path=str(REPOSITORY / "demo" / "model")), role="test")
    at = f"tcp://127.0.0.1:{get_open_port()}"
    distributed.init_distributed_environment(1, 0, at, 0, backend="nccl")
    distributed.initialize_model_parallel()
    return True


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
    return metrics | {"no_fill_us": one("ft_fill", 0, cache.fill_blocks)}


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


def transports(stack: GpuStack) -> dict[str, float]:
    """Microseconds of a round trip of an empty job through each transport of doorbells, 40 in one graph."""
    ring, lib = stack.ring, stack.cache._lib
    x = torch.zeros(1, stack.specs[0].hidden, dtype=torch.bfloat16)
    for _ in range(ring.size.blocks):  # leaves a job without a route in every block
        stack.worker.run(0, x, torch.full((1, stack.topk), -1), torch.zeros(1, stack.topk))
    names = {0: "kernels", 1: "memory_operations", 2: "host_functions"}
    metrics = {}
    for transport, name in names.items():
        times = []
        for _ in range(7):
            ring.resume_from_doorbells()
            view, first = stack.cache.ring_view, ring.sequence + 1
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                stream = torch.cuda.current_stream().cuda_stream
                check(lib.ft_handoff_probe(view, first, STEPS, transport, stream), name)
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            stack.worker.wake()
            begin.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            times.append(begin.elapsed_time(end) * 1e3 / STEPS)
        metrics[f"transport_{name}_us"] = sorted(times)[len(times) // 2]
    ring.resume_from_doorbells()
    stack.cache.state.set_sequence(ring.sequence)
    return metrics


def fill_times(stack: GpuStack, layers: int) -> dict[str, float]:
    """Layers with 1, 2 and 4 misses of 8, all filled or all run by the worker. Routes come from a trace."""
    metrics: dict[str, float] = {}
    cache, experts = stack.cache, stack.specs[0].num_experts
    inputs = [stack.inputs(1, i % layers) for i in range(STEPS)]
    # Filling: as many slots as make the search for a victim real, yet what moves is evicted before it comes back.
    # The worker: so few that what moves never finds a free one.
    ways = {
        "fill": (policy.fills_only(1024), layers * experts * 7 // 8),
        "cpu": (policy.cpu_only(1024), layers * 8),
    }
    for misses in (1, 2, 4):
        fixed = torch.arange(8 - misses).expand(experts, 8 - misses)
        moving = 8 + (torch.arange(experts)[:, None] * misses + torch.arange(misses)) % (experts - 8)
        steps = torch.cat([fixed, moving], 1)[:, None, None].expand(-1, layers, 1, 8)
        cache.set_trace(steps)
        for name, (split, slots) in ways.items():
            cache.slots.resize(slots)
            cache.reset()
            cache.state.set_split(split)
            step = functools.partial(_traced_step, cache, inputs, layers)
            metrics[f"{name}_{misses}_us"] = graph_us(
                step, stack.worker.wake, warm_up=2 * experts * layers // STEPS
            )
            before = cache.state.counters()
            graph_us(step, stack.worker.wake)
            done = {key: value - before[key] for key, value in cache.state.counters().items()}
            metrics[f"{name}_{misses}_misses"] = done["misses"] / done["steps"]
    cache.set_trace(None)
    return metrics


def _traced_step(cache: ExpertCache, inputs: list, layers: int, number: int) -> torch.Tensor:
    return cache.step(number % layers, *inputs[number])


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
        metrics |= layer_times(stack, args.layers, prepare_stock()) | parts(stack, args.layers)
        metrics["memcpy_gb_s"] = memcpy_rate(stack, 1 << 30) / 1e9
        for count in (1, 2, 8):
            nbytes = count * spec.expert_bytes
            share = kernel_rate(stack, nbytes, stack.cache.fill_blocks) / memcpy_rate(stack, nbytes)
            metrics[f"link_share_{count}_experts"] = share
        metrics["link_share"] = metrics["link_share_8_experts"]
        metrics["worker_read_gb_s"] = stack.worker.measure_read(0, 2 << 30) / 1e9
        metrics |= transports(stack)
        # As many slots as in a model, but what moves is always evicted before it comes back.
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
