"""Replay of traces: equal to the cache step itself, and policies that are what they are called."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_ft.errors import TraceError
from sglang_ft.experts.policy import BranchTimes, balanced, cpu_only, fills_only
from sglang_ft.experts.replay import (
    LFU,
    POLICIES,
    ReplayCache,
    layer_steps,
    num_expert_ids,
    replay,
    replay_reference,
)
from sglang_ft.experts.step import Split, StepCache
from sglang_ft.experts.traces import Trace, TraceHeader, synthetic_trace

SPLITS = {
    "all": fills_only(64),
    "none while full": cpu_only(64),
    "half": balanced(64, BranchTimes(0, 1, 0, 1), intermediate=512, share=False),
    "shared": balanced(64, BranchTimes(0.1, 1, 0.2, 0.7), intermediate=512),
    "last entry for all beyond": [Split(0), Split(1, 64), Split(2, 128)],
}


def trace_of(steps, num_experts, num_layers=1):
    """A trace from lists of one row's experts a step, all of one length."""
    routes = np.array(steps, np.int16).reshape(len(steps), num_layers, -1)
    header = TraceHeader(num_layers, num_experts, routes.shape[2])
    return Trace(header, routes, np.arange(len(steps) + 1))


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("sequences", [1, 3])
@pytest.mark.parametrize("slots", [1, 4, 12, 20, 47, 48])
def test_the_fast_replay_counts_what_the_reference_counts(slots, sequences, split):
    trace = synthetic_trace(3, 16, 4, steps=120, locality=0.5, seed=slots, sequences=sequences)
    fast, slow = replay(trace, slots, "lru", SPLITS[split]), replay_reference(trace, slots, SPLITS[split])
    assert fast.counters == slow.counters
    assert fast.distribution == slow.distribution


@st.composite
def traces(draw):
    num_layers, num_experts = draw(st.integers(1, 3)), draw(st.integers(1, 9))
    rows = draw(st.lists(st.integers(0, 4), min_size=1, max_size=30))
    routes = draw(
        st.lists(
            st.lists(st.integers(-1, num_experts - 1), min_size=num_layers * 3, max_size=num_layers * 3),
            min_size=sum(rows),
            max_size=sum(rows),
        )
    )
    values = np.array(routes, np.int16).reshape(sum(rows), num_layers, 3)
    return Trace(TraceHeader(num_layers, num_experts, 3), values, np.cumsum([0, *rows]))


@settings(max_examples=150, deadline=None)
@given(trace=traces(), slots=st.integers(1, 20), split=st.sampled_from(sorted(SPLITS)))
def test_both_caches_hold_the_same_experts_in_the_same_slots_after_every_step(trace, slots, split):
    """Repeated and missing routes, rows that differ from step to step, pools smaller than one step."""
    num_experts = trace.header.num_experts
    slow = StepCache(num_expert_ids(trace), slots)
    fast = ReplayCache(num_expert_ids(trace), slots, POLICIES["lru"](trace))
    routes = (step[:, layer] for step in trace for layer in range(trace.header.num_layers))
    for rows, (first, rows_of) in zip(routes, layer_steps(trace), strict=True):
        slow.step(torch.from_numpy(rows.copy()), first, num_experts, SPLITS[split])
        fast.step(rows_of, first, SPLITS[split])
        assert fast.slot_of == slow.slot_of
        assert fast.counters == slow.counters


def test_a_full_pool_misses_every_expert_once():
    trace = synthetic_trace(2, 8, 2, steps=100, locality=0.3, seed=1)
    for policy in POLICIES:
        counters = replay(trace, 16, policy).counters
        assert (counters.misses, counters.evictions) == (len(set(_expert_ids(trace))), 0)


def _expert_ids(trace):
    return [first + expert for first, rows_of in layer_steps(trace) for expert in rows_of]


def test_warm_up_is_not_counted():
    trace = synthetic_trace(2, 8, 2, steps=100, locality=0.3, seed=1)
    whole, rest = replay(trace, 9), replay(trace, 9, warmup=40)
    assert rest.counters.steps == whole.counters.steps - 2 * 40 == sum(rest.distribution)
    head = Trace(trace.header, trace.routes[:40], trace.starts[:41])
    assert rest.counters.misses == whole.counters.misses - replay(head, 9).counters.misses


def test_the_distribution_adds_up_to_all_misses():
    result = replay(synthetic_trace(2, 16, 4, steps=100, locality=0.3, seed=1, sequences=2), 12)
    assert sum(m * count for m, count in enumerate(result.distribution)) == result.counters.misses
    assert sum(result.distribution) == result.counters.steps
    assert result.miss_rate == result.counters.misses / (result.counters.misses + result.counters.hits)


def _fewest_misses(steps, slots):
    """By trying every victim: the least misses of any policy that fills every miss."""
    states = {frozenset(): 0}
    for step in steps:
        following = {}
        for held, misses in states.items():
            missing = step - held
            surplus = max(0, len(held | step) - slots)
            for victims in itertools.combinations(sorted(held - step), surplus):
                state = (held | step) - set(victims)
                total = misses + len(missing)
                following[state] = min(total, following.get(state, total))
        states = following
    return min(states.values())


@pytest.mark.parametrize("seed", range(12))
def test_no_choice_of_victims_beats_belady(seed):
    random = np.random.default_rng(seed)
    steps = [sorted(random.choice(7, 2, replace=False).tolist()) for _ in range(14)]
    trace = trace_of(steps, num_experts=7)
    for slots in (2, 3, 4):
        best = replay(trace, slots, "belady").counters.misses
        assert best == _fewest_misses([set(step) for step in steps], slots)
        assert best <= min(replay(trace, slots, policy).counters.misses for policy in POLICIES)


def test_lfu_keeps_what_is_used_often_and_forgets_what_was():
    often = [[0], [0], [0], [1], [2], [0]]
    assert replay(trace_of(often, 3), 2, "lfu").counters.misses == 3, "0 outlives 1 and 2"
    assert replay(trace_of(often, 3), 2, "lru").counters.misses == 4
    once = [[0]] * 4 + [[1], [2]] * (8 * LFU.HALF_LIFE)
    counters = replay(trace_of(once, 3), 2, "lfu").counters
    assert counters.misses < 8 * LFU.HALF_LIFE, "0 has to leave at last"


def test_a_pool_without_slots_and_a_warm_up_without_end_are_refused():
    trace = synthetic_trace(1, 4, 2, steps=5, locality=0, seed=0)
    with pytest.raises(TraceError, match="holds no expert"):
        replay(trace, 0)
    with pytest.raises(TraceError, match="leaves nothing"):
        replay(trace, 2, warmup=5)
