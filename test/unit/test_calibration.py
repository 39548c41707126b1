"""Calibration without a GPU: what is kept between starts, and the line through measured times."""

import json
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_ft.calibration import store
from sglang_ft.calibration.measure import _line
from sglang_ft.experts.policy import BranchTimes

TIMES = BranchTimes(1e-5, 1.2e-4, 2e-5, 9e-5)
KEY = store.key("GPU", "CPU", 6, "amx", "bf16", 2048, 512)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "sglang-ft" / "calibration.json"


def test_times_come_back_and_others_stay(cache):
    assert store.path() == cache
    assert store.load(KEY) is None
    store.save(KEY, TIMES)
    other = BranchTimes(1.0, 2.0, 3.0, 4.0)
    store.save("other", other)
    assert (store.load(KEY), store.load("other")) == (TIMES, other)
    store.save(KEY, other)
    assert store.load(KEY) == other
    assert os.listdir(cache.parent) == ["calibration.json"], "no temporary file is left"


def test_every_part_of_the_key_counts():
    parts = ["GPU", "CPU", 6, "amx", "bf16", 2048, 512]
    changed = ["gpu", "cpu", 7, "avx512", "fp16", 2049, 513]
    keys = {store.key(*parts[:i], changed[i], *parts[i + 1 :]) for i in range(len(parts))}
    assert len(keys | {KEY}) == len(parts) + 1


def test_the_home_folder_is_used_without_xdg(monkeypatch, tmp_path):
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert store.path() == tmp_path / ".cache" / "sglang-ft" / "calibration.json"


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        "null",
        '"text"',
        b"\xff\xfe",
        json.dumps({KEY: {"link_fixed": 1}}),
        json.dumps({KEY: 3}),
    ],
    ids=repr,
)
def test_a_file_that_is_no_use_means_measuring_again(cache, content):
    cache.parent.mkdir()
    cache.write_bytes(content if isinstance(content, bytes) else content.encode())
    assert store.load(KEY) is None
    store.save(KEY, TIMES)
    assert store.load(KEY) == TIMES


def test_times_that_are_no_positive_numbers_are_not_taken(cache):
    for wrong in ("1", None, -1.0, 0.0, float("nan"), float("inf"), [1]):
        cache.parent.mkdir(exist_ok=True)
        cache.write_text(json.dumps({KEY: vars(TIMES) | {"link_expert": wrong}}))
        assert store.load(KEY) is None, wrong


def test_a_folder_that_cannot_be_made_is_no_error(cache):
    cache.parent.parent.joinpath("sglang-ft").write_text("a file")
    store.save(KEY, TIMES)
    assert store.load(KEY) is None


@given(st.floats(0, 1e-3), st.floats(1e-6, 1e-2), st.lists(st.integers(1, 16), min_size=2, unique=True))
def test_points_on_a_line_give_the_line(fixed, slope, counts):
    assert _line([(n, fixed + slope * n) for n in counts]) == pytest.approx(
        (fixed, slope), rel=1e-6, abs=1e-9
    )


def test_one_point_alone_goes_through_zero():
    assert _line([(4, 2.0)]) == (0.0, 0.5)


def test_neither_part_is_negative():
    fixed, slope = _line([(1, 3.0), (2, 2.0), (3, 1.0)])
    assert fixed > 0 and 0 < slope < 1e-6, "slower for fewer: the line is flat"
    fixed, slope = _line([(1, 1.0), (2, 3.0), (3, 5.0)])
    assert (fixed, slope) == (0.0, pytest.approx(2.0))
