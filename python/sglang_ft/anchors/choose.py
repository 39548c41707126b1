"""Which anchors of a prefill chunk get a checkpoint, and where exactly.

A scan over a chunk passes the state of a recurrent layer at the borders of its blocks, so those states cost nothing
to compute: each anchor takes the last border at or before it, and anchors of the same block share one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import NamedTuple

from sglang_ft.anchors.rules import Anchor, Kind, level


class Grid(NamedTuple):
    """Where the scan of a chunk passes states: positions p with (p - start + phase) divisible by `block`.

    `least`: a state closer than this to the chunk's start cannot be read (the inputs of a short convolution before
    it lie outside of the chunk).
    """

    block: int
    phase: int = 0
    least: int = 1

    def floor(self, position: int, start: int) -> int:
        """The last border at or before `position`."""
        shifted = position - start + self.phase
        return start + shifted // self.block * self.block - self.phase


def choose(
    anchors: Iterable[Anchor],
    start: int,
    stop: int,
    grid: Grid,
    limit: int,
    kept: Collection[int] = (),
) -> list[Anchor]:
    """Checkpoints of the chunk of positions start .. stop, by position; at most `limit`.

    Positions in `kept`, the start and the end of the chunk have their state elsewhere. When there are too many, those
    of the highest level stay and of equals the latest, which are the next to be edited.
    """
    kinds: dict[int, Kind] = {}
    for anchor in anchors:
        if not start < anchor.position <= stop:
            continue
        border = grid.floor(anchor.position, start)
        if not start + grid.least <= border < stop or border in kept:
            continue
        if border not in kinds or level(anchor.kind) > level(kinds[border]):
            kinds[border] = anchor.kind
    best = sorted(kinds, key=lambda p: (kinds[p] != Kind.SYSTEM, -p))[: max(0, limit)]
    return [Anchor(p, kinds[p]) for p in sorted(best)]
