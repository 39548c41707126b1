"""What the engine does with the experts of a GPU's server, on a device that is the host: every way a pass can go."""

from __future__ import annotations

import random
from types import SimpleNamespace

import gpu_stack
import host_device
import pytest
import torch
from gpu_stack import GpuStack
from sglang.srt.layers.moe.token_dispatcher.standard import StandardDispatchOutput
from sglang.srt.layers.moe.topk import StandardTopKOutput

from sglang_ft import kernels
from sglang_ft.calibration import measure, store
from sglang_ft.config import FtConfig
from sglang_ft.engine import gpu_experts
from sglang_ft.engine.allocation import Allotment
from sglang_ft.engine.gpu_experts import GpuExperts
from sglang_ft.errors import FtError
from sglang_ft.experts import policy
from sglang_ft.experts.formats import LayerSpec, find_format
from sglang_ft.experts.reference import moe_layer
from sglang_ft.memory import planner
from sglang_ft.memory.planner import GpuPlan

GIB = 1 << 30
SPEC = LayerSpec(find_format(None, "bfloat16"), 16, 64, 64)
LAYERS, TOPK = 4, 2
EVERYTHING = LAYERS * SPEC.num_experts
TIMES = policy.BranchTimes(5e-6, 120e-6, 8e-6, 110e-6, 8, 12e-6)
TOLERANCE = 1.5e-2


class Stock:
    """SGLang's own method on what the layer's parameters hold; routes of -1 are left out."""

    def apply(self, layer, dispatch_output):
        topk = dispatch_output.topk_output
        names = SPEC.format.parameters
        banks = {role: layer.get_parameter(names[role]) for role in SPEC.format.roles(SPEC)}
        count = len(next(iter(banks.values())))
        assert int(topk.topk_ids.max()) < count
        out = moe_layer(dispatch_output.hidden_states, topk.topk_ids.long(), topk.topk_weights, SPEC, banks)
        return SimpleNamespace(hidden_states=out.to(torch.bfloat16))


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for role, one in SPEC.format.roles(SPEC).items():
            empty = torch.empty(0, *one.shape, dtype=one.dtype)
            self.register_parameter(SPEC.format.parameters[role], torch.nn.Parameter(empty, False))
        self.moe_runner_config = SimpleNamespace(num_experts=SPEC.num_experts)


