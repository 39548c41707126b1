"""The plan of the GPU's memory becomes what the server allocates: SGLang's flags, and a budget for the experts.

A flag that the user gives wins, and the plan is made around it.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass

from sglang_ft import checkpoint, gpu
from sglang_ft.checkpoint import ModelSummary
from sglang_ft.config import FtConfig
from sglang_ft.errors import MemoryBudgetError
from sglang_ft.memory import planner, shapes
from sglang_ft.memory.planner import GpuPlan, Machine, MemoryPlan, Wishes
from sglang_ft.memory.shapes import ModelMemory
from sglang_ft.memory.sizes import parse_size

_ENV = "SGLANG_FT_PLAN"
_KV_BYTES = {"fp8_e5m2": 1.0, "fp8_e4m3": 1.0, "fp4_e2m1": 0.5}
_SLACK_SHARE = 0.8
"""Of what the plan keeps for a pass; SGLang is told so much less, so that rounding never takes KV cache away."""


@dataclass(frozen=True)
class Allotment:
    """What the process that allocates knows of the plan; bytes of GPU memory.

    `budget`: of all that the server uses, 0 when it is only what was free. `total`: planned, without the reserve;
    `dense`: the dense weights of that. `beside`: kept for what follows the experts. `chunk_token`: activations of a row
    of a prompt.
    """

    experts: GpuPlan
    budget: int
    total: int
    dense: int
    beside: int
    chunk_token: int

    def publish(self) -> None:
        """Leaves it in the environment, for child processes."""
        os.environ[_ENV] = json.dumps(dataclasses.asdict(self))

    @classmethod
    def inherited(cls, environ: Mapping[str, str]) -> Allotment | None:
        """What the launcher published; None when it could not plan."""
        if _ENV not in environ:
            return None
        fields = json.loads(environ[_ENV])
        return cls(**fields | {"experts": GpuPlan(**fields["experts"])})


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """SGLang's flags that the plan is made around."""
    parser.add_argument("--max-running-requests", type=int)
    parser.add_argument("--chunked-prefill-size", type=int)
    parser.add_argument("--max-total-tokens", type=int)
    parser.add_argument("--max-mamba-cache-size", type=int)
    parser.add_argument("--mem-fraction-static", type=float)
    parser.add_argument("--kv-cache-dtype", default="auto")


def plan(config: FtConfig, args: argparse.Namespace, summary: ModelSummary) -> tuple[MemoryPlan, list[str]]:
    """The plan for this GPU, published for the scheduler process, and flags for SGLang.

    Raises MemoryBudgetError with all that does not fit.
    """
    text = checkpoint.text_config(checkpoint.read_config(summary.path))
    memory = shapes.describe(text, _KV_BYTES.get(args.kv_cache_dtype, 2.0))
    free = gpu.free_bytes()
    budget = parse_size(config.vram_budget) if config.vram_budget else 0
    machine = Machine(min(budget or free, free), 1 << 62)  # host memory was checked before
    wishes = Wishes(
        mode=config.moe_mode,
        slots=config.slots,
        context=args.context_length or 0,
        requests=args.max_running_requests or 0,
        chunk=max(args.chunked_prefill_size or 0, 0),
        kv_tokens=args.max_total_tokens or 0,
        states=config.anchor_states,
    )
    made = planner.plan(summary, memory, machine, wishes)
    if not made.fits:
        raise MemoryBudgetError(_words(made, machine, budget))
    sizes = {item.name: item.nbytes for item in made.items if item.where == "gpu"}
    total = made.total("gpu") - sizes.get(planner.RESERVE_ITEM, 0)
    dense = sizes.get(planner.DENSE_ITEM, 0)
    Allotment(made.experts, budget, total, dense, made.beside_experts(), memory.chunk_token).publish()
    return made, _flags(made, memory, args)


def render(made: MemoryPlan) -> str:
    """The lines of the plan that are about the GPU."""
    lines = [f"  GPU memory: {made.total('gpu') / planner.GIB:.2f} GiB"]
    lines += [f"  {line}" for line in planner.render_items(made, "gpu")]
    experts = made.experts
    lines.append(
        f"  {experts.mode}: {experts.slots:,} of {made.total_experts:,} experts in slots; prompts in chunks of "
        f"{made.chunk:,}, {made.kv_tokens:,} tokens of KV cache, up to {made.requests} requests at once"
    )
    return "\n".join(lines)


def _words(made: MemoryPlan, machine: Machine, budget: int) -> str:
    source = "--ft-vram-budget" if budget else "free on the GPU"
    problems = "; ".join(f"{problem.what} (mend: {problem.cure})" for problem in made.problems)
    return f"{machine.gpu_bytes / planner.GIB:.2f} GiB ({source}) are not enough: {problems}"


def _flags(made: MemoryPlan, memory: ModelMemory, args: argparse.Namespace) -> list[str]:
    total = gpu.found()[0].nbytes
    kept = {"KV cache", "recurrent states", planner.DENSE_ITEM, planner.CUDA_ITEM, "expert slots"}
    slack = sum(item.nbytes for item in made.items if item.where == "gpu" and item.name not in kept)
    fraction = 1 - _SLACK_SHARE * slack / total
    wanted = {
        "max_running_requests": made.requests,
        "chunked_prefill_size": made.chunk,
        "max_total_tokens": made.kv_tokens,
        "max_mamba_cache_size": made.states,
        "mem_fraction_static": round(min(max(fraction, 0.1), 0.98), 3),
    }
    flags: list[str] = []
    for name, value in wanted.items():
        if value and getattr(args, name) is None:
            flags += [f"--{name.replace('_', '-')}", str(value)]
    return flags
