"""What the server is told of its plan: flags that the user has not given, and the budget of the experts."""

from __future__ import annotations

import argparse
import os

import header_checkpoints
import pytest
from header_checkpoints import GIB

from sglang_ft import checkpoint, gpu
from sglang_ft.config import FtConfig
from sglang_ft.engine import allocation
from sglang_ft.engine.allocation import Allotment
from sglang_ft.errors import MemoryBudgetError
from sglang_ft.memory.planner import GpuPlan


@pytest.fixture
def start(tmp_path, monkeypatch):
    """Plans a start on a GPU of 24 GiB, 22 of them free."""
    monkeypatch.setattr(gpu, "found", lambda: (gpu.Gpu("a GPU", (8, 9), 24 * GIB),))
    monkeypatch.setattr(gpu, "free_bytes", lambda: 22 * GIB)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    folder = header_checkpoints.write(tmp_path / "qwen", *header_checkpoints.qwen36(nvfp4=False))
    summary = checkpoint.summarize(folder, needs_tokenizer=False)

    def start(*argv: str, **settings):
        parser = argparse.ArgumentParser()
        parser.add_argument("--context-length", type=int)
        allocation.add_arguments(parser)
        made, flags = allocation.plan(FtConfig(**settings), parser.parse_args(argv), summary)
        return made, dict(zip(flags[::2], flags[1::2], strict=True)), Allotment.inherited(os.environ)

    return start


def test_everything_that_is_planned_is_told(start):
    made, flags, allotment = start()
    assert flags.pop("--mem-fraction-static").startswith("0.")
    assert flags == {
        "--max-running-requests": str(made.requests),
        "--chunked-prefill-size": str(made.chunk),
        "--max-total-tokens": str(made.kv_tokens),
        "--max-mamba-cache-size": str(made.states),
    }
    assert allotment is not None and allotment.experts == made.experts and allotment.budget == 0
    dense = next(item.nbytes for item in made.items if item.name == "dense weights")
    slots = made.experts.slots * 6 * (1 << 20)
    assert made.total("gpu") == pytest.approx(dense + slots + allotment.beside + 0.75 * GIB, rel=1e-3)
    assert 21 * GIB < made.total("gpu") <= 22 * GIB, "what is free, not what the GPU has"


def test_the_user_s_flags_win_and_the_plan_is_made_around_them(start):
    given = {
        "--max-running-requests": "2",
        "--chunked-prefill-size": "3000",
        "--max-total-tokens": "50000",
        "--max-mamba-cache-size": "9",
        "--mem-fraction-static": "0.7",
    }
    made, flags, _ = start(*(word for pair in given.items() for word in pair))
    assert flags == {}
    assert (made.requests, made.chunk, made.kv_tokens) == (2, 3000, 50_000)
    more, _, _ = start("--context-length", "65536")
    assert more.kv_tokens >= 65536


def test_a_budget_is_what_all_of_it_fits_in(start):
    made, _, allotment = start(vram_budget="12GiB")
    assert 11 * GIB < made.total("gpu") <= 12 * GIB and allotment.budget == 12 * GIB
    wide, _, _ = start(vram_budget="200GiB")
    assert wide.total("gpu") <= 22 * GIB, "no more than there is"


@pytest.mark.parametrize(
    "argv, settings, words",
    [
        (
            (),
            {"vram_budget": "3GiB"},
            r"^3\.00 GiB \(--ft-vram-budget\) are not enough: the GPU lacks .* \(mend: ",
        ),
        (("--context-length", "400000"), {}, r"the model was made for .*--context 262144"),
        ((), {"slots": 9000}, r"--ft-slots 9000 need 52\.73 GiB of GPU memory"),
    ],
)
def test_what_does_not_fit_is_refused_with_its_cure(start, argv, settings, words):
    with pytest.raises(MemoryBudgetError, match=words):
        start(*argv, **settings)


def test_without_a_plan_there_is_none():
    assert Allotment.inherited({}) is None
    plan = Allotment(GpuPlan("cache", 5, 2), 7, 11, 13, 17, 19)
    os.environ.pop("SGLANG_FT_PLAN", None)
    plan.publish()
    assert Allotment.inherited(os.environ) == plan
    del os.environ["SGLANG_FT_PLAN"]
