"""sglang-ft verify: reads an FTW folder as a whole and checks every byte against its checksums."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

from tqdm import tqdm

from sglang_ft.weights import manifest, reader


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="sglang-ft verify", description=__doc__)
    parser.add_argument("folder", type=Path, help="made by sglang-ft convert")
    args = parser.parse_args(argv)
    found = manifest.read(args.folder)
    total = found.experts.nbytes + sum(file.nbytes for file in found.others.values())
    begin = time.monotonic()
    with tqdm(total=total, unit="B", unit_scale=True, desc="Verifying", mininterval=0.5) as bar:

        def progress(at: int, nbytes: int) -> None:
            bar.update(nbytes)

        reads = reader.CheckedReads(args.folder, found)
        try:
            reads.experts(None, progress)
            reads.others(progress)
            reads.wait()
        finally:
            reads.close()
    rate = total / max(time.monotonic() - begin, 1e-9) / 1e9
    print(f"{args.folder}: whole; {total / 1e9:.2f} GB, {rate:.1f} GB/s")
    return 0
