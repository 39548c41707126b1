"""sglang-ft plan: what would go where on a machine, before anything is downloaded to it or loaded."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
from collections.abc import Sequence
from pathlib import Path

from sglang_ft import checkpoint, gpu
from sglang_ft.checkpoint import ModelSummary
from sglang_ft.config import FtConfig
from sglang_ft.errors import CheckpointError, ConfigError, FtError
from sglang_ft.memory import planner, shapes
from sglang_ft.memory.planner import Machine, MemoryPlan, Problem, Wishes
from sglang_ft.memory.sizes import parse_size

DOES_NOT_FIT = 1


def main(argv: Sequence[str]) -> int:
    config, rest = FtConfig.parse(argv, os.environ)
    args = _parser().parse_args(rest)
    folder = checkpoint.locate(args.model_path)
    model, problems = _summarize(folder)
    if not model.is_moe:
        raise CheckpointError(f"{folder}: a dense model has no experts to plan for")
    text = checkpoint.text_config(checkpoint.read_config(folder))
    memory = shapes.describe(text, {"fp8": 1, "bf16": 2}[args.kv_cache])
    if args.vram is None and config.vram_budget:
        args.vram = parse_size(config.vram_budget)
    machine, bandwidths = _machine(args)
    wishes = Wishes(
        mode=config.moe_mode,
        slots=config.slots,
        context=args.context,
        requests=args.requests,
        chunk=args.chunk,
        states=config.anchor_states,
        ram_reserve=int(config.ram_reserve_gib * planner.GIB),
    )
    plan = planner.plan(model, memory, machine, wishes)
    plan = dataclasses.replace(plan, problems=(*problems, *plan.problems))
    if not model.other_bytes:
        bandwidths += "; config.json alone: dense weights are not counted"
    print(_json(plan) if args.json else planner.render(plan, machine, bandwidths))
    return 0 if plan.fits else DOES_NOT_FIT


def size(text: str) -> int:
    """What parse_size takes, for argparse."""
    try:
        return parse_size(text)
    except ValueError as e:
        raise argparse.ArgumentTypeError(str(e)) from None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="sglang-ft plan",
        description="Plan the memory of a model on a machine, this one unless --vram and --ram say otherwise. Takes "
        "--ft-moe-mode, --ft-slots, --ft-vram-budget and --ft-ram-reserve-gib of the server too. Exit status 1: it "
        "does not fit.",
    )
    parser.add_argument(
        "--model-path", required=True, help="checkpoint, or a folder with a config.json alone"
    )
    parser.add_argument("--vram", type=size, help="GPU memory like 8GiB; 0: no GPU")
    parser.add_argument("--ram", type=size, help="host memory like 32GiB")
    parser.add_argument(
        "--context", type=size, default=0, help="tokens like 64k (default: 32k where it fits)"
    )
    parser.add_argument(
        "--requests", type=int, default=0, help="requests at once (default: 4; below 16 GiB 1)"
    )
    parser.add_argument(
        "--chunk", type=size, default=0, help="tokens of a prefill chunk (default: up to 8192)"
    )
    parser.add_argument("--kv-cache", choices=("bf16", "fp8"), default="bf16", help="type of the KV cache")
    parser.add_argument("--link-gb-s", type=float, help="bandwidth host to GPU (default: assumed 25)")
    parser.add_argument("--cpu-gb-s", type=float, help="bandwidth of the CPU's experts (default: assumed 45)")
    parser.add_argument("--gpu-gb-s", type=float, help="bandwidth of GPU memory (default: assumed 900)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    return parser


def _summarize(folder: Path) -> tuple[ModelSummary, list[Problem]]:
    """Sizes, and that the experts' format is not served yet, which is no reason not to plan."""
    try:
        return checkpoint.summarize(folder, needs_tokenizer=False), []
    except checkpoint.FormatError as e:
        return e.summary, [Problem(str(e), "a checkpoint in BF16, FP16 or FP32")]
    except CheckpointError:
        if not folder.is_dir() or any(folder.glob("*.safetensors")):
            raise
        return checkpoint.summarize_config(folder), []


def _machine(args: argparse.Namespace) -> tuple[Machine, str]:
    import psutil

    vram = args.vram
    if vram is None:
        if not gpu.found():
            raise FtError("this machine has no NVIDIA GPU: name one's memory, like --vram 24GiB, or --vram 0")
        vram = gpu.found()[0].nbytes
    default = Machine(0, 0)
    given = [args.link_gb_s, args.cpu_gb_s, args.gpu_gb_s]
    if any(rate is not None and rate <= 0 for rate in given):
        raise ConfigError("--link-gb-s, --cpu-gb-s, --gpu-gb-s: bandwidths are above 0")
    link, cpu, memory = (
        rate * 1e9 if rate is not None else assumed
        for rate, assumed in zip(given, (default.link, default.cpu, default.gpu), strict=True)
    )
    ram = psutil.virtual_memory().total if args.ram is None else args.ram
    source = "by the given bandwidths" if None not in given else "some bandwidths assumed, see --help"
    return Machine(vram, ram, link, cpu, memory), source


def _json(plan: MemoryPlan) -> str:
    content = dataclasses.asdict(plan) | {"fits": plan.fits}
    if content["speeds"]["prefill_at_most"] == math.inf:
        content["speeds"]["prefill_at_most"] = None
    return json.dumps(content, indent=2)
