"""Token ids of past turns, used again when a client sends the turns back as text.

A sampled turn, decoded, sent back and tokenized again, often comes as other ids of the same text, and then everything
after it is a different prefix. Conversations are compared piece by piece, cut at special tokens: no token reaches over
such a border, so a piece of equal text can take the ids that it had before, and the prompt still reads the same.

Pieces that the model sampled may differ in what a chat template changes when it writes them anew: blanks at their ends,
and the form of the JSON of a tool call. Then the prompt keeps what the model had sampled.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

_NO_JSON = object()


class Piece(NamedTuple):
    """A run of tokens that begins with a special token, or the text before the first one."""

    ids: tuple[int, ...]
    sampled: bool


class TurnMemory:
    """The newest conversations of a server."""

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        special_ids: Collection[int],
        most: int = 32,
    ) -> None:
        """`most`: conversations that are remembered."""
        self._decode = decode
        self._special = frozenset(special_ids)
        self._most = most
        self._conversations: list[list[Piece]] = []

    def splice(self, ids: Sequence[int]) -> list[int]:
        """The ids of a prompt, with those of past turns where the prompt says the same."""
        pieces = self._cut(ids, sampled=False)
        best: list[Piece] = []
        for conversation in reversed(self._conversations):
            shared = self._shared(pieces, conversation)
            if shared > len(best):
                best = conversation[:shared]
        return [i for piece in (*best, *pieces[len(best) :]) for i in piece.ids]

    def remember(self, prompt: Sequence[int], output: Sequence[int]) -> None:
        """A finished request, by the ids that were computed."""
        known = self._sampled_in(prompt)
        pieces = [
            Piece(ids, sampled or i in known)
            for i, (ids, sampled) in enumerate(self._cut(prompt, sampled=False))
        ]
        answer = self._cut(output, sampled=True)
        if pieces and answer and answer[0].ids[0] not in self._special:
            answer[0] = Piece(pieces.pop().ids + answer[0].ids, sampled=True)
        pieces += answer
        # What this conversation continues is no longer needed by itself.
        self._conversations = [c for c in self._conversations if not _starts_with(pieces, c)]
        self._conversations = [*self._conversations, pieces][-self._most :]

    def _cut(self, ids: Sequence[int], sampled: bool) -> list[Piece]:
        borders = [0, *(i for i, token in enumerate(ids) if i and token in self._special), len(ids)]
        return [Piece(tuple(ids[a:b]), sampled) for a, b in zip(borders, borders[1:], strict=False) if b > a]

    def _shared(self, pieces: list[Piece], conversation: list[Piece]) -> int:
        """How many pieces say the same, from the beginning."""
        shared = 0
        for new, old in zip(pieces, conversation, strict=False):
            if new.ids != old.ids and not self._says_the_same(new, old):
                break
            shared += 1
        return shared

    def _says_the_same(self, new: Piece, old: Piece) -> bool:
        if (new.ids[0] in self._special or old.ids[0] in self._special) and new.ids[0] != old.ids[0]:
            return False
        a, b = self._decode(new.ids), self._decode(old.ids)
        return a == b or (old.sampled and len(new.ids) > 1 and len(old.ids) > 1 and self._same_turn(new, old))

    def _same_turn(self, new: Piece, old: Piece) -> bool:
        start = 1 if new.ids[0] in self._special else 0
        a, b = self._decode(new.ids[start:]).strip(), self._decode(old.ids[start:]).strip()
        if a == b:
            return True
        left, right = _json(a), _json(b)
        return left is not _NO_JSON and left == right

    def _sampled_in(self, prompt: Sequence[int]) -> set[int]:
        """Numbers of the pieces of a prompt that past answers gave."""
        pieces = [piece.ids for piece in self._cut(prompt, sampled=False)]
        known: set[int] = set()
        for conversation in self._conversations:
            for i, (new, old) in enumerate(zip(pieces, conversation, strict=False)):
                if new != old.ids:
                    break
                if old.sampled:
                    known.add(i)
        return known


def _starts_with(pieces: list[Piece], conversation: list[Piece]) -> bool:
    same = (a.ids == b.ids for a, b in zip(pieces, conversation, strict=False))
    return len(conversation) <= len(pieces) and all(same)


def _json(text: str) -> Any:
    if not text.startswith(("{", "[")):
        return _NO_JSON
    try:
        return json.loads(text)
    except ValueError:
        return _NO_JSON
