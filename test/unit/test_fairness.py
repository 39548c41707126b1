"""When a decode step comes between two chunks of a prompt."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from sglang_ft.engine.fairness import DecodeTurns


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def batch(mode: ForwardMode = ForwardMode.DECODE, finished: tuple[bool, ...] = (False,), **fields):
    reqs = [SimpleNamespace(finished=lambda f=f: f) for f in finished]
    return SimpleNamespace(
        forward_mode=mode, reqs=reqs, is_empty=lambda: not reqs, **{"is_prefill_only": False} | fields
    )


CHUNK = batch(ForwardMode.EXTEND)


def test_a_decode_step_is_due_when_the_last_one_is_long_ago():
    clock = Clock()
    turns = DecodeTurns(0.5, clock)
    assert turns.due(CHUNK, batch()), "none yet"
    turns.launched(batch())
    clock.now += 0.4
    assert not turns.due(CHUNK, batch())
    turns.launched(CHUNK)
    clock.now += 0.1
    assert turns.due(CHUNK, batch())
    turns.launched(batch(ForwardMode.MIXED))
    assert not turns.due(CHUNK, batch()), "a mixed batch gives them tokens too"
    turns.launched(None)


@pytest.mark.parametrize(
    "last, running",
    [
        (None, batch()),
        (batch(), batch()),  # never two in a row while a prompt waits
        (batch(ForwardMode.TARGET_VERIFY), batch()),
        (CHUNK, batch(finished=())),
        (CHUNK, batch(finished=(True, True))),
        (CHUNK, batch(is_prefill_only=True)),
    ],
)
def test_the_prompt_goes_on_otherwise(last, running):
    assert not DecodeTurns(0, Clock()).due(last, running)


def test_one_unfinished_answer_is_enough():
    assert DecodeTurns(0, Clock()).due(CHUNK, batch(finished=(True, False)))
