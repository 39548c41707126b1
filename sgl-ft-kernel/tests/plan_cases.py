"""Random and adversarial steps for the plan, and the comparison with experts/step.py; for the host and the GPU."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from sglang_ft.experts.cache_state import CacheState
from sglang_ft.experts.compact import keep_latest
from sglang_ft.experts.step import NONE, Split, StepCache, StepPlan
from sglang_ft.kernels import abi

FEATURES = 256
HIDDEN = 64


@dataclass(frozen=True)
class Case:
    """A cache and the kind of routes that it meets."""

    layers: int
    experts: int
    slots: int
    topk: int
    most_rows: int
    split: str = "all"
    steps: int = 200
    kind: str = "skewed"
    uncached: int = 0  # the last so many layers are not cacheable
    transient: float = 0.0  # share of the steps, in runs of one round of the layers each
    resizes: float = 0.0  # share of the steps before which the number of slots changes

    def cacheable(self, layer: int) -> bool:
        return layer < self.layers - self.uncached

    def splits(self) -> list[Split]:
        """What is done with m misses, for m up to the most."""
        most = abi.MAX_EXPERTS + 1
        if self.split == "all":
            return [Split(m) for m in range(most)]
        if self.split == "none":
            return [Split(0) for m in range(most)]
        if self.split == "half":
            return [Split((m + 1) // 2) for m in range(most)]
        return [Split((m + 1) // 2, 64 * (1 + m % 3) if m else 0) for m in range(most)]


CASES = [
    Case(layers=3, experts=16, slots=20, topk=4, most_rows=1),
    Case(layers=3, experts=16, slots=48, topk=4, most_rows=3),
    Case(layers=4, experts=32, slots=40, topk=8, most_rows=8, split="half"),
    Case(layers=4, experts=32, slots=40, topk=8, most_rows=8, split="shared"),
    Case(layers=2, experts=64, slots=1, topk=8, most_rows=4, split="all"),
    Case(layers=2, experts=64, slots=7, topk=8, most_rows=4, split="shared"),
    Case(layers=2, experts=64, slots=0, topk=8, most_rows=4, split="all"),
    Case(layers=2, experts=64, slots=30, topk=8, most_rows=4, split="none"),
    Case(layers=40, experts=256, slots=3789, topk=8, most_rows=1, split="half", steps=1500),
    Case(layers=8, experts=256, slots=900, topk=8, most_rows=32, split="shared", steps=300),
    Case(layers=2, experts=1024, slots=1500, topk=16, most_rows=64, split="half", steps=60),
    Case(layers=1, experts=8, slots=8, topk=8, most_rows=2, steps=50),
    Case(layers=3, experts=128, slots=200, topk=4, most_rows=16, kind="uniform"),
    Case(layers=3, experts=128, slots=200, topk=4, most_rows=16, kind="same", split="half"),
    Case(layers=3, experts=128, slots=130, topk=4, most_rows=16, kind="cyclic", split="all"),
    Case(layers=3, experts=128, slots=200, topk=4, most_rows=16, kind="dirty", split="shared"),
    Case(layers=4, experts=32, slots=60, topk=4, most_rows=4, split="shared", uncached=2),
    Case(layers=4, experts=64, slots=120, topk=4, most_rows=16, split="half", transient=0.5, steps=400),
    Case(layers=4, experts=64, slots=20, topk=4, most_rows=16, split="all", transient=0.7, steps=400),
    Case(layers=3, experts=128, slots=300, topk=8, most_rows=64, split="shared", transient=1.0),
    Case(layers=8, experts=256, slots=900, topk=8, most_rows=64, split="half", transient=0.3, steps=300),
    Case(layers=2, experts=64, slots=1, topk=8, most_rows=4, split="all", transient=0.5),
    Case(layers=4, experts=64, slots=120, topk=4, most_rows=4, split="half", resizes=0.05, steps=400),
    Case(layers=4, experts=64, slots=200, topk=4, most_rows=8, resizes=0.1, transient=0.3, steps=400),
]


def routes(case: Case, rng: random.Random) -> Iterator[tuple[int, torch.Tensor, int | None]]:
    """(layer, routes [T, k], valid rows or None) of each step."""
    weights = [[rng.paretovariate(1.0) for _ in range(case.experts)] for _ in range(case.layers)]
    for step in range(case.steps):
        layer = step % case.layers
        rows = rng.randint(1, case.most_rows)
        table = [_row(case, rng, weights[layer], step) for _ in range(rows)]
        if case.kind == "same":
            table = [table[0]] * rows
        valid = rng.randint(0, rows) if case.kind == "dirty" and rng.random() < 0.5 else None
        yield layer, torch.tensor(table, dtype=torch.int32), valid


def _row(case: Case, rng: random.Random, weights: list[float], step: int) -> list[int]:
    if case.kind == "cyclic":  # LRU's worst case
        return [(step * case.topk + i) % case.experts for i in range(case.topk)]
    if case.kind in ("uniform", "same"):
        return rng.sample(range(case.experts), case.topk)
    row: list[int] = []
    while len(row) < case.topk:
        (expert,) = rng.choices(range(case.experts), weights=weights)
        if expert not in row or len(row) > case.experts // 2:
            row.append(expert)
    if case.kind == "dirty":  # padding, experts of another rank, garbage
        row = [rng.choice([-1, case.experts, -5, 2**31 - 1]) if rng.random() < 0.2 else e for e in row]
    return row


class State(CacheState):
    """The state of a case's cache on `device`, and room for the work of a step."""

    def __init__(self, case: Case, device: str) -> None:
        super().__init__(case.layers * case.experts, case.slots, device)
        self.case = case
        self.reset(case.slots)
        self.set_split(case.splits())
        self.work = torch.zeros(ctypes.sizeof(abi.Work), dtype=torch.uint8, device=device)

    def layer(self, index: int) -> abi.Layer:
        case = self.case
        layer = abi.Layer(index, index * case.experts, case.experts, HIDDEN, FEATURES)
        layer.role[0].stride, layer.role[1].stride = 1000, 24
        layer.uncached = not case.cacheable(index)
        return layer

    def read_work(self) -> abi.Work:
        return abi.Work.from_buffer_copy(bytes(self.work.cpu().numpy()))


