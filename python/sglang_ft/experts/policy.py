"""How many misses of a step are filled, and how many the worker runs, from measured bandwidths."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

from sglang_ft.experts.step import FEATURE_STEP, Split

SHARED_UP_TO = 32
"""With more misses than that, half an expert more or less on either side makes no difference."""
TAIL_WEIGHT = 0.5
"""What a second of the link costs that no step waits for: it may delay the next layer's fills, and evicts an expert."""

HANDOFF_S = 6e-6
"""From the plan's doorbell to the worker's first instruction, and from its last to the kernel that waits."""

HOPELESS_SCALE = 4.0
_LEAST_SCALE = 0.5
_CORRECTED_JOBS = 200
_WEIGHT = 0.3
_SMALL_CHANGE = 0.03


@dataclass(frozen=True)
class BranchTimes:
    """Seconds of each branch while both are busy: a fixed part, and a part for each expert."""

    link_fixed: float
    link_expert: float
    cpu_fixed: float
    cpu_expert: float
    fill_blocks: int = 16
    """Blocks of the kernel that copies experts: the fewest that fill the link. More would not copy faster, and every
    other read over the link would wait behind theirs."""
    cpu_pair: float = 0.0
    """Of the CPU for a row of an expert, where that takes longer than reading the expert."""

    def link(self, experts: float) -> float:
        return self.link_fixed + experts * self.link_expert if experts else 0.0

    def cpu(self, experts: float, pairs: float = 0.0) -> float:
        """`pairs`: rows of the experts, together."""
        return self.cpu_fixed + max(experts * self.cpu_expert, pairs * self.cpu_pair) if experts else 0.0


@dataclass
class Correction:
    """Slow correction of the measured times by those of the worker's jobs. Far off, it is not worth its jobs."""

    scale: float = 1.0
    """Of the CPU's times."""
    _jobs: int = 0
    _expected_s: float = 0.0
    _busy_s: float = 0.0

    def update(self, jobs: int, experts: float, busy_s: float, times: BranchTimes) -> bool:
        """Takes the jobs of a period, the experts they read and the time they took; whether the scale has changed."""
        self._jobs += jobs
        self._expected_s += jobs * times.cpu_fixed + experts * times.cpu_expert
        self._busy_s += jobs * HANDOFF_S + busy_s
        if self._jobs < _CORRECTED_JOBS:
            return False
        seen = self._busy_s / self._expected_s
        self._jobs, self._expected_s, self._busy_s = 0, 0.0, 0.0
        scale = self.scale + _WEIGHT * (seen - self.scale)
        if abs(scale - self.scale) < _SMALL_CHANGE * self.scale:
            return False
        self.scale = min(max(scale, _LEAST_SCALE), 2 * HOPELESS_SCALE)
        return True

    def try_again(self) -> None:
        """Gives the worker jobs again after it was hopeless: without any, nothing would ever be measured."""
        self.scale = min(self.scale, HOPELESS_SCALE)

    @property
    def hopeless(self) -> bool:
        """Whether the CPU turned out so much slower that plain fills are better."""
        return self.scale > HOPELESS_SCALE

    def apply(self, times: BranchTimes) -> BranchTimes:
        return replace(
            times,
            cpu_fixed=times.cpu_fixed * self.scale,
            cpu_expert=times.cpu_expert * self.scale,
            cpu_pair=times.cpu_pair * self.scale,
        )


PrefillPath = Literal["slots", "stream", "worker"]
"""Routed experts alone, as a decode step has them; all experts through buffers; all of it on the CPU."""


@dataclass(frozen=True)
class Layers:
    """What a pass has to do: MoE layers of so many experts, `topk` of them a row; the share that lies in slots."""

    layers: int
    experts: int
    topk: int
    cached: float

    def distinct(self, rows: int) -> float:
        """Experts of a layer that so many rows reach when all are as likely: the most to be expected."""
        return self.experts * (1 - (1 - self.topk / self.experts) ** rows)


def prompt_split(most: int, times: BranchTimes, layers: Layers, rows: int) -> list[Split]:
    """The split for steps of `rows` rows, as `balanced`: whole experts, and the CPU's work on their rows counts."""

    def seconds(fills: int, misses: int, rows_each: float) -> float:
        return max(times.link(fills), times.cpu(misses - fills, (misses - fills) * rows_each))

    table = [Split(0)]
    fills = 1
    rows_each = rows * layers.topk / layers.distinct(rows)
    for misses in range(1, most + 1):  # one miss more never means fewer fills
        more = min(fills + 1, misses)
        fills = min((fills, more), key=lambda n: seconds(n, misses, rows_each))
        table.append(Split(fills))
    return table


def prefill_seconds(times: BranchTimes, layers: Layers, rows: int) -> dict[PrefillPath, float]:
    """What the experts of a pass of `rows` rows take by each path, beside the rest of the model."""
    distinct = layers.distinct(rows)
    misses = distinct * (1 - layers.cached)
    split = prompt_split(math.ceil(misses), times, layers, rows)[-1].fills
    pairs = rows * layers.topk * (1 - layers.cached)
    job = times.cpu(misses - split, pairs * (1 - split / max(misses, 1)))
    return {
        "slots": layers.layers * max(times.link(split), job),
        "stream": layers.layers * times.link(layers.experts * (1 - layers.cached)),
        "worker": layers.layers * times.cpu(distinct, rows * layers.topk),
    }


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
