"""Log probabilities of every family against transformers in float32.

Tiny random checkpoints, written by transformers, are served with prompts whole, in chunks of 64 and of 7, then
decoded, at 1, 2, 7 and 64 requests at once; every position and the whole vocabulary is compared. In a second
part the instruction sets of the expert kernels are forced one by one, in float32 and in bfloat16; in bfloat16
the error is that of weights and activations (a router's near tie may go the other way), only its size counts.

    PYTHONPATH=python python benchmark/family_logits.py
"""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
from pathlib import Path
from typing import get_args

import results_file
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "test"))

import family_check
import prefork
import tiny_models

from sglang_ft.config import Isa

CHUNKS = {"whole": 4096, "64": 64, "7": 7}
BATCHES: dict[int, list[int]] = {
    1: [150],
    2: [64, 65],
    7: [1, 3, 7, 8, 63, 130, 200],
    64: [1, 7, 20, 33, 64, 90],
}
NEW_TOKENS = 12
# Positions where transformers' first and second token are closer than this are not judged.
TOLERANCE = 5e-4
BFLOAT16_TOLERANCE = 1.0
ISA_FAMILIES = ("qwen3_moe", "gpt_oss")

Metrics = dict[str, float]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--families", nargs="*", default=list(tiny_models.FAMILIES))
    parser.add_argument("--chunks", nargs="*", default=list(CHUNKS))
    parser.add_argument("--isas", nargs="*", default=[i for i in get_args(Isa) if i != "auto"])
    parser.add_argument("--output", type=Path, default=results_file.RESULTS / "family_logits.json")
    return parser.parse_args()


def compare(
    nursery: prefork.Nursery, folder: Path, reference: family_check.Reference, name: str, *flags: str
) -> Metrics:
    """All batches on one server; metrics `name.requests_N.*`."""
    tolerance = BFLOAT16_TOLERANCE if "bfloat16" in flags else TOLERANCE
    metrics: Metrics = {}
    with nursery.serving(folder, "--max-total-tokens", "20000", *flags) as url:
        for count, lengths in BATCHES.items():
            batch = family_check.prompts(count, lengths, seed=count)
            answers = family_check.ask(url, batch, NEW_TOKENS, of_prompt=count < 64)
            result = reference.compare_all(answers, tolerance)
            print(f"{name} requests {count}: {result}", flush=True)
            metrics |= {f"{name}.requests_{count}.{key}": value for key, value in result._asdict().items()}
    return metrics


def families(nursery: prefork.Nursery, args: argparse.Namespace, folder: Path) -> Metrics:
    metrics: Metrics = {}
    for family in args.families:
        checkpoint = tiny_models.write(family, folder / family)
        reference = family_check.Reference(checkpoint)
        for chunk in args.chunks:
            name = f"{family}.chunk_{chunk}"
            flags = ("--dtype", "float32", "--chunked-prefill-size", str(CHUNKS[chunk]))
            metrics |= compare(nursery, checkpoint, reference, name, *flags)
    return metrics | worst(metrics)


def worst(metrics: Metrics) -> Metrics:
    """The summary over families, chunks and batches."""
    parts = [
        family_check.Comparison(*(metrics[f"{name}.{field}"] for field in family_check.Comparison._fields))
        for name in sorted({key.rpartition(".")[0] for key in metrics})
    ]
    return {f"all.{k}": v for k, v in family_check.Comparison.worst(parts)._asdict().items()} if parts else {}


def instruction_sets(nursery: prefork.Nursery, args: argparse.Namespace, folder: Path) -> Metrics:
    metrics: Metrics = {}
    for family in ISA_FAMILIES:
        # Values that bfloat16 can hold, so that both types serve the same model.
        checkpoint = tiny_models.write(family, folder / f"{family}_bf16", dtype=torch.bfloat16)
        reference = family_check.Reference(checkpoint)
        for isa, dtype in itertools.product(args.isas, dtypes_of(family)):
            flags = ("--dtype", dtype, "--ft-worker-isa", isa)
            try:
                metrics |= compare(nursery, checkpoint, reference, f"{family}.{dtype}_isa_{isa}", *flags)
            except RuntimeError as e:  # the server ends when the CPU lacks the instructions
                print(f"{family} {isa}: {str(e)[-300:]}", flush=True)
    return metrics


def dtypes_of(family: str) -> tuple[str, ...]:
    """SGLang builds gpt-oss in the checkpoint's type, whatever --dtype says."""
    return ("bfloat16",) if family == "gpt_oss" else ("float32", "bfloat16")


def main() -> None:
    args = arguments()
    nursery = prefork.Nursery()
    try:
        with tempfile.TemporaryDirectory() as folder:
            metrics = families(nursery, args, Path(folder))
            metrics |= instruction_sets(nursery, args, Path(folder))
    finally:
        nursery.close()
    results_file.write(args.output, "family_logits", metrics)


if __name__ == "__main__":
    main()
