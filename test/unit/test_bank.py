"""Banks: offsets, expert ids and the memory that they lie in."""

from __future__ import annotations

import dataclasses
import mmap
import os

import pytest
import torch

from sglang_ft.experts.bank import BANK_ALIGN, ExpertPool, plan_banks
from sglang_ft.experts.formats import FORMATS, LayerSpec, find_format
from sglang_ft.worker.protocol import Role

BF16 = find_format(None, "bfloat16")
SMALL = LayerSpec(BF16, num_experts=4, hidden=24, intermediate=10)


def test_layers_of_one_shape_share_banks_and_count_experts_through():
    plan = plan_banks([SMALL, dataclasses.replace(SMALL, hidden=40), SMALL])
    assert [layer.first_expert_id for layer in plan.layers] == [0, 4, 8]
    first, _, third = (layer.roles[Role.DOWN] for layer in plan.layers)
    assert third.offset - first.offset == 4 * first.stride, "rows of one bank follow each other"


def test_no_two_roles_overlap_and_all_lie_inside_the_pool():
    specs = [SMALL, dataclasses.replace(SMALL, bias=True), dataclasses.replace(SMALL, gated=False)]
    plan = plan_banks(specs)
    spans = []
    for layer in plan.layers:
        for view in layer.roles.values():
            spans.append((view.offset, view.offset + layer.spec.num_experts * view.stride))
    spans.sort()
    assert all(a[1] <= b[0] for a, b in zip(spans, spans[1:], strict=False))
    assert spans[-1][1] <= plan.nbytes
    assert plan.nbytes % BANK_ALIGN == 0


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda f: f.name)
def test_an_expert_has_the_bytes_of_its_roles(fmt):
    spec = LayerSpec(fmt, num_experts=2, hidden=64, intermediate=32, bias=True)
    weights = (2 * 32 * 64 + 64 * 32) * fmt.dtype.itemsize
    assert spec.expert_bytes == weights + (2 * 32 + 64) * 4


def test_views_of_the_pool_share_its_memory():
    pool = ExpertPool(plan_banks([SMALL]))
    pool.bank(0, Role.DOWN)[2] = 1.5
    view = pool.plan.layers[0].roles[Role.DOWN]
    raw = os.pread(pool.file.fd, view.stride, view.offset + 2 * view.stride)
    assert torch.frombuffer(bytearray(raw), dtype=torch.bfloat16).eq(1.5).all()


def test_a_sealed_pool_cannot_be_mapped_writable_by_anyone_else():
    pool = ExpertPool(plan_banks([SMALL]))
    pool.seal()
    pool.bank(0, Role.DOWN).fill_(2)  # the owner's mapping lives on
    with pytest.raises(PermissionError):
        mmap.mmap(pool.file.fd, pool.file.size, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
    mmap.mmap(pool.file.fd, pool.file.size, mmap.MAP_SHARED, mmap.PROT_READ)


def test_unknown_weights_have_no_format():
    assert find_format("Fp8MoEMethod", "bfloat16") is None
    assert find_format(None, "float64") is None
