"""Anchors on a GPU: Triton's scans, captured graphs and overlap scheduling, on the demo model."""

from __future__ import annotations

import random
from typing import Any

import agent_session
import pytest
import transformers
from serving import DEMO, serving

FLAGS = ("--attention-backend", "triton", "--sampling-backend", "pytorch", "--context-length", "8192")
FLAGS += ("--max-total-tokens", "65536", "--cuda-graph-max-bs", "8", "--mem-fraction-static", "0.5")
WAYS: dict[str, tuple[str, ...]] = {
    "overlap": ("--ft-anchor-states", "64"),
    "no overlap": ("--disable-overlap-schedule", "--ft-anchor-states", "64"),
    "small chunks": ("--chunked-prefill-size", "256", "--ft-anchor-states", "64"),
}


@pytest.mark.parametrize("way", WAYS)
def test_edits_cost_what_lies_after_them_and_change_nothing(way: str) -> None:
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(DEMO)
    with serving(DEMO, *FLAGS, *WAYS[way]) as server:
        for seed in range(3):
            views = agent_session.edited_views(random.Random(seed))
            for outcome in agent_session.outcomes(server, tokenizer, views, longest=8000):
                assert outcome.recomputed <= outcome.minimum + 64, outcome
                assert outcome.cached_elsewhere == 0 and outcome.max_error < 0.08, outcome
        assert server.health().status_code == 200, "SGLang ends a server that has lost a slot"
