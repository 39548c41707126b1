"""Anchors of a token sequence: positions where agents cut their history, found by the markers of a chat format.

A position p stands for the prefix of the first p tokens. Every occurrence of a marker gives two anchors: before its
first token and after its last one. The markers of a model come from find.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import StrEnum
from typing import NamedTuple

import numpy as np


class Kind(StrEnum):
    """What an anchor stands at; also a label of the metrics."""

    SYSTEM = "system"  # end of the system prompt with its tools: where the first turn begins
    USER = "user"
    ASSISTANT = "assistant"
    PROMPT = "prompt"  # end of the prompt
    THINKING = "thinking"
    TOOL_CALL = "tool_call"
    TOOL_RESULT = "tool_result"
    MARKER = "marker"  # a marker that the user added
    OTHER = "other"  # no anchor: the end of a prefill chunk


TURNS = frozenset({Kind.USER, Kind.ASSISTANT, Kind.TOOL_RESULT})
_LEVELS = {Kind.SYSTEM: 3, Kind.USER: 2, Kind.ASSISTANT: 2, Kind.PROMPT: 2, Kind.MARKER: 2}


def level(kind: Kind) -> int:
    """How far up an anchor stands: 3 system, 2 turn, 1 inside of a turn."""
    return _LEVELS.get(kind, 1)


class Anchor(NamedTuple):
    """A position of a token sequence."""

    position: int
    kind: Kind


class Marker(NamedTuple):
    """A run of tokens that begins or ends a part of a conversation."""

    text: str
    ids: tuple[int, ...]
    kind: Kind


class AnchorRules:
    """The markers of one model."""

    def __init__(self, markers: Iterable[Marker]) -> None:
        """Of markers with the same ids the first one counts."""
        by_ids: dict[tuple[int, ...], Marker] = {}
        for marker in markers:
            if marker.ids:
                by_ids.setdefault(marker.ids, marker)
        self.markers = tuple(by_ids.values())
        self._by_first: dict[int, list[Marker]] = {}
        for marker in sorted(self.markers, key=lambda m: -len(m.ids)):
            self._by_first.setdefault(marker.ids[0], []).append(marker)
        self.first_ids = np.array(sorted(self._by_first), dtype=np.int64)
        self.longest = max((len(m.ids) for m in self.markers), default=0)

    def find(self, ids: Sequence[int] | np.ndarray) -> list[Anchor]:
        """Anchors of a sequence, by position; at one position the highest kind stays."""
        ids = np.asarray(ids, dtype=np.int64)
        kinds: dict[int, Kind] = {}
        in_first_turn = True
        for i in np.flatnonzero(np.isin(ids, self.first_ids)).tolist():
            marker = self.marker_at(ids, i)
            if marker is None:
                continue
            kind = marker.kind
            if in_first_turn and i > 0 and kind in TURNS:
                in_first_turn = False
                kind = Kind.SYSTEM
            _put(kinds, i, kind)
            _put(kinds, i + len(marker.ids), marker.kind)
        return [Anchor(p, kinds[p]) for p in sorted(kinds)]

    def marker_at(self, ids: np.ndarray, i: int) -> Marker | None:
        """The longest marker that begins at position i."""
        for marker in self._by_first.get(int(ids[i]), ()):
            if tuple(ids[i : i + len(marker.ids)].tolist()) == marker.ids:
                return marker
        return None

    def completed(self, tail: Sequence[int]) -> Marker | None:
        """The longest marker that the last tokens of a sequence complete."""
        ends = [m for m in self.markers if tuple(tail[-len(m.ids) :]) == m.ids]
        return max(ends, key=lambda m: len(m.ids), default=None)


def _put(kinds: dict[int, Kind], position: int, kind: Kind) -> None:
    if position not in kinds or level(kind) > level(kinds[position]):
        kinds[position] = kind
