"""Every kernel a few times on small experts, for tools that make kernels thousands of times slower.

    compute-sanitizer --tool memcheck python test/gpu/kernels_once.py      (also racecheck, synccheck, initcheck)

Sums are compared with the reference all the same.
"""

from __future__ import annotations

import sys
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
sys.path[:0] = [str(REPOSITORY / "test" / "gpu"), str(REPOSITORY / "python")]

import torch  # noqa: E402
from gpu_stack import GpuStack, relative_error  # noqa: E402

from sglang_ft.experts.formats import LayerSpec, find_format  # noqa: E402
from sglang_ft.experts.prefill import CudaLanes, ExpertStream  # noqa: E402
from sglang_ft.experts.step import Split  # noqa: E402

SPLITS = {
    "fills": [Split(m) for m in range(17)],
    "shared": [Split(0), *(Split(max(1, m // 2), 64) for m in range(1, 17))],
    "worker": [Split(0)] * 17,
}
TOLERANCE = {"bfloat16": 1.5e-2, "float16": 3e-3}


def run(dtype: str, **options: bool) -> float:
    """Steps, a stream and a smaller cache; the largest relative error of a sum."""
    spec = LayerSpec(find_format(None, dtype), 16, 64, 128, **options)
    stack = GpuStack([spec] * 2, slots=12, topk=2, threads=1, rows=64)
    worst = 0.0
    try:
        for split in SPLITS.values():
            stack.cache.state.set_split(split)
            stack.cache.set_prompt_split(split)
            for rows, prompt in ((1, False), (5, False), (20, True)):
                for layer in range(2):
                    x, routes, weights = stack.inputs(rows, layer)
                    stack.worker.wake()
                    got = stack.cache.step(layer, x, routes, weights, prompt=prompt)
                    worst = max(worst, relative_error(got, stack.reference(layer, x, routes, weights)))
        stream = ExpertStream(stack.cache, 4, CudaLanes(stack.cache.device))
        stream.begin()
        for layer in range(2):
            for first in stream.firsts():
                group = stream.acquire(layer, first)
                for role, copy in group.experts.items():
                    bank = stack.pool.banks(layer)[role][first : first + group.count]
                    assert torch.equal(copy.cpu(), bank), (layer, first, role)
                stream.release(layer, group, torch.zeros(1, 1, dtype=torch.int32, device="cuda"), more=False)
        stream.end()
        worst = max(worst, stack.error(1, 3))
    finally:
        stack.close()
    return worst


def main() -> None:
    for dtype, options in (("bfloat16", {}), ("float16", {}), ("bfloat16", {"bias": True})):
        worst = run(dtype, **options)
        print(f"{dtype} {options}: relative error {worst:.1e}", flush=True)
        assert worst < TOLERANCE[dtype]


if __name__ == "__main__":
    main()
