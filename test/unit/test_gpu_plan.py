"""What the experts get of a GPU's memory: mode, slots and prefill's buffers, and what is refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_ft.errors import MemoryBudgetError
from sglang_ft.experts.formats import LayerSpec, find_format
from sglang_ft.memory.planner import GpuPlan, divide

GIB = 1 << 30
LAYERS = 40
SPEC = LayerSpec(find_format(None, "bfloat16"), 256, 2048, 512)  # an expert of 6 MiB, all of them 60 GiB
EVERYTHING = LAYERS * 256


def plan(mode: str, slots: int, available: float) -> GpuPlan:
    return divide(mode, slots, SPEC.expert_bytes, SPEC.num_experts, LAYERS, int(available * GIB))


def test_sizes_that_the_cases_below_count_with():
    assert SPEC.expert_bytes * EVERYTHING == 60 * GIB


@pytest.mark.parametrize(
    "mode, slots, available, want",
    [
        ("auto", 0, 75, GpuPlan("resident", EVERYTHING)),  # a fifth is left for the KV cache
        ("auto", 0, 74.9, GpuPlan("hybrid", int(74.9 * 0.8 * 1024 // 6), 256)),
        ("resident", 0, 60, GpuPlan("resident", EVERYTHING)),
        ("cpu", 0, 1000, GpuPlan("cpu", 0)),
        ("hybrid", 0, 20, GpuPlan("hybrid", 16 * 1024 // 6, 256)),
        ("cache", 0, 20, GpuPlan("cache", 16 * 1024 // 6, 256)),
        ("cache", 0, 1000, GpuPlan("cache", EVERYTHING, 256)),
        (
            "auto",
            0,
            6,
            GpuPlan("hybrid", int(4.8 * 1024) // 6, 64),
        ),  # buffers take a quarter of the slots at most
        ("auto", 0, 1.5, GpuPlan("hybrid", 512 // 6, 8)),  # the KV cache gets 1 GiB at least
        ("auto", 0, 1, GpuPlan("cpu", 0)),
        ("auto", 0, -3, GpuPlan("cpu", 0)),
        ("auto", 100, 1000, GpuPlan("hybrid", 100, 8)),
        ("auto", 35, 1000, GpuPlan("hybrid", 35, 8)),  # half of them, where they are few
        ("auto", 31, 1000, GpuPlan("hybrid", 31, 0)),
        ("hybrid", 2048, 12, GpuPlan("hybrid", 2048, 256)),
        ("cache", 2047, 12, GpuPlan("cache", 2047, 128)),
        ("auto", 20_000, 1000, GpuPlan("hybrid", EVERYTHING, 256)),
    ],
)
def test_modes_slots_and_buffers(mode, slots, available, want):
    assert plan(mode, slots, available) == want


def test_resident_experts_that_do_not_fit_are_refused():
    with pytest.raises(
        MemoryBudgetError,
        match=r"^--ft-moe-mode resident: all experts need 60\.00 GiB of GPU memory, 59\.90 GiB are available; "
        r"leave the flag out to cache a part of them$",
    ):
        plan("resident", 0, 59.9)


@pytest.mark.parametrize("mode", ["auto", "hybrid", "cache"])
def test_slots_that_do_not_fit_are_refused(mode):
    with pytest.raises(
        MemoryBudgetError,
        match=r"^--ft-slots 1024 need 6\.00 GiB of GPU memory, 5\.90 GiB are available$",
    ):
        plan(mode, 1024, 5.9)


@given(
    st.sampled_from(["auto", "hybrid", "cache"]),
    st.integers(1, 64),
    st.sampled_from([(8, 128, 64), (256, 2048, 512), (128, 4096, 1536), (8, 4096, 14336)]),
    st.integers(0, 200 * GIB),
)
def test_what_we_choose_leaves_room_for_the_kv_cache(mode, layers, shape, available):
    spec = LayerSpec(SPEC.format, *shape)
    got = divide(mode, 0, spec.expert_bytes, spec.num_experts, layers, available)
    assert got.slots * spec.expert_bytes <= max(0, available - max(GIB, available // 5))
    assert got.slots <= layers * spec.num_experts
    assert (got.slots == 0) == (got.mode == "cpu")
    assert mode in ("auto", got.mode) or got.mode == "cpu"
    assert got.group <= spec.num_experts and 4 * got.group <= got.slots
