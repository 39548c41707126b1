"""How long a checkpoint stays: by what its loss would cost, and how likely it is that it is asked for again.

The rule is GreedyDual-Size-Frequency (Cherkasova, 1998) with states of one size: worth = clock at the last use +
uses x level x tokens to compute again without it. The clock rises to the worth of each state that is dropped, so what
is not used ages. The distance is taken when room is needed, for it grows when a neighbour is dropped.
"""

from __future__ import annotations

from dataclasses import dataclass

from sglang_ft.anchors.rules import Kind, level


@dataclass
class Use:
    """What is known of one checkpoint."""

    kind: Kind
    clock: float
    hits: int = 0


class Worth:
    """The clock, and the worth of checkpoints by it."""

    def __init__(self) -> None:
        self.clock = 0.0

    def new(self, kind: Kind) -> Use:
        return Use(kind, self.clock)

    def used(self, use: Use) -> None:
        """A request began from this checkpoint."""
        use.hits += 1
        use.clock = self.clock

    def of(self, use: Use, distance: int) -> float:
        """`distance`: tokens from the nearest checkpoint before it on its path, or from the beginning."""
        return use.clock + (1 + use.hits) * level(use.kind) * distance

    def dropped(self, worth: float) -> None:
        self.clock = max(self.clock, worth)