Plan = Callable[[abi.Cache, abi.Layer, abi.Step], None]


def run(case: Case, seed: int, device: str, plan: Plan) -> StepCache:
    """Takes all steps of a case through `plan` and the reference; every step must agree in everything."""
    rng = random.Random(seed)
    reference = StepCache(case.layers * case.experts, case.slots)
    state = State(case, device)
    weights = torch.rand(case.most_rows, case.topk, device=device)
    transient = False
    for number, (layer, table, valid) in enumerate(routes(case, rng)):
        there = table.to(device)
        num_valid = torch.tensor([valid or 0], dtype=torch.int32, device=device)
        step = abi.Step(routes=there.data_ptr(), weights=weights.data_ptr(), work=state.work.data_ptr())
        step.num_valid = num_valid.data_ptr() if valid is not None else None
        step.rows, step.topk, step.row_dtype = table.shape[0], case.topk, 1
        if layer == 0:
            transient = rng.random() < case.transient
        if rng.random() < case.resizes:
            resize(state, reference, rng.randint(0, case.slots))
        step.transient = transient
        plan(state.struct, state.layer(layer), step)
        first = layer * case.experts
        cacheable = case.cacheable(layer)
        wanted = reference.step(table, first, case.experts, case.splits(), valid, cacheable, transient)
        compare(state, wanted, table, f"{case} seed {seed} step {number}")
    compare_state(state, reference, f"{case} seed {seed}")
    return reference


def resize(state: State, reference: StepCache, live: int) -> None:
    """Changes the number of slots of both."""
    before = reference.live_slots
    if live > before:
        state.grow(before, live)
    else:
        tables = state.tables()
        state.shrink(keep_latest(*tables, live), live)
        tables = state.tables()
        reference.slot_of = [v & 0xFFFFFFFF for v in tables.slot_of.tolist()]
        reference.expert_of = [v & 0xFFFFFFFF for v in tables.expert_of.tolist()]
        reference.used = [v & 0xFFFFFFFF for v in tables.used.tolist()]
    reference.expert_of = reference.expert_of[:live] + [NONE] * (live - before)
    reference.used = reference.used[:live] + [0] * (live - before)
    reference.live_slots = live


def compare(state: State, wanted: StepPlan, table: torch.Tensor, where: str) -> None:
    work = state.read_work()
    runs = [(r.expert, r.slot) for r in work.runs[: work.hits + work.fills]]
    assert runs == [*wanted.hits, *wanted.fills], where
    assert (work.hits, work.fills) == (len(wanted.hits), len(wanted.fills)), where
    assert (work.job_experts, work.features) == (len(wanted.job), wanted.features), where
    assert list(work.slots[: table.numel()]) == wanted.slots.flatten().tolist(), where
    assert list(work.job_routes[: table.numel()]) == wanted.job_routes.flatten().tolist(), where
    flat, slots, at = table.flatten().tolist(), wanted.slots.flatten().tolist(), 0
    for i, run in enumerate(work.runs[: work.hits + work.fills]):
        pairs = list(work.pairs[run.first_pair : run.first_pair + run.rows])
        assert run.first_pair == at, where
        at += run.rows
        assert pairs == [p for p, e in enumerate(flat) if e == run.expert and slots[p] >= 0], where
        shared = wanted.features and i == work.hits + work.fills - 1
        assert run.features == (wanted.features if shared else FEATURES), where


def compare_state(state: State, reference: StepCache, where: str) -> None:
    def signed(values: list[int]) -> list[int]:
        return [v - 2**32 if v >= 2**31 else v for v in values]

    slots = reference.live_slots
    assert state.slot_of.tolist() == signed(reference.slot_of), where
    assert state.expert_of.tolist()[:slots] == signed(reference.expert_of), where
    assert state.seen.tolist() == signed(reference.seen), where
    assert state.used.tolist()[:slots] == signed(reference.used), where
    assert state.reference_counters() == reference.counters, where
    control = state.control()
    assert control.free_slots == reference.expert_of.count(NONE), where
    assert control.step == reference.step_number, where
