"""Loading a model, converted and from safetensors, against plain parallel direct reads of the same files in one run.

    python benchmark/load.py --gib 8 --folder /path/on/the/disk

Writes a checkpoint of Qwen3.6-35B-A3B's expert sizes, cut to a depth of so many GiB of experts, and converts it. Then
takes turns: plain read, our read. Reads bypass the page cache; file systems that refuse direct reads are told so. At
the end it starts servers on both folders, and plain SGLang where there is a GPU, and measures how long after the
command the first token comes, the files dropped from the page cache before. Writes benchmark/results/load.json.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
sys.path[:0] = [str(REPOSITORY / "benchmark"), str(REPOSITORY / "test")]

import httpx  # noqa: E402
import psutil  # noqa: E402
import results_file  # noqa: E402
import synthetic  # noqa: E402
import torch  # noqa: E402
from serving import Server  # noqa: E402

from sglang_ft.experts.bank import BankPlan, ExpertPool, plan_banks  # noqa: E402
from sglang_ft.experts.formats import LayerSpec, find_format  # noqa: E402
from sglang_ft.weights import manifest  # noqa: E402
from sglang_ft.weights.lazy import Reads  # noqa: E402
from sglang_ft.weights.loading import Loading  # noqa: E402
from sglang_ft.weights.manifest import CHUNK, DATA_OFFSET, EXPERTS  # noqa: E402
from sglang_ft.weights.reader import FileReader  # noqa: E402
from sglang_ft.weights.transfers import READS  # noqa: E402
from sglang_ft.worker.protocol import Role  # noqa: E402

GIB = 1 << 30
SPEC = LayerSpec(find_format(None, "bfloat16"), 256, 2048, 512)
FIRST_TOKEN_S = 1800.0
CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": SPEC.hidden,
    "moe_intermediate_size": SPEC.intermediate,
    "intermediate_size": 4 * SPEC.hidden,
    "num_experts": SPEC.num_experts,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "vocab_size": 32_000,
    "max_position_embeddings": 32_768,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "torch_dtype": "bfloat16",
}


def convert(source: Path, out: Path) -> float:
    """By the command; seconds it took."""
    command = [sys.executable, "-m", "sglang_ft.cli.main", "convert"]
    begin = time.monotonic()
    subprocess.run([*command, "--model-path", str(source), "--out", str(out)], check=True)
    return time.monotonic() - begin


def read_checkpoint(folder: Path, pool: ExpertPool) -> None:
    """As a server does: lazy tensors copied into the banks."""
    reads = Reads(folder)
    for layer in range(len(pool.plan.layers)):
        gate_up, down = pool.bank(layer, Role.GATE_UP), pool.bank(layer, Role.DOWN)
        for e in range(SPEC.num_experts):
            name = f"model.layers.{layer}.mlp.experts.{e}."
            gate, up = gate_up[e].chunk(2)
            for part, to in (("gate_proj", gate), ("up_proj", up), ("down_proj", down[e])):
                lazy = reads.tensor(f"{name}{part}.weight")
                assert lazy is not None
                to.copy_(lazy)
    reads.wait()
    reads.close()


def plain_read(files: list[tuple[Path, int]], pool: ExpertPool) -> int:
    """The same files from an offset on, in chunks, into the same memory by a thread each, nothing checked; bytes."""
    readers = [(FileReader(path), begin) for path, begin in files]
    jobs = [
        (reader, at, min(CHUNK, reader.size - at))
        for reader, begin in readers
        for at in range(begin, reader.size, CHUNK)
    ]
    places = pool.file.size // CHUNK

    def one(number: int) -> None:
        reader, at, nbytes = jobs[number]
        to = number % places * CHUNK
        reader.read(at, pool.file.bytes[to : to + nbytes])

    with ThreadPoolExecutor(READS) as executor:
        list(executor.map(one, range(len(jobs))))
    for reader, _ in readers:
        if not reader.direct:
            print("this file system refuses direct reads: the numbers are those of the page cache")
        reader.close()
    return sum(nbytes for _, _, nbytes in jobs)


def timed(work: Callable[[ExpertPool], int | None], plan: BankPlan) -> tuple[float, float]:
    """Bytes a second into a fresh pool, and the most memory beyond the pool, in GiB."""
    pool = ExpertPool(plan)
    pool.file.allocate_huge()
    process, most, stop = psutil.Process(), [0], threading.Event()
    before = process.memory_info().rss

    def watch() -> None:
        while not stop.wait(0.01):
            most[0] = max(most[0], process.memory_info().rss)

    watcher = threading.Thread(target=watch)
    watcher.start()
    begin = time.perf_counter()
    nbytes = work(pool) or plan.nbytes
    seconds = time.perf_counter() - begin
    stop.set()
    watcher.join()
    pool.file.close()
    return nbytes / seconds, (most[0] - before) / GIB


def measure_reads(checkpoint: Path, folder: Path, plan: BankPlan, repeats: int) -> dict[str, float]:
    """Rates and shares of both ways, medians over the repeats; the most memory of all."""
    others = [(folder / name, 0) for name in manifest.read(folder).others]
    converted = [(folder / EXPERTS, DATA_OFFSET), *others]
    total = plan.nbytes + sum(path.stat().st_size for path, _ in others)

    def load(pool: ExpertPool) -> int:
        Loading(folder, pool).wait()  # which also checks the other files
        return total

    stored = [(path, 0) for path in sorted(checkpoint.glob("*.safetensors"))]
    plain, ours, plain_stored, safetensors, beyond = [], [], [], [], []
    for _ in range(repeats):
        plain.append(timed(lambda pool: plain_read(converted, pool), plan)[0])
        rate, more = timed(load, plan)
        ours.append(rate)
        plain_stored.append(timed(lambda pool: plain_read(stored, pool), plan)[0])
        rate, also = timed(lambda pool: read_checkpoint(checkpoint, pool), plan)
        safetensors.append(rate)
        beyond.append(max(more, also))
        print(
            f"  converted and checked {ours[-1] / 1e9:.2f} (plain {plain[-1] / 1e9:.2f}), safetensors "
            f"{rate / 1e9:.2f} GB/s (plain {plain_stored[-1] / 1e9:.2f}); {beyond[-1]:.2f} GiB more than the pool",
            flush=True,
        )
    middle = repeats // 2
    return {
        "gib": plan.nbytes / GIB,
        "plain_gb_s": sorted(plain)[middle] / 1e9,
        "ftw_gb_s": sorted(ours)[middle] / 1e9,
        "ftw_share": sorted(a / b for a, b in zip(ours, plain, strict=True))[middle],
        "plain_safetensors_gb_s": sorted(plain_stored)[middle] / 1e9,
        "safetensors_gb_s": sorted(safetensors)[middle] / 1e9,
        "safetensors_share": sorted(a / b for a, b in zip(safetensors, plain_stored, strict=True))[middle],
        "peak_over_pool_gib": max(beyond),
    }


def first_token_s(folder: Path, *flags: str, module: str = "sglang_ft.launch_server") -> tuple[float, Server]:
    """Seconds from the command to the first token of the first answer, the model's files not in the page cache."""
    for path in folder.iterdir():
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)
    begin = time.monotonic()
    server = Server(folder, "--context-length", "4096", "--skip-server-warmup", *flags, module=module)
    body = {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 2}, "stream": True}
    try:
        while time.monotonic() - begin < FIRST_TOKEN_S:
            if server.process.poll() is not None:
                raise RuntimeError(f"the server ended:\n{server.log[-4000:]}")
            try:
                with httpx.stream(
                    "POST", server.url + "/generate", json=body, timeout=FIRST_TOKEN_S
                ) as answer:
                    if answer.status_code == 200 and next(answer.iter_bytes()):
                        return time.monotonic() - begin, server
            except httpx.TransportError:
                pass
            time.sleep(0.1)
        raise TimeoutError(f"no token within {FIRST_TOKEN_S} s")
    except BaseException:
        server.stop()
        raise


