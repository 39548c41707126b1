"""Decode speed with the experts partly in GPU memory, as a share of plain SGLang's with all of them there.

    python benchmark/decode.py --config shapes.json

Random weights of the given shapes (a config.json); routes from a synthetic trace with the wanted miss rate, so that
every engine and mode meets the same misses. Plain SGLang and each mode of ours are measured in the same run, one
after another. Writes benchmark/results/decode.json.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[1]
sys.path[:0] = [str(REPOSITORY / "benchmark"), str(REPOSITORY / "test")]

import httpx  # noqa: E402
import results_file  # noqa: E402
from serving import DEMO, Server  # noqa: E402

from sglang_ft.experts.replay import find_locality  # noqa: E402
from sglang_ft.experts.traces import synthetic_trace, write_trace  # noqa: E402
from sglang_ft.kernels.abi import Stamp  # noqa: E402

SKIPPED = 48  # tokens of an answer before its speed counts
TABLE_TOKENS = 900  # of the answer during which stamps are read
FLAGS = ("--load-format", "dummy", "--skip-tokenizer-init", "--skip-server-warmup", "--disable-radix-cache")
FLAGS += ("--attention-backend", "triton", "--sampling-backend", "pytorch", "--cuda-graph-max-bs", "8")
FLAGS += ("--max-running-requests", "8", "--context-length", "4096", "--chunked-prefill-size", "2048")
FLAGS += ("--disable-prefill-cuda-graph", "--max-total-tokens", "40000", "--moe-runner-backend", "triton")
FLAGS += ("--disable-shared-experts-fusion",)


def shapes_folder(config: Path, folder: Path) -> Path:
    """A model of the shapes of a config.json in `folder`, for --load-format dummy."""
    model = folder / "model"
    model.mkdir()
    shutil.copy(config, model / "config.json")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / name, model / name)
    return model


def decode_rate(url: str, prompts: int, context: int, tokens: int) -> float:
    """Tokens a second of `prompts` concurrent answers, from SKIPPED tokens on until the first of them ends."""
    marks: list[list[tuple[int, float]]] = [[] for _ in range(prompts)]

    def one(number: int) -> None:
        rng = random.Random(number)
        body = {
            "input_ids": [rng.randrange(1000, 100_000) for _ in range(context)],
            "sampling_params": {"max_new_tokens": tokens, "ignore_eos": True, "temperature": 0},
            "stream": True,
        }
        with httpx.stream("POST", url + "/generate", json=body, timeout=600) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    done = json.loads(line[6:])["meta_info"]["completion_tokens"]
                    marks[number].append((done, time.perf_counter()))

    threads = [threading.Thread(target=one, args=(i,)) for i in range(prompts)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    begin = max(next(at for done, at in own if done >= SKIPPED) for own in marks)
    end = min(own[-1][1] for own in marks)
    return sum(_between(own, begin, end) for own in marks) / (end - begin)


def _between(marks: list[tuple[int, float]], begin: float, end: float) -> int:
    inside = [done for done, at in marks if begin <= at <= end]
    return max(inside) - min(inside)


def median_rate(url: str, prompts: int, args: argparse.Namespace) -> float:
    rates = sorted(decode_rate(url, prompts, args.context, args.tokens) for _ in range(args.repeats))
    print(f"  {prompts} answers: {', '.join(f'{rate:.1f}' for rate in rates)} tokens/s", flush=True)
    return rates[len(rates) // 2]


def start(model: Path, *flags: str, **kwargs: Any) -> Server:
    return Server(model, *FLAGS, *flags, **kwargs)


def ready(server: Server, what: str) -> Server:
    begin = time.monotonic()
    try:
        server.wait_ready()
    except (RuntimeError, TimeoutError):
        print(server.log[-8000:], flush=True)
        raise
    print(f"{what}: ready after {time.monotonic() - begin:.0f} s", flush=True)
    return server


def measure_modes(server: Server, args: argparse.Namespace, metrics: dict[str, float]) -> None:
    """Each mode of one server of ours; counters are those of the measured answers."""
    for mode in args.modes:
        httpx.post(server.url + "/ft/experts", json={"moe_mode": mode}, timeout=60).raise_for_status()
        decode_rate(server.url, 1, args.context, args.tokens)  # fills the slots
        before = httpx.get(server.url + "/ft/experts", timeout=60).json()
        worker_before = server.metrics()
        metrics[f"{mode}_tokens_s"] = median_rate(server.url, 1, args)
        after = httpx.get(server.url + "/ft/experts", timeout=60).json()
        print(f"  {mode}: {after}", flush=True)
        done = {name: after[name] - before[name] for name in before if isinstance(before[name], int)}
        steps = max(done["steps"], 1)
        metrics |= {name: after[name] for name in ("link_us_an_expert", "cpu_us_an_expert")}
        metrics[f"{mode}_miss_rate"] = done["misses"] / max(done["misses"] + done["hits"], 1)
        metrics[f"{mode}_fills_a_layer"] = done["fills"] / steps
        metrics[f"{mode}_job_experts_a_layer"] = done["job_experts"] / steps
        metrics[f"{mode}_wait_us_a_layer"] = done["wait_ns"] / steps / 1e3
        jobs, busy = (
            server.metrics().get(name, 0) - worker_before.get(name, 0)
            for name in ("sglang_ft_worker_jobs_total", "sglang_ft_worker_busy_seconds_total")
        )
        metrics[f"{mode}_us_a_job"] = busy / max(jobs, 1) * 1e6
        if mode == "hybrid":
            if args.stamps:
                metrics |= {f"time_{name}": value for name, value in time_table(server, args).items()}
            metrics["hybrid_8_tokens_s"] = median_rate(server.url, 8, args)


def time_table(server: Server, args: argparse.Namespace) -> dict[str, float]:
    """Mean microseconds of the parts of a layer while one answer runs, of all layers and by how many misses they had.

    The first parts add up to `moe`, in the order of the GPU's work; `moe` and `rest` add up to a layer of the whole
    model. `fill_starts`, `link` and `tail` say what the link did meanwhile.
    """
    httpx.post(server.url + "/ft/experts", json={"stamps": True}, timeout=60).raise_for_status()
    answer = threading.Thread(target=decode_rate, args=(server.url, 1, args.context, TABLE_TOKENS))
    answer.start()
    time.sleep(3)
    rows: list[dict[str, float]] = []
    while answer.is_alive() and len(rows) < 4000:
        stamps = httpx.get(server.url + "/ft/experts", timeout=60).json()["stamps"]
        rows += [_parts(layer, following) for layer, following in zip(stamps, stamps[1:], strict=False)]
        time.sleep(0.03)
    answer.join()
    httpx.post(server.url + "/ft/experts", json={"stamps": False}, timeout=60).raise_for_status()
    groups = {"all": rows}
    for misses in sorted({int(row["misses"]) for row in rows}):
        groups[f"{misses}_misses"] = [row for row in rows if row["misses"] == misses]
    table = {}
    for group, own in groups.items():
        table |= {f"{group}_{name}": sum(row[name] for row in own) / len(own) for name in own[0]}
        table[f"{group}_share"] = len(own) / len(rows)
    for name in (*rows[0], "share"):
        values = (table[f"{group}_{name}"] for group in list(groups)[:6])
        print(f"  {name:<16}" + "".join(f"{value:10.2f}" for value in values), flush=True)
    return table


def _parts(s: list[int], following: list[int]) -> dict[str, float]:
    t = {stamp.name.lower(): s[stamp] / 1e3 for stamp in Stamp}
    job = t["job_done"] > t["combine_begin"]
    parts = {
        "plan": t["plan_end"] - t["plan_begin"],
        "hits": t["hits_end"] - t["plan_end"],
        "wait_for_fill": max(t["filled_begin"] - t["hits_end"], 0.0),
        "filled_experts": t["filled_end"] - max(t["filled_begin"], t["hits_end"]),
        "wait_for_job": t["job_done"] - t["filled_end"] if job else 0.0,
        "sum": t["combine_end"] - (t["job_done"] if job else t["filled_end"]),
    }
    parts["moe"] = t["combine_end"] - t["plan_begin"]
    parts["rest"] = following[Stamp.PLAN_BEGIN] / 1e3 - t["combine_end"]
    parts["layer"] = parts["moe"] + parts["rest"]
    parts["misses"] = t["misses"] * 1e3
    parts["rung"] = t["rung"] - t["plan_begin"]
    parts["fill_starts"] = t["fill_begin"] - t["plan_end"]
    parts["link"] = t["fill_end"] - t["fill_begin"]
    parts["tail"] = t["tail_end"] - t["tail_begin"]
    return parts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", type=Path, required=True, help="config.json of the model's shapes")
    parser.add_argument("--share", type=float, default=0.37, help="of the experts that have a slot")
    parser.add_argument("--misses", type=float, default=0.16, help="of the routes")
    parser.add_argument("--locality", type=float, help="of the trace; left out: found for --misses")
    parser.add_argument("--threads", type=int, default=6)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--modes", nargs="*", default=["hybrid", "cache", "cpu"])
    parser.add_argument("--skip", nargs="*", default=[], choices=["stock", "modes", "resident"])
    parser.add_argument("--stamps", action="store_true", help="also a table of where the time goes")
    parser.add_argument("--output", type=Path, default=results_file.RESULTS / "decode.json")
    args = parser.parse_args()
    metrics: dict[str, float] = {"pool_share": args.share, "threads": args.threads, "context": args.context}
    with tempfile.TemporaryDirectory() as folder:
        model = shapes_folder(args.config, Path(folder))
        config = json.loads(args.config.read_text())
        text = config.get("text_config", config)
        shape = (text["num_hidden_layers"], text["num_experts"], text["num_experts_per_tok"])
        slots = round(args.share * shape[0] * shape[1])
        trace = Path(folder) / "trace"
        locality = args.locality or find_locality(*shape, args.share, args.misses)
        write_trace(trace, synthetic_trace(*shape, steps=2000, locality=locality, seed=1, sequences=8))
        metrics |= {"slots": slots, "locality": locality}
        ours = ("--ft-worker-threads", str(args.threads), "--ft-route-trace", str(trace))
        if "stock" not in args.skip:
            stock = ready(
                start(model, "--mem-fraction-static", "0.8", module="sglang.launch_server"), "plain SGLang"
            )
            try:
                metrics["stock_tokens_s"] = median_rate(stock.url, 1, args)
            finally:
                stock.stop()
            save(args.output, metrics)
        if "modes" not in args.skip:
            flags = ("--ft-moe-mode", "hybrid", "--ft-slots", str(slots), *(["--ft-stamps"] * args.stamps))
            server = ready(start(model, *flags, *ours), "hybrid")
            try:
                print(
                    "\n".join(
                        line
                        for line in server.log.splitlines()
                        if "xpert" in line and "ServerArgs" not in line
                    )[-2000:],
                    flush=True,
                )
                measure_modes(server, args, metrics)
            finally:
                server.stop()
            save(args.output, metrics)
        if "resident" not in args.skip:
            resident = ready(start(model, "--ft-moe-mode", "resident", *ours[:2]), "resident")
            try:
                metrics["resident_tokens_s"] = median_rate(resident.url, 1, args)
            finally:
                resident.stop()
    save(args.output, metrics)
    for name, value in metrics.items():
        print(f"{name:<32}{value:12.3f}")


def save(output: Path, metrics: dict[str, float]) -> None:
    """Writes what was measured so far."""
    add_shares(metrics)
    results_file.write(output, "decode", metrics)


def add_shares(metrics: dict[str, float]) -> None:
    """The ratios that the targets name, of what was measured."""
    stock = metrics.get("stock_tokens_s")
    names = {
        "hybrid": "decode_share",
        "cache": "fills_only_share",
        "cpu": "cpu_only_share",
        "resident": "resident_ratio",
    }
    for mode, name in names.items():
        if stock and f"{mode}_tokens_s" in metrics:
            metrics[name] = metrics[f"{mode}_tokens_s"] / stock
    if "hybrid_8_tokens_s" in metrics:
        metrics["batch8_over_batch1"] = metrics["hybrid_8_tokens_s"] / metrics["hybrid_tokens_s"]


if __name__ == "__main__":
    main()
