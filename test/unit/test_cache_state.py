"""The cache's state on the host: which pass failed, and what a reset leaves."""

from sglang_ft.experts.cache_state import CacheState
from sglang_ft.kernels import abi


def _fail(state: CacheState, jobs: int = 1) -> None:
    state._counters[abi.COUNTERS.index("failed_jobs")] += jobs


def test_a_failure_belongs_to_its_pass() -> None:
    state = CacheState(16, 4, "cpu")
    first = state.end_pass()
    _fail(state, 2)
    second = state.end_pass()
    third = state.end_pass()
    assert [state.failed(number) for number in (first, second, third)] == [False, True, False]


def test_a_failure_is_not_lost_by_a_reset() -> None:
    state = CacheState(16, 4, "cpu")
    _fail(state)
    failed = state.end_pass()
    state.reset(4)
    after = state.end_pass()
    assert state.failed(failed) and not state.failed(after)
    _fail(state)
    assert state.failed(state.end_pass())


def test_a_failure_of_a_pass_that_nobody_asked_about_is_told_by_the_next() -> None:
    state = CacheState(16, 4, "cpu")
    _fail(state)
    state.end_pass()
    assert state.failed(state.end_pass())


def test_a_reset_keeps_the_sequence_of_jobs_and_empties_the_slots() -> None:
    state = CacheState(16, 4, "cpu")
    state.set_sequence(7)
    state.slot_of[3], state.expert_of[2] = 2, 3
    state.reset(4)
    control = state.control()
    assert (control.sequence, control.live_slots, control.free_slots, control.queue_count) == (7, 4, 4, 0)
    assert state.slot_of.tolist() == [-1] * 16 and state.expert_of.tolist() == [-1] * 4
