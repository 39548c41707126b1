"""Loading experts, converted and from safetensors, against a plain parallel direct read in the same run.

    python benchmark/load.py --gib 8 --folder /path/on/the/disk

Writes a folder of random experts of Qwen3.6-35B-A3B's shape once, then takes turns. The page cache is bypassed; file
systems that refuse direct reads are told so. Writes benchmark/results/load.json.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
sys.path[:0] = [str(REPOSITORY / "benchmark")]

import psutil  # noqa: E402
import results_file  # noqa: E402
import torch  # noqa: E402
from safetensors.torch import save_file  # noqa: E402

from sglang_ft.experts.bank import BankPlan, ExpertPool, plan_banks  # noqa: E402
from sglang_ft.experts.formats import LayerSpec, find_format  # noqa: E402
from sglang_ft.weights import writer  # noqa: E402
from sglang_ft.weights.lazy import Reads  # noqa: E402
from sglang_ft.weights.loading import Loading  # noqa: E402
from sglang_ft.weights.manifest import CHUNK, DATA_OFFSET, EXPERTS  # noqa: E402
from sglang_ft.weights.reader import FileReader  # noqa: E402
from sglang_ft.weights.transfers import READS  # noqa: E402
from sglang_ft.worker.protocol import Role  # noqa: E402

SPEC = LayerSpec(find_format(None, "bfloat16"), 256, 2048, 512)


def make_folder(folder: Path, plan: BankPlan) -> float:
    """Random experts and a config; seconds it took."""
    begin = time.monotonic()
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"architectures": ["Qwen3MoeForCausalLM"]}))
    file = writer.open_experts(folder, plan.nbytes)
    for at in range(0, plan.nbytes, 1 << 28):
        piece = file.bytes[at : at + (1 << 28)]
        piece.copy_(torch.randint(0, 256, (piece.numel(),), dtype=torch.uint8))
    file.flush()
    source = folder.with_name("source")
    source.mkdir()
    shutil.copyfile(folder / "config.json", source / "config.json")
    writer.finish(folder, source, "synthetic", plan, file.bytes, {}, 0)
    return time.monotonic() - begin


def make_checkpoint(folder: Path, plan: BankPlan) -> None:
    """The same experts' shapes as Qwen3.6 stores them, random, one file a layer."""
    folder.mkdir()
    for layer, banks in enumerate(plan.layers):
        tensors = {
            name_of(layer, role): torch.randint(-(2**15), 2**15, view.shape, dtype=torch.int16).view(
                view.dtype
            )
            for role, view in banks.roles.items()
        }
        save_file(tensors, folder / f"layer-{layer}.safetensors")
    os.sync()


def name_of(layer: int, role: Role) -> str:
    part = {Role.GATE_UP: "gate_up_proj", Role.DOWN: "down_proj"}[role]
    return f"model.language_model.layers.{layer}.mlp.experts.{part}"


def read_checkpoint(folder: Path, pool: ExpertPool) -> None:
    """As a server does: lazy tensors copied into the banks."""
    reads = Reads(folder)
    for layer in range(len(pool.plan.layers)):
        for role, bank in pool.banks(layer).items():
            bank.copy_(reads.tensor(name_of(layer, role)))
    reads.wait()
    reads.close()


def plain_read(files: list[tuple[Path, int]], pool: ExpertPool) -> None:
    """The same files from an offset on, in chunks, into the same memory by a thread each, nothing checked."""
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


def timed(work: Callable[[ExpertPool], None], plan: BankPlan) -> tuple[float, float]:
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
    work(pool)
    seconds = time.perf_counter() - begin
    stop.set()
    watcher.join()
    pool.file.close()
    return plan.nbytes / seconds, (most[0] - before) / (1 << 30)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gib", type=float, default=8)
    parser.add_argument("--folder", type=Path, help="where to write (default: the temporary folder)")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--output", type=Path, default=results_file.RESULTS / "load.json")
    args = parser.parse_args()
    plan = plan_banks([SPEC] * max(1, round(args.gib * (1 << 30) / (256 * SPEC.expert_bytes))))
    with tempfile.TemporaryDirectory(dir=args.folder) as parent:
        folder = Path(parent) / "ftw"
        made = make_folder(folder, plan)
        print(f"{plan.nbytes / 1e9:.1f} GB written in {made:.0f} s")
        checkpoint = Path(parent) / "checkpoint"
        make_checkpoint(checkpoint, plan)
        experts = [(folder / EXPERTS, DATA_OFFSET)]
        stored = [(path, 0) for path in sorted(checkpoint.glob("*.safetensors"))]
        plain, ours, plain_stored, safetensors, beyond = [], [], [], [], []
        for _ in range(args.repeats):
            plain.append(timed(lambda pool: plain_read(experts, pool), plan)[0])
            rate, more = timed(lambda pool: Loading(folder, pool).wait(), plan)
            ours.append(rate)
            plain_stored.append(timed(lambda pool: plain_read(stored, pool), plan)[0])
            rate, also = timed(lambda pool: read_checkpoint(checkpoint, pool), plan)
            safetensors.append(rate)
            beyond.append(max(more, also))
            print(
                f"  converted and checked {ours[-1] / 1e9:.2f} (plain {plain[-1] / 1e9:.2f}), safetensors "
                f"{rate / 1e9:.2f} GB/s (plain {plain_stored[-1] / 1e9:.2f}); {beyond[-1]:.2f} GiB more than the pool"
            )
    middle = args.repeats // 2
    metrics = {
        "gib": plan.nbytes / (1 << 30),
        "plain_gb_s": sorted(plain)[middle] / 1e9,
        "ftw_gb_s": sorted(ours)[middle] / 1e9,
        "ftw_share": sorted(a / b for a, b in zip(ours, plain, strict=True))[middle],
        "safetensors_gb_s": sorted(safetensors)[middle] / 1e9,
        "plain_safetensors_gb_s": sorted(plain_stored)[middle] / 1e9,
        "safetensors_share": sorted(a / b for a, b in zip(safetensors, plain_stored, strict=True))[middle],
        "peak_over_pool_gib": max(beyond),
        "write_gb_s": plan.nbytes / made / 1e9,
    }
    results_file.write(args.output, "load", metrics)
    for name, value in metrics.items():
        print(f"{name:<24}{value:10.3f}")


if __name__ == "__main__":
    main()