def measure_starts(checkpoint: Path, folder: Path) -> tuple[dict[str, float | None], list[str]]:
    """Times to the first token and notes on what was not measured."""
    metrics: dict[str, float | None] = {}
    for name, model in (("ttft_after_start_s", folder), ("safetensors_ttft_after_start_s", checkpoint)):
        metrics[name], server = first_token_s(model)
        phases = httpx.get(server.url + "/ft/startup", timeout=60).json()["phases"]
        server.stop()
        print(f"{name} {metrics[name]:.1f}: " + ", ".join(f"{p['name']} {p['seconds']:.1f}" for p in phases))
        weights = sum(p["seconds"] for p in phases if p["name"] == "weights")
        metrics[name.replace("ttft_after_start_s", "start_weights_s")] = weights
    metrics["stock_ttft_after_start_s"] = None
    if not torch.cuda.is_available():
        return metrics, ["stock_ttft_after_start_s: plain SGLang does not serve without a GPU"]
    metrics["stock_ttft_after_start_s"], server = first_token_s(checkpoint, module="sglang.launch_server")
    server.stop()
    return metrics, []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gib", type=float, default=8, help="of experts")
    parser.add_argument("--folder", type=Path, help="where to write (default: the temporary folder)")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--no-starts", action="store_true", help="start no server; such metrics stay as they are"
    )
    parser.add_argument("--output", type=Path, default=results_file.RESULTS / "load.json")
    args = parser.parse_args()
    layers = max(1, round(args.gib * GIB / (SPEC.num_experts * SPEC.expert_bytes)))
    plan = plan_banks([SPEC] * layers)
    with tempfile.TemporaryDirectory(dir=args.folder) as parent:
        checkpoint, folder = Path(parent) / "checkpoint", Path(parent) / "ftw"
        synthetic.write(CONFIG | {"num_hidden_layers": layers}, checkpoint)
        os.sync()
        converted = convert(checkpoint, folder)
        metrics: dict[str, float | None] = dict(measure_reads(checkpoint, folder, plan, args.repeats))
        metrics["convert_s"] = converted
        notes: list[str] = []
        if not args.no_starts:
            starts, notes = measure_starts(checkpoint, folder)
            metrics |= starts
    results_file.write(args.output, "load", metrics, replace=not args.no_starts, notes=notes)
    print(json.dumps(metrics, indent=1))


if __name__ == "__main__":
    main()
