"""sglang-ft bench: what can be measured without a server. So far the expert cache, by replay of route traces."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Callable, Sequence

from sglang_ft.errors import TraceError
from sglang_ft.experts import replay, traces
from sglang_ft.experts.policy import BranchTimes, balanced, fills_only
from sglang_ft.experts.replay import POLICIES, Replay
from sglang_ft.experts.step import Split
from sglang_ft.experts.traces import Trace

SHARES = (0.11, 0.25, 0.37, 0.5, 0.75)
LINK_SHARE = (
    0.46  # 53.9 GB/s over the link beside 64.1 GB/s on 8 CPU threads: H200 host, PCIe 5, both at once
)


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="sglang-ft bench", description="Measure without a server.")
    commands = parser.add_subparsers(required=True, metavar="{replay,trace}")
    _replay_arguments(
        commands.add_parser("replay", help="hit rates of a route trace, by pool size and policy")
    )
    _trace_arguments(commands.add_parser("trace", help="write a synthetic route trace"))
    args = parser.parse_args(argv)
    run: Callable[[argparse.Namespace], int] = args.run
    return run(args)


def _replay_arguments(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=_replay)
    parser.description = (
        "Replay a route trace through the expert cache: how many routed experts would have been in a slot."
    )
    parser.add_argument("trace", metavar="TRACE", help="file of --ft-record-routes or sglang-ft bench trace")
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--slots", type=int, nargs="+", help="pool sizes in experts")
    size.add_argument(
        "--shares",
        type=float,
        nargs="+",
        default=SHARES,
        help=f"pool sizes as shares of all experts (default: {' '.join(map(str, SHARES))})",
    )
    policies = "; ".join(f"{name}: {policy.help}" for name, policy in POLICIES.items())
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=list(POLICIES), help=policies)
    parser.add_argument(
        "--fills",
        choices=("all", "split"),
        default="all",
        help="copy every miss into a slot, or share the misses with the CPU (default: %(default)s)",
    )
    parser.add_argument(
        "--link-share",
        type=float,
        default=LINK_SHARE,
        help="of a split: the link's bandwidth over that of link and CPU together (default: %(default)s)",
    )
    parser.add_argument(
        "--sequences", type=int, default=1, help="cut the trace into as many requests that run at once"
    )
    parser.add_argument("--warmup", type=int, default=0, help="first steps that are not counted")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def _replay(args: argparse.Namespace) -> int:
    if not 0 < args.link_share < 1:
        raise TraceError(f"--link-share: {args.link_share} is not between 0 and 1")
    trace = traces.read_trace(args.trace)
    if args.sequences != 1:
        trace = traces.side_by_side(trace.stretches(args.sequences))
    num_experts = replay.num_expert_ids(trace)
    sizes = args.slots or [round(share * num_experts) for share in args.shares]
    split = _split(args, trace.header.num_experts)
    results = [
        replay.replay(trace, slots, policy, split, args.warmup) for slots in sizes for policy in args.policies
    ]
    print(_json(args, trace, results) if args.json else _table(args, trace, results))
    return 0


def _split(args: argparse.Namespace, num_experts: int) -> list[Split]:
    if args.fills == "all":
        return fills_only(num_experts)
    times = BranchTimes(0, 1 / args.link_share, 0, 1 / (1 - args.link_share))
    return balanced(num_experts, times, intermediate=1, share=False)


def _json(args: argparse.Namespace, trace: Trace, results: Sequence[Replay]) -> str:
    content = {
        "trace": dataclasses.asdict(trace.header),
        "steps": trace.num_steps,
        "rows": len(trace.routes),
        "cut_bytes": trace.cut_bytes,
        "fills": args.fills,
        "link_share": args.link_share if args.fills == "split" else None,
        "warmup": args.warmup,
        "results": [dataclasses.asdict(r) | {"miss_rate": r.miss_rate} for r in results],
    }
    return json.dumps(content, indent=2)


def _table(args: argparse.Namespace, trace: Trace, results: Sequence[Replay]) -> str:
    header = trace.header
    num_experts = replay.num_expert_ids(trace)
    title = (
        f"{', '.join(filter(None, (header.model, header.made_by))) or 'unnamed'}: "
        f"{header.num_layers} layers x {header.num_experts} experts, top {header.top_k}\n"
        f"{trace.num_steps:,} steps, {len(trace.routes):,} rows, {args.warmup} steps of warm-up not counted\n"
    )
    if trace.cut_bytes:
        title += f"the file ends within a step: its last {trace.cut_bytes:,} bytes are left out\n"
    last = max([header.top_k, *(len(r.distribution) - 1 for r in results)])
    columns = range(min(last, header.top_k) + 1)
    more = "+" if last > header.top_k else ""
    lines = [
        f"{'':6} {'':>8}  {'':8} {'':>7}   a layer step     layer steps with m misses, m =",
        f"{'share':>6} {'slots':>8}  {'policy':8} {'hits':>7}  misses   fills"
        + "".join(f"{f'{m}{more if m == columns[-1] else str()}':>7}" for m in columns),
    ]
    for r in results:
        steps = max(1, r.counters.steps)
        shares = [sum(r.distribution[m : None if m == columns[-1] else m + 1]) / steps for m in columns]
        lines.append(
            f"{r.slots / num_experts:6.1%} {r.slots:8,}  {r.policy:8} {1 - r.miss_rate:7.2%} "
            f"{r.counters.misses / steps:7.2f} {r.counters.fills / steps:7.2f}"
            + "".join(f"{share:7.1%}" for share in shares)
        )
    return title + "\n" + "\n".join(lines)


def _trace_arguments(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=_trace)
    parser.description = (
        "Write the routes of a random model whose router prefers some experts. Real routing has other locality: "
        "report the miss rate beside a speed."
    )
    parser.add_argument("file", metavar="FILE", help="to be written")
    parser.add_argument("--num-layers", type=int, required=True, help="MoE layers")
    parser.add_argument("--num-experts", type=int, required=True, help="experts of a layer")
    parser.add_argument("--top-k", type=int, required=True, help="experts of a token")
    parser.add_argument("--steps", type=int, default=2000, help="(default: %(default)s)")
    parser.add_argument("--sequences", type=int, default=1, help="rows of a step (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="(default: %(default)s)")
    locality = parser.add_mutually_exclusive_group(required=True)
    locality.add_argument("--locality", type=float, help="router rows are scaled by exp(locality * n)")
    locality.add_argument("--miss-rate", type=float, help="choose the locality that gives LRU this rate ...")
    parser.add_argument(
        "--share",
        type=float,
        default=0.37,
        help="... with this share of the experts in slots (default: %(default)s)",
    )


def _trace(args: argparse.Namespace) -> int:
    shape = traces.TraceHeader(args.num_layers, args.num_experts, args.top_k)
    if args.steps < 1 or args.sequences < 1 or shape.top_k > shape.num_experts:
        raise TraceError("--steps and --sequences are at least 1, --top-k is at most --num-experts")
    sizes = (shape.num_layers, shape.num_experts, shape.top_k)
    locality = args.locality
    if locality is None:
        locality = replay.find_locality(*sizes, args.share, args.miss_rate, seed=args.seed)
    trace = traces.synthetic_trace(*sizes, args.steps, locality, args.seed, args.sequences)
    traces.write_trace(args.file, trace)
    print(f"wrote {args.file}: {args.steps:,} steps of {args.sequences} rows, locality {locality:g}")
    return 0
