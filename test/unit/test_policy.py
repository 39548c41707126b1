"""The split of misses: never worse than any other split of whole or cut experts, for any times of the branches."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_ft.experts import policy
from sglang_ft.experts.policy import BranchTimes, Correction, balanced
from sglang_ft.experts.step import FEATURE_STEP, Split

INTERMEDIATE = 320
seconds = st.floats(1e-7, 1e-2)
times = st.builds(BranchTimes, st.floats(0, 1e-3), seconds, st.floats(0, 1e-3), seconds)


def cost(split: Split, misses: int, t: BranchTimes) -> float:
    """Until the slower branch ends, and a quarter of what the link carries afterwards."""
    in_time = split.fills - 1 + split.features / INTERMEDIATE if split.features else split.fills
    link = t.link_fixed + in_time * t.link_expert
    cpu = t.cpu_fixed + (misses - in_time) * t.cpu_expert if misses > in_time else 0.0
    return max(link, cpu) + policy.TAIL_WEIGHT * (split.fills - in_time) * t.link_expert


def every_split(misses: int, share: bool) -> list[Split]:
    cuts = [0, *range(FEATURE_STEP, INTERMEDIATE, FEATURE_STEP)] if share else [0]
    return [Split(fills, features) for fills in range(1, misses + 1) for features in cuts]


@given(times, st.booleans())
def test_no_other_split_ends_sooner(t, share):
    for misses, split in enumerate(balanced(12, t, INTERMEDIATE, share)):
        if not misses:
            assert split == Split(0)
            continue
        assert split in every_split(misses, share)
        best = min(cost(other, misses, t) for other in every_split(misses, share))
        assert cost(split, misses, t) == pytest.approx(best, rel=1e-9)


@given(times, st.booleans())
def test_every_step_with_a_miss_fills_one_and_never_more_than_there_are(t, share):
    split = balanced(1024, t, INTERMEDIATE, share)
    assert len(split) == 1025
    for misses, (fills, features) in enumerate(split):
        assert min(misses, 1) <= fills <= misses
        assert features % FEATURE_STEP == 0 and features < INTERMEDIATE
        assert not features or (share and misses <= policy.SHARED_UP_TO)


@given(times)
def test_more_misses_never_mean_fewer_fills(t):
    fills = [split.fills for split in balanced(200, t, INTERMEDIATE, share=False)]
    assert fills == sorted(fills)


@given(times)
def test_more_misses_never_mean_less_in_time(t):
    def in_time(split: Split) -> float:
        return split.fills - (1 - split.features / INTERMEDIATE if split.features else 0)

    split = balanced(policy.SHARED_UP_TO, t, INTERMEDIATE)
    amounts = [in_time(one) for one in split]
    assert amounts == sorted(amounts)


def test_the_branches_share_by_their_bandwidths():
    """The paper's q = m P / (P + C), for a link three times as fast as the CPU."""
    even = balanced(100, BranchTimes(0, 1e-4, 0, 3e-4), INTERMEDIATE, share=False)
    assert [even[m].fills for m in (4, 40, 100)] == [3, 30, 75]
    assert balanced(1, BranchTimes(0, 1e-4, 0, 1e-4), 512)[1] == Split(1, 256)


def test_a_branch_that_is_far_slower_gets_next_to_nothing():
    slow_cpu = balanced(8, BranchTimes(0, 1e-6, 0, 1), INTERMEDIATE)
    assert slow_cpu == policy.fills_only(8)
    late_cpu = balanced(8, BranchTimes(0, 1e-4, 1e-1, 1e-6), INTERMEDIATE)
    assert late_cpu == policy.fills_only(8), "a fixed time counts once there is a job"
    slow_link = balanced(8, BranchTimes(0, 1, 0, 1e-6), INTERMEDIATE, share=False)
    assert slow_link == [Split(0)] + [Split(1)] * 8, "a cache that admits nothing decays"


def test_experts_too_small_to_cut_stay_whole():
    assert all(not split.features for split in balanced(40, BranchTimes(0, 1, 0, 1), FEATURE_STEP))


def test_one_side_alone():
    assert policy.fills_only(3) == [Split(0), Split(1), Split(2), Split(3)]
    assert policy.cpu_only(3) == [Split(0)] * 4
    assert policy.fills_only(0) == policy.cpu_only(0) == [Split(0)]


TIMES = BranchTimes(0, 1e-4, 26e-6, 1e-4)


