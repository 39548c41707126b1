"""sglang-ft convert: a checkpoint into an FTW folder, which loads at the speed of the disk."""

from __future__ import annotations

import argparse
import logging
import os
from collections.abc import Sequence
from pathlib import Path

from sglang_ft import checkpoint, preflight
from sglang_ft.errors import FtError
from sglang_ft.weights import manifest


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="sglang-ft convert",
        description="Convert a MoE checkpoint for fast loading. Goes on with a conversion that was interrupted; after "
        "an error nothing is left behind.",
    )
    parser.add_argument("--model-path", required=True, help="folder of a checkpoint, or its name on the Hub")
    parser.add_argument("--out", required=True, type=Path, help="folder to make; must not exist")
    parser.add_argument(
        "--dtype", default="auto", help="of the experts, as the server's flag (default: auto)"
    )
    args = parser.parse_args(argv)
    preflight.check_sglang_version(False)
    source = checkpoint.locate(args.model_path)
    if manifest.is_converted(source):
        raise FtError(f"{source} is converted already; serve it with --model-path {source}")
    summary = checkpoint.summarize(source, needs_tokenizer=False)
    if not summary.is_moe:
        raise FtError(f"{source}: a dense model: it has no experts to convert and loads as it is")
    result = _convert(source, args.out, summary, args.dtype)
    gib = (result.experts.nbytes + sum(file.nbytes for file in result.others.values())) / (1 << 30)
    print(
        f"{args.out}: {gib:.2f} GiB, {len(result.layers)} MoE layers; serve it with --model-path {args.out}"
    )
    return 0


def _convert(source: Path, out: Path, summary: checkpoint.ModelSummary, dtype: str) -> manifest.Manifest:
    from sglang_ft.engine import cpu_platform

    os.environ.update(cpu_platform.required_environment())
    for name, value in cpu_platform.environment().items():
        os.environ.setdefault(name, value)
    logging.disable(logging.WARNING)  # SGLang tells of every hook and shard
    from sglang_ft.engine import convert

    return convert.convert(source, out, summary, dtype)
