"""A tour, part two: one MoE layer in the cpu_worker process, against the readable reference."""

import torch

from sglang_ft.experts.bank import ExpertPool, plan_banks
from sglang_ft.experts.formats import LayerSpec
from sglang_ft.experts.formats.bf16 import BF16
from sglang_ft.experts.reference import moe_layer
from sglang_ft.worker.ring import Ring, RingSize
from sglang_ft.worker.supervisor import Supervisor, WorkerOptions
from sglang_ft.worker.topology import choose_cores

E, K, H, INTERMEDIATE, T = 16, 4, 128, 64, 5


def test_one_layer_in_the_worker():
    torch.manual_seed(0)
    # The pool: a memory file with all experts, filled here, read by the worker. Nobody holds a second copy.
    spec = LayerSpec(BF16(), num_experts=E, hidden=H, intermediate=INTERMEDIATE)
    pool = ExpertPool(plan_banks([spec]))
    for bank in pool.banks(0).values():
        bank.copy_(torch.randn(bank.shape) * H**-0.5)
    pool.seal()

    # The ring: jobs go out, partial sums come back.
    ring = Ring(RingSize(blocks=2, rows=8, topk=K, hidden=H), pool.file.size, spin_ns=0)
    ring.write_layers(pool.plan)
    worker = Supervisor(ring, pool, WorkerOptions(tuple(choose_cores(1, ""))))
    worker.start()
    try:
        # T token rows, K routed experts each, router weights that sum to one.
        rows = torch.randn(T, H).bfloat16()
        weights, experts = torch.randn(T, E).softmax(-1).topk(K)
        weights /= weights.sum(-1, keepdim=True)
        got = worker.run(0, rows, experts, weights)
    finally:
        worker.stop()

    want = moe_layer(rows, experts, weights, spec, pool.banks(0))
    assert (got - want).norm() / want.norm() < 0.01
    assert ring.header.stats.jobs == 1