class Running:
    """The experts of a server and passes through them."""

    def __init__(self, host, plan: GpuPlan, config: FtConfig | None = None, allotment=None) -> None:
        self.host = host
        self.stack = GpuStack([SPEC] * LAYERS, 0, TOPK, threads=1, rows=512)
        args = (self.stack.pool, self.stack.worker, TOPK, plan, 1, config or FtConfig(), allotment)
        self.experts = GpuExperts(*args)
        self.layers = [Layer() for _ in range(LAYERS)]

    def step(self, rows: int, prompt: bool, more: bool = False) -> None:
        """One forward pass; every layer's sum must be the reference's."""
        self.experts.more_prompt = more
        self.experts.before_forward(rows, prompt)
        for index, layer in enumerate(self.layers):
            self.layer(index, layer, rows)
        self.experts.after_forward(rows)
        assert self.experts.failure_of(self.experts.passes) is None

    def layer(self, index: int, layer: Layer, rows: int) -> None:
        x, routes, weights = self.stack.inputs(rows, index)
        topk = StandardTopKOutput(weights, routes, weights)
        got = self.experts.run(index, layer, Stock(), StandardDispatchOutput(x, None, topk))
        want = self.stack.reference(index, x, routes, weights)
        assert gpu_stack.relative_error(got, want) < TOLERANCE, (index, rows)

    def check_slots(self) -> None:
        tables = self.experts.cache.state.tables()
        for slot in range(tables.live):
            expert = int(tables.expert_of[slot])
            if expert >= 0:
                for role, view in self.experts.cache.slot_views(slot, 1).items():
                    bank = self.stack.pool.banks(expert // SPEC.num_experts)[role][expert % SPEC.num_experts]
                    assert torch.equal(view[0], bank)


@pytest.fixture
def start(monkeypatch, tmp_path):
    try:
        kernels.host_library()
    except kernels.KernelError as e:
        pytest.skip(str(e))
    host = host_device.install(monkeypatch, gpu_stack, gpu_experts, measure)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(store, "machine_key", lambda *args: "the host")
    monkeypatch.setattr(measure, "measure", lambda cache, worker: TIMES)
    running: list[Running] = []

    def start(*args, **kwargs) -> Running:
        running.append(Running(host, *args, **kwargs))
        return running[-1]

    yield start
    for one in running:
        one.experts.cache.close()
        one.stack.close()


@pytest.mark.parametrize("mode", ["hybrid", "cache"])
@pytest.mark.parametrize("slots, group", [(6, 0), (40, 4), (40, 16), (EVERYTHING, 16)])
def test_passes_of_every_kind_in_any_order(start, mode, slots, group):
    one = start(GpuPlan(mode, slots, group))
    for _ in range(14):
        kind = random.choice(["decode", "short", "long", "chunks"])
        one.experts._wanted_path = random.choice([None, "slots", "stream", "worker"])
        if kind == "decode":
            for _ in range(random.randrange(1, 6)):
                one.step(random.choice([1, 3]), prompt=False)
        elif kind == "short":
            one.step(random.randrange(1, 60), prompt=True)
        elif kind == "long":
            one.step(random.randrange(257, 300), prompt=True)
        else:
            for chunk in range(3):
                one.step(random.choice([80, 300]), prompt=True, more=chunk < 2)
                if random.random() < 0.5:
                    one.step(1, prompt=False, more=chunk < 2)
    one.step(1, prompt=False)
    assert one.experts.cache.live == slots
    one.check_slots()
    prompts = one.experts.prompts
    prompts.begin("slots", 0, 0.0)
    assert sum(sums["seconds"] for sums in prompts.sums.values()) > 0


@pytest.mark.parametrize("mode", ["resident", "cpu"])
def test_modes_without_a_choice(start, mode):
    one = start(GpuPlan(mode, EVERYTHING if mode == "resident" else 0))
    for rows, prompt in ((1, False), (5, True), (100, True), (300, True), (3, False)):
        one.step(rows, prompt)


def test_a_long_prompt_lends_slots_and_returns_them(start):
    one = start(GpuPlan("cache", 40, 8))
    for _ in range(40):
        one.step(1, prompt=False)
    one.experts._wanted_path = "stream"
    one.step(300, prompt=True, more=True)
    assert one.experts.cache.live == 24 and one.experts.stream.active
    one.step(1, prompt=False, more=True)
    assert one.experts.cache.live == 24, "the prompt goes on"
    one.step(300, prompt=True)
    one.step(1, prompt=False)
    assert one.experts.cache.live == 40 and not one.experts.stream.active
    assert one.experts.stream.bytes < 2 * EVERYTHING * SPEC.expert_bytes, (
        "what was cached did not cross the link"
    )


def test_slots_are_given_back_and_the_next_pass_runs(start):
    one = start(GpuPlan("hybrid", 40, 8))
    for _ in range(30):
        one.step(1, prompt=False)
    one.experts._wanted_path = "stream"
    one.step(300, prompt=True, more=True)
    copied = one.experts.stream.bytes
    given = one.experts.give_memory(10 * SPEC.expert_bytes)
    assert one.experts.stream.bytes == copied > 0
    assert given == 10 * SPEC.expert_bytes and one.experts.cache.slots.slots == 30
    one.step(300, prompt=True)
    one.step(2, prompt=False)
    one.check_slots()
    assert one.experts.give_memory(1000 * GIB) == 30 * SPEC.expert_bytes
    one.experts._wanted_path = None
    for rows, prompt in ((1, False), (40, True), (300, True)):
        one.step(rows, prompt)
    assert one.experts.give_memory(1) == 0


def test_a_pass_that_failed_half_way_begins_again_on_fewer_slots(start):
    one = start(GpuPlan("hybrid", 40, 8))
    one.experts._wanted_path = "stream"
    one.experts.before_forward(300, True)
    for index in range(2):
        one.layer(index, one.layers[index], 300)
    one.experts.give_memory(8 * SPEC.expert_bytes)
    one.experts.begin_again(300)
    for index, layer in enumerate(one.layers):
        one.layer(index, layer, 300)
    one.experts.after_forward(300)
    for _ in range(5):
        one.step(1, prompt=False)
    assert one.experts.cache.live == 32
    one.check_slots()


def test_resident_experts_are_not_given_back(start):
    assert start(GpuPlan("resident", EVERYTHING)).experts.give_memory(GIB) == 0


def allotment(**fields) -> Allotment:
    base = {"experts": GpuPlan("hybrid", 40, 8), "budget": 0, "total": 0, "dense": 0, "beside": 0}
    return Allotment(**base | {"chunk_token": 1 << 20} | fields)


def test_slots_go_before_a_pass_that_would_not_find_room(start):
    one = start(GpuPlan("hybrid", 40, 8), allotment=allotment(chunk_token=SPEC.expert_bytes))
    one.host.cuda.free = 588 * SPEC.expert_bytes
    one.step(300, prompt=True)
    assert one.experts.cache.slots.slots == 40, "small passes find room"
    one.experts.before_forward(600, True)
    assert one.experts.cache.slots.slots == 28


def test_what_was_planned_is_allocated_or_less(start):
    one = start(GpuPlan("hybrid", 40, 8))
    shape = (SPEC.expert_bytes, SPEC.num_experts, LAYERS)
    cuda = one.host.cuda

    def settle(**fields) -> GpuPlan:
        return gpu_experts.settle(allotment(**fields), "auto", 0, shape)

    cuda.free = 100 * SPEC.expert_bytes
    assert settle(beside=60 * SPEC.expert_bytes) == GpuPlan("hybrid", 40, 8)
    assert settle(beside=80 * SPEC.expert_bytes) == GpuPlan("hybrid", 20, planner.buffer_group(20, 16))
    assert settle(beside=101 * SPEC.expert_bytes) == GpuPlan("cpu", 0)
    cuda.free, cuda.allocated = 10 * GIB, 1 * GIB
    budget = 1 * GIB + planner.CUDA_BYTES + 50 * SPEC.expert_bytes
    assert settle(budget=budget, beside=10 * SPEC.expert_bytes).slots == 40
    assert settle(budget=budget, beside=20 * SPEC.expert_bytes).slots == 30


def test_settings_that_can_change(start):
    one = start(GpuPlan("hybrid", 40, 8), allotment=allotment(total=7, dense=3))
    state = one.experts.change(
        {"moe_mode": "cpu", "prompt_path": "slots", "stream_ahead": False, "reset": True}
    )
    assert (state["moe_mode"], state["slots"], state["experts"]) == ("cpu", 40, EVERYTHING)
    assert state["split"] == [[0, 0]] * (TOPK + 1) and not one.experts.stream.ahead
    assert state["memory"] == {"used_bytes": 0, "planned_bytes": 4}
    one.step(20, prompt=True)
    assert one.experts.change({})["prompts"]["slots"]["passes"] == 1
    for wrong in ({"prompt_path": "no"}, {"moe_mode": "resident"}, {"nothing": 1}):
        with pytest.raises(FtError):
            one.experts.change(wrong)
    one.experts.give_memory(1000 * GIB)
    with pytest.raises(FtError, match="no slots are left"):
        one.experts.change({"prompt_path": "stream"})