def jobs_that_take(times: float, count: int = 1000) -> tuple[int, float, float, BranchTimes]:
    """Jobs of half an expert each, `times` as long as measured with the hand-off."""
    return count, count / 2, count * (times * 76e-6 - policy.HANDOFF_S), TIMES


def test_jobs_that_take_what_was_measured_correct_nothing():
    correction = Correction()
    assert not correction.update(*jobs_that_take(1.0))
    assert not correction.update(*jobs_that_take(1.05)), "noise"
    assert correction.scale == 1


def test_periods_of_few_jobs_count_together():
    correction = Correction()
    changes = [correction.update(*jobs_that_take(3.0, 50)) for _ in range(8)]
    assert changes == [False, False, False, True] * 2 and correction.scale > 1


@pytest.mark.parametrize("seen", [0.6, 1.5, 3.0])
def test_the_scale_becomes_what_is_seen(seen):
    correction = Correction()
    for _ in range(50):
        correction.update(*jobs_that_take(seen))
    assert correction.scale == pytest.approx(seen, rel=0.15)
    scaled = correction.apply(BranchTimes(1, 2, 3, 4, 5, 6))
    assert scaled == BranchTimes(1, 2, *(n * correction.scale for n in (3, 4)), 5, 6 * correction.scale)


def test_the_scale_does_not_run_away_and_a_hopeless_cpu_is_tried_again():
    slow, fast = Correction(), Correction()
    for _ in range(50):
        slow.update(*jobs_that_take(1000.0))
        fast.update(*jobs_that_take(0.1))
    assert (slow.scale, fast.scale) == (2 * policy.HOPELESS_SCALE, 0.5)
    assert slow.hopeless and not fast.hopeless
    slow.try_again()
    assert not slow.hopeless
    slow.update(*jobs_that_take(1000.0))
    assert slow.hopeless


def test_a_wrong_calibration_is_given_up_within_seconds():
    correction, seconds = Correction(), 0
    while not correction.hopeless:
        correction.update(*jobs_that_take(12.0))
        seconds += 1
    assert seconds < 5


# The reference machine: 6.29 MB an expert, PCIe 5 and six threads; and one with an old link.
QUICK = BranchTimes(5e-6, 121e-6, 8e-6, 115e-6, cpu_pair=12e-6)
OLD_LINK = BranchTimes(5e-6, 2000e-6, 8e-6, 115e-6, cpu_pair=12e-6)
QWEN = policy.Layers(40, 256, 8, cached=0.37)


@given(times, st.integers(1, 300), st.floats(0, 0.9), st.floats(0, 1e-4))
def test_the_split_of_a_prompt_is_the_best_of_whole_experts(t, rows, cached, pair):
    t = BranchTimes(t.link_fixed, t.link_expert, t.cpu_fixed, t.cpu_expert, 16, pair)
    layers = policy.Layers(4, 24, 3, cached)
    each = rows * 3 / layers.distinct(rows)
    for misses, split in enumerate(policy.prompt_split(24, t, layers, rows)):

        def seconds(fills, misses=misses):
            return max(t.link(fills), t.cpu(misses - fills, (misses - fills) * each))

        best = min(map(seconds, range(min(1, misses), misses + 1)))
        assert not split.features and seconds(split.fills) <= best * 1.001 + 1e-12


def test_rows_of_a_layer_reach_more_experts_the_more_they_are():
    assert QWEN.distinct(1) == pytest.approx(8)
    assert 250 < QWEN.distinct(200) < QWEN.distinct(10_000) <= 256


def shortest(t: BranchTimes, rows: int, *possible: str) -> str:
    seconds = policy.prefill_seconds(t, QWEN, rows)
    return min(possible, key=lambda one: seconds[one])


def test_a_short_prompt_takes_what_it_is_routed_to_and_a_long_one_streams():
    for rows in (1, 16, 64, 128, 256):
        assert shortest(QUICK, rows, "slots", "stream", "worker") == "slots"
    assert [shortest(QUICK, rows, "stream", "worker") for rows in (512, 8192)] == ["stream"] * 2
    assert [shortest(OLD_LINK, rows, "stream", "worker") for rows in (1024, 100_000)] == ["worker", "stream"]


def test_a_short_turn_costs_less_than_half_a_stream():
    follow_up, chunk = (policy.prefill_seconds(QUICK, QWEN, rows) for rows in (64, 8192))
    everything = QWEN.layers * QWEN.experts * QUICK.link_expert
    assert follow_up["slots"] < 0.4 * everything
    assert chunk["stream"] == pytest.approx(0.63 * everything, rel=0.01)
