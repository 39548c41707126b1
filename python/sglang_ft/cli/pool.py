"""sglang-ft pool: the expert pools that --ft-keep-pool keeps in host memory between two starts of a server."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from sglang_ft.errors import FtError
from sglang_ft.weights import kept
from sglang_ft.weights.kept import Kept
from sglang_ft.worker.memory import GIB


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="sglang-ft pool", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("list", help="name, size, state and model of each")
    drop = commands.add_parser("drop", help="end keeping; a running server keeps what it uses")
    drop.add_argument("name", nargs="?", help="of one pool, as listed (default: all)")
    args = parser.parse_args(argv)
    try:
        found = kept.pools()
    except PermissionError as e:
        raise FtError(str(e)) from e
    if args.command == "list":
        print("\n".join(map(_describe, found)) or "no pool is kept")
        return 0
    chosen = [pool for pool in found if args.name in (None, pool.name)]
    if args.name and not chosen:
        raise FtError(f"{args.name}: no such pool; `sglang-ft pool list` shows them")
    for pool in chosen:
        kept.drop(pool.name)
        state = "a server still uses it" if pool.servers else f"{pool.nbytes / GIB:.2f} GiB are free again"
        print(f"{pool.name}  dropped, {state}")
    return 0


def _describe(pool: Kept) -> str:
    if pool.ends_in_s is None:
        state = f"used by {pool.servers} server{'s'[: pool.servers != 1]}"
    else:
        state = f"for {pool.ends_in_s / 60:.0f} more minutes"
    return f"{pool.name}  {pool.nbytes / GIB:8.2f} GiB  {state}  {pool.model}"
