"""Which positions of a chunk get a checkpoint, and which checkpoint goes first when room is needed."""

from __future__ import annotations

import random

import pytest

from sglang_ft.anchors.choose import Grid, choose
from sglang_ft.anchors.rules import Anchor, Kind
from sglang_ft.anchors.value import Worth


def positions(chosen):
    return [a.position for a in chosen]


def test_an_anchor_takes_the_last_block_border_at_or_before_it():
    anchors = [Anchor(p, Kind.USER) for p in (100, 164, 165, 227, 228)]
    assert positions(choose(anchors, 100, 400, Grid(64), 9)) == [164, 228], "100 is where the chunk begins"
    assert positions(choose(anchors, 164, 400, Grid(64), 9)) == [228], (
        "blocks are counted from the chunk's start"
    )


def test_anchors_of_one_block_share_a_checkpoint_of_the_highest_kind():
    anchors = [Anchor(70, Kind.TOOL_CALL), Anchor(80, Kind.SYSTEM), Anchor(90, Kind.USER)]
    assert choose(anchors, 0, 200, Grid(64), 9) == [Anchor(64, Kind.SYSTEM)]


def test_the_end_of_a_chunk_and_what_is_kept_anyway_are_left_out():
    anchors = [Anchor(p, Kind.USER) for p in (64, 128, 192)]
    assert positions(choose(anchors, 0, 192, Grid(64), 9, kept={64})) == [128]


def test_of_too_many_the_system_prompt_and_the_latest_stay():
    anchors = [Anchor(64 * i, Kind.SYSTEM if i == 2 else Kind.USER) for i in range(1, 9)]
    assert positions(choose(anchors, 0, 1000, Grid(64), 3)) == [128, 448, 512]
    assert choose(anchors, 0, 1000, Grid(64), 0) == []


@pytest.mark.parametrize("block", [1, 7, 64, 256])
def test_random_chunks_lose_less_than_a_block(block):
    random_ = random.Random(block)
    for _ in range(300):
        start, length = random_.randrange(500), random_.randrange(1, 1000)
        phase, least = random_.randrange(block), random_.randrange(1, 5)
        anchors = [Anchor(random_.randrange(1600), Kind.USER) for _ in range(random_.randrange(30))]
        grid = Grid(block, phase, least)
        chosen = choose(anchors, start, start + length, grid, 1000)
        for p in positions(chosen):
            assert start + least <= p < start + length and (p - start + phase) % block == 0
        for anchor in anchors:
            if not start < anchor.position < start + length:
                continue
            reached = max([p for p in positions(chosen) if p <= anchor.position], default=start)
            assert anchor.position - reached < block + least + phase


def test_worth_grows_with_level_use_and_distance():
    worth = Worth()
    system, tool = worth.new(Kind.SYSTEM), worth.new(Kind.TOOL_CALL)
    assert worth.of(system, 100) > worth.of(tool, 100)
    assert worth.of(tool, 1000) > worth.of(system, 100)
    before = worth.of(tool, 100)
    worth.used(tool)
    assert worth.of(tool, 100) == 2 * before


def test_what_is_not_used_ages():
    worth = Worth()
    old = worth.new(Kind.USER)
    worth.used(old)
    for _ in range(10):
        worth.dropped(worth.of(worth.new(Kind.USER), 100))
    assert worth.of(worth.new(Kind.USER), 100) > worth.of(old, 100)
