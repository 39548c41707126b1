"""sglang-ft bench: synthetic traces written, replayed, and what users get wrong."""

import json

import pytest

from sglang_ft.cli.main import main
from sglang_ft.experts.replay import POLICIES, replay
from sglang_ft.experts.traces import read_trace

SHAPE = ["--num-layers", "3", "--num-experts", "32", "--top-k", "4"]


@pytest.fixture
def trace(tmp_path, capsys):
    path = str(tmp_path / "routes")
    assert main(["bench", "trace", path, *SHAPE, "--steps", "120", "--locality", "0.6"]) == 0
    assert "wrote" in capsys.readouterr().out
    return path


def run_json(capsys, *arguments):
    assert main(["bench", "replay", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_table_has_a_line_for_each_size_and_policy(trace, capsys):
    assert main(["bench", "replay", trace, "--shares", "0.25", "0.5"]) == 0
    text = capsys.readouterr().out
    assert "synthetic, locality 0.6, seed 0: 3 layers x 32 experts, top 4" in text
    lines = [line.split() for line in text.splitlines() if "%" in line]
    assert [(line[1], line[2]) for line in lines] == [(n, p) for n in ("24", "48") for p in POLICIES]
    for line in lines:
        chances = [float(cell.rstrip("%")) for cell in line[6:]]
        assert len(chances) == 5, "0 to top_k misses"
        assert sum(chances) == pytest.approx(100, abs=0.3)
        mean = sum(m * chance / 100 for m, chance in enumerate(chances))
        assert mean == pytest.approx(float(line[4]), abs=0.02)


def test_json_gives_every_counter(trace, capsys):
    got = run_json(capsys, trace, "--slots", "24", "--policies", "lru", "--warmup", "20")
    want = replay(read_trace(trace), 24, warmup=20)
    (result,) = got["results"]
    assert result["counters"] == vars(want.counters)
    assert result["distribution"] == want.distribution
    assert (got["steps"], got["fills"], got["trace"]["num_experts"]) == (120, "all", 32)


def test_a_split_leaves_misses_to_the_cpu(trace, capsys):
    arguments = (trace, "--slots", "24", "--policies", "lru", "--warmup", "20", "--fills", "split")
    slow, fast = (
        run_json(capsys, *arguments, "--link-share", share)["results"][0]["counters"]
        for share in ("0.2", "0.6")
    )
    assert all(c["fills"] + c["job_experts"] == c["misses"] for c in (slow, fast))
    assert 0 < slow["fills"] / slow["misses"] < fast["fills"] / fast["misses"] < 1


def test_several_requests_at_once(trace, capsys):
    got = run_json(capsys, trace, "--slots", "24", "--sequences", "4")
    assert (got["steps"], got["rows"]) == (30, 120)
    assert main(["bench", "replay", trace, "--slots", "24", "--sequences", "4"]) == 0
    assert " 4+" in capsys.readouterr().out, "a step of four rows can miss more than top_k experts"


def test_a_trace_for_a_wanted_miss_rate(tmp_path, capsys):
    path = str(tmp_path / "routes")
    wanted = ["--miss-rate", "0.3", "--share", "0.4", "--steps", "400"]
    assert main(["bench", "trace", path, *SHAPE, *wanted]) == 0
    capsys.readouterr()
    got = run_json(capsys, path, "--shares", "0.4", "--policies", "lru", "--warmup", "100")
    assert got["results"][0]["miss_rate"] == pytest.approx(0.3, abs=0.03)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["replay", "nowhere"], "nowhere: cannot be read: No such file or directory"),
        (["trace", "nowhere", *SHAPE, "--locality", "1", "--steps", "0"], "--steps and --sequences"),
        (["trace", "nowhere", *SHAPE[:-1], "64", "--locality", "1"], "--top-k is at most --num-experts"),
        (["trace", "nowhere", *SHAPE, "--miss-rate", "0.99"], "never 99.0%"),
    ],
)
def test_mistakes_are_one_message(arguments, message, capsys):
    assert main(["bench", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_wrong_sizes_are_one_message(trace, capsys):
    for arguments in (["--slots", "0"], ["--warmup", "120"], ["--sequences", "0"], ["--link-share", "1"]):
        assert main(["bench", "replay", trace, *arguments]) == 2
        assert capsys.readouterr().err.startswith("sglang-ft: ")
