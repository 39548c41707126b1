"""How many misses of a step are filled, and how many the worker runs, from measured bandwidths."""

from __future__ import annotations

from dataclasses import dataclass, replace

from sglang_ft.experts.step import FEATURE_STEP, Split

SHARED_UP_TO = 32
"""With more misses than that, half an expert more or less on either side makes no difference."""
TAIL_WEIGHT = 0.25
"""What a second of the link costs that no step waits for: it may still delay the next layer's fills."""

HOPELESS_SCALE = 4.0
_CORRECTION = 0.04
_LEAST_SCALE = 0.5
_CORRECTED_JOBS = 200
_SHORT_WAIT_S, _LONG_WAIT_S = 4e-6, 16e-6


@dataclass(frozen=True)
class BranchTimes:
    """Seconds of each branch while both are busy: a fixed part, and a part for each expert."""

    link_fixed: float
    link_expert: float
    cpu_fixed: float
    cpu_expert: float

    def link(self, experts: float) -> float:
        return self.link_fixed + experts * self.link_expert if experts else 0.0

    def cpu(self, experts: float) -> float:
        return self.cpu_fixed + experts * self.cpu_expert if experts else 0.0


@dataclass
class Correction:
    """Slow correction of measured times by what the GPU waits for the worker's jobs.

    A split is balanced when the worker ends just after the link. A longer wait says that the CPU is slower than
    measured; none at all that it may be faster. Far off, the worker is not worth its jobs.
    """

    scale: float = 1.0
    """Of the CPU's times."""
    _jobs: int = 0
    _wait_s: float = 0.0

    def update(self, jobs: int, wait_s: float) -> bool:
        """Takes what happened in a period; whether the scale has changed."""
        self._jobs, self._wait_s = self._jobs + jobs, self._wait_s + wait_s
        if self._jobs < _CORRECTED_JOBS:
            return False
        wait = self._wait_s / self._jobs
        self._jobs, self._wait_s = 0, 0.0
        if _SHORT_WAIT_S <= wait <= _LONG_WAIT_S:
            return False
        self.scale *= 1 + _CORRECTION if wait > _LONG_WAIT_S else 1 - _CORRECTION
        self.scale = min(max(self.scale, _LEAST_SCALE), 2 * HOPELESS_SCALE)
        return True

    @property
    def hopeless(self) -> bool:
        """Whether the CPU turned out so much slower that plain fills are better."""
        return self.scale > HOPELESS_SCALE

    def apply(self, times: BranchTimes) -> BranchTimes:
        return replace(
            times, cpu_fixed=times.cpu_fixed * self.scale, cpu_expert=times.cpu_expert * self.scale
        )


def fills_only(most: int) -> list[Split]:
    """Every miss takes the link, for 0 to `most` misses."""
    return [Split(m) for m in range(most + 1)]


def cpu_only(most: int) -> list[Split]:
    """The worker runs every miss."""
    return [Split(0)] * (most + 1)


def balanced(most: int, times: BranchTimes, intermediate: int, share: bool = True) -> list[Split]:
    """The split that ends soonest, for 0 to `most` misses; at least one fill where there is a miss.

    `share`: the last fill may be cut, at a multiple of FEATURE_STEP of its `intermediate` features.
    """
    return [_best(m, times, intermediate, share and m <= SHARED_UP_TO) for m in range(most + 1)]


def _best(misses: int, times: BranchTimes, intermediate: int, share: bool) -> Split:
    if misses == 0:
        return Split(0)
    even = (misses * times.cpu_expert + times.cpu_fixed - times.link_fixed) / (
        times.link_expert + times.cpu_expert
    )
    around = {min(max(int(even) + d, 1), misses) for d in (0, 1)}
    options = [Split(fills) for fills in around]
    if share:
        cuts = range(FEATURE_STEP, intermediate, FEATURE_STEP)
        options += [Split(fills, features) for fills in around for features in cuts]
    return min(options, key=lambda split: _cost(split, misses, times, intermediate))


def _cost(split: Split, misses: int, times: BranchTimes, intermediate: int) -> float:
    later = 1 - split.features / intermediate if split.features else 0.0
    in_time = split.fills - later
    seconds = max(times.link(in_time), times.cpu(misses - in_time))
    return seconds + TAIL_WEIGHT * later * times.link_expert
