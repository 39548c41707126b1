"""What a short turn does to the expert cache: misses and fills of its step, misses of decode steps before and after it.

    python benchmark/short_turns.py

The plan kernel's own logic, built for the host, on a synthetic trace of 40 x 256 experts, top 8, with slots for 37 % of
them and the split of the reference machine's times: once as ordinary steps, once as a prompt, whose fills are the first
to be evicted again. Counts only, so any machine will do. Writes benchmark/results/short_turns.json.
"""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
sys.path[:0] = [str(REPOSITORY / "benchmark"), str(REPOSITORY / "sgl-ft-kernel" / "tests")]

import plan_cases  # noqa: E402
import results_file  # noqa: E402
import torch  # noqa: E402

from sglang_ft import kernels  # noqa: E402
from sglang_ft.experts import policy  # noqa: E402
from sglang_ft.experts.traces import synthetic_trace  # noqa: E402
from sglang_ft.kernels import abi  # noqa: E402

LAYERS, EXPERTS, TOPK, SLOTS, LOCALITY = 40, 256, 8, 3789, 0.496
ROWS, TURNS, WARM, BEFORE, AFTER = 64, 3, 400, 60, (20, 40)
TIMES = policy.BranchTimes(5e-6, 121e-6, 8e-6, 115e-6, cpu_pair=12e-6)


class Cache:
    """The cache of a model and a trace that goes through it."""

    def __init__(self) -> None:
        case = plan_cases.Case(LAYERS, EXPERTS, SLOTS, TOPK, ROWS)
        self.state = plan_cases.State(case, "cpu")
        self.state.set_split(policy.balanced(EXPERTS, TIMES, intermediate=512))
        shape = policy.Layers(LAYERS, EXPERTS, TOPK, SLOTS / (LAYERS * EXPERTS))
        self.state.set_prompt_split(policy.prompt_split(EXPERTS, TIMES, shape, ROWS))
        steps = WARM + TURNS * (BEFORE + ROWS + sum(AFTER))
        trace = synthetic_trace(LAYERS, EXPERTS, TOPK, steps=steps, locality=LOCALITY, seed=1)
        self.rows = torch.from_numpy(trace.routes.astype("int32"))
        self.weights = torch.rand(ROWS, TOPK)
        self.at = 0

    def run(self, rows: int, transient: bool = False) -> dict[str, int]:
        """The next `rows` rows of the trace as one step of each layer; what was counted."""
        before = self.state.counters()
        struct = self.state.prompt_struct if rows > 1 else self.state.struct
        for layer in range(LAYERS):
            routes = self.rows[self.at : self.at + rows, layer].contiguous()
            work = self.state.work.data_ptr()
            step = abi.Step(routes.data_ptr(), self.weights.data_ptr(), work=work)
            step.rows, step.topk, step.row_dtype, step.transient = rows, TOPK, 1, transient
            there = self.state.layer(layer)
            kernels.host_library().ft_plan_on_host(
                ctypes.byref(struct), ctypes.byref(there), ctypes.byref(step)
            )
        self.at += rows
        return {name: count - before[name] for name, count in self.state.counters().items()}

    def miss_rate(self, steps: int) -> float:
        """Of decode steps."""
        counts = [self.run(1) for _ in range(steps)]
        misses = sum(one["misses"] for one in counts)
        return misses / (misses + sum(one["hits"] for one in counts))


def main() -> None:
    metrics: dict[str, float] = {"slots": SLOTS, "rows": ROWS, "turns": TURNS}
    for name, transient in (("ordinary", False), ("prompt", True)):
        cache = Cache()
        cache.miss_rate(WARM)
        for turn in range(1, TURNS + 1):
            own = f"{name}_turn{turn}"
            metrics[f"{own}_miss_rate_before"] = cache.miss_rate(BEFORE)
            counts = cache.run(ROWS, transient)
            metrics |= {f"{own}_{field}": counts[field] for field in ("misses", "fills")}
            for steps in AFTER:
                metrics[f"{own}_miss_rate_next{steps}"] = cache.miss_rate(steps)
    results_file.write(results_file.RESULTS / "short_turns.json", "short_turns", metrics)
    for key, value in metrics.items():
        print(f"{key:<36}{value:12.4f}")


if __name__ == "__main__":
    main()
