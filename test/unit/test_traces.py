"""Route traces: the file survives cuts and refuses what it is not; synthetic ones miss as often as they are to."""

import numpy as np
import pytest
import torch

from sglang_ft.errors import TraceError
from sglang_ft.experts.replay import find_locality, replay
from sglang_ft.experts.traces import (
    TraceHeader,
    TraceWriter,
    read_trace,
    side_by_side,
    synthetic_trace,
    write_trace,
)

HEADER = TraceHeader(num_layers=3, num_experts=300, top_k=2, model="a model", made_by="a test")
ROWS = (2, 1, 5, 1)
RECORD_BYTES = 4 + 3 * 2 * 2


def steps(seed=0):
    random = np.random.default_rng(seed)
    return [random.integers(-1, 300, (rows, 3, 2)) for rows in ROWS]


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "a.trace"
    with TraceWriter(path, HEADER) as writer:
        for step in steps():
            writer.append(step)
    return path


def test_steps_of_any_number_of_rows_are_read_as_they_were_written(file):
    trace = read_trace(file)
    assert trace.header == HEADER
    assert trace.cut_bytes == 0
    assert trace.num_steps == len(ROWS)
    for got, want in zip(trace, steps(), strict=True):
        np.testing.assert_array_equal(got, want)


def test_the_last_steps(file):
    trace = read_trace(file)
    for count in range(1, len(ROWS) + 1):
        last = trace.last(count)
        assert last.num_steps == count and last.routes.base is not None
        for got, want in zip(last, steps()[-count:], strict=True):
            np.testing.assert_array_equal(got, want)
    for count in (0, len(ROWS) + 1):
        with pytest.raises(TraceError, match="has no last"):
            trace.last(count)


def test_the_file_is_mapped_not_loaded(file):
    routes = read_trace(file).routes
    assert isinstance(routes.base, np.memmap) and not routes.flags.writeable


def test_torch_tensors_and_empty_steps_are_taken(tmp_path):
    with TraceWriter(tmp_path / "t", HEADER) as writer:
        writer.append(torch.zeros(0, 3, 2, dtype=torch.int32))
        writer.append(torch.full((1, 3, 2), 299, dtype=torch.int32))
    assert read_trace(tmp_path / "t").step(0).tolist() == [[[299, 299]] * 3]


def test_a_file_cut_anywhere_is_good_up_to_its_last_whole_step(file, tmp_path):
    data = file.read_bytes()
    begin = len(data) - sum(ROWS) * RECORD_BYTES
    ends = begin + np.cumsum(ROWS) * RECORD_BYTES
    for size in range(len(data)):
        cut = tmp_path / "cut"
        cut.write_bytes(data[:size])
        whole = int((ends <= size).sum())
        if whole == 0:
            with pytest.raises(TraceError, match=r"not a route trace|cut"):
                read_trace(cut)
            continue
        trace = read_trace(cut)
        assert trace.num_steps == whole
        assert trace.cut_bytes == size - ends[whole - 1]
        np.testing.assert_array_equal(trace.step(whole - 1), steps()[whole - 1])


def test_a_file_can_be_read_while_it_is_written(tmp_path):
    with TraceWriter(tmp_path / "t", HEADER) as writer:
        for number, step in enumerate(steps(), start=1):
            writer.append(step)
            assert read_trace(tmp_path / "t").num_steps == number


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: b"PK" + data[2:], "not a route trace"),
        (lambda data: data[:8] + b"\x02" + data[9:], "version 2"),
        (lambda data: data.replace(b'"top_k"', b'"top_x"'), "damaged in its header"),
        (lambda data: data.replace(b'"num_layers": 3', b'"num_layers": 0'), "at least 1"),
        (lambda data: data[: -4 * RECORD_BYTES] + data[-3 * RECORD_BYTES :], "damaged at byte"),
        (lambda data: data.replace(b'"num_experts": 300', b'"num_experts": 100'), "has 100 experts"),
    ],
)
def test_a_wrong_file_is_refused_with_its_reason(file, change, message):
    file.write_bytes(change(file.read_bytes()))
    with pytest.raises(TraceError, match=message) as error:
        read_trace(file)
    assert file.name in str(error.value) or message == "at least 1"


def test_a_missing_file_and_a_folder_are_refused(tmp_path):
    for path in (tmp_path / "none", tmp_path):
        with pytest.raises(TraceError, match="cannot be read"):
            read_trace(path)


def test_the_writer_refuses_an_existing_file_a_wrong_shape_and_an_unknown_expert(file, tmp_path):
    with pytest.raises(TraceError, match="exists"):
        TraceWriter(file, HEADER)
    with pytest.raises(TraceError, match="cannot be made"):
        TraceWriter(tmp_path / "no" / "folder", HEADER)
    with TraceWriter(tmp_path / "t", HEADER) as writer:
        with pytest.raises(TraceError, match=r"not \[1, 2, 3\]"):
            writer.append(np.zeros((1, 2, 3), int))
        with pytest.raises(TraceError, match="300 experts"):
            writer.append(np.full((1, 3, 2), 300))
        writer.append(np.zeros((1, 3, 2), int))
    assert read_trace(tmp_path / "t").num_steps == 1


def test_a_step_that_does_not_fit_the_disk_is_taken_back(tmp_path):
    resource = pytest.importorskip("resource")
    signal = pytest.importorskip("signal")
    path = tmp_path / "t"
    with TraceWriter(path, HEADER) as writer:
        writer.append(steps()[0])
        old = resource.getrlimit(resource.RLIMIT_FSIZE)
        handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + RECORD_BYTES + 3, old[1]))
            with pytest.raises(TraceError, match="cannot be written: File too large"):
                writer.append(steps()[2])
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, old)
            signal.signal(signal.SIGXFSZ, handler)
        writer.append(steps()[3])
    trace = read_trace(path)
    np.testing.assert_array_equal(trace.step(1), steps()[3])
    assert (trace.num_steps, trace.cut_bytes) == (2, 0)


def test_stretches_side_by_side_are_requests_that_run_at_once():
    trace = synthetic_trace(2, 8, 2, steps=10, locality=0.5, seed=1, sequences=2)
    together = side_by_side(trace.stretches(3))
    assert together.num_steps == 3
    for i in range(3):
        want = np.concatenate([trace.step(i), trace.step(3 + i), trace.step(6 + i)])
        np.testing.assert_array_equal(together.step(i), want)
    with pytest.raises(TraceError, match="cannot be cut into 11"):
        trace.stretches(11)
    with pytest.raises(TraceError, match="different models"):
        side_by_side([trace, synthetic_trace(2, 9, 2, 10, 0.5, 1)])


def test_a_synthetic_trace_is_routes_of_distinct_experts_and_the_same_for_a_seed(tmp_path):
    trace = synthetic_trace(3, 16, 4, steps=50, locality=0.7, seed=5, sequences=2)
    assert trace.routes.shape == (100, 3, 4)
    assert all(len(set(row)) == 4 for row in trace.routes.reshape(-1, 4).tolist())
    again = synthetic_trace(3, 16, 4, steps=50, locality=0.7, seed=5, sequences=2)
    np.testing.assert_array_equal(trace.routes, again.routes)
    write_trace(tmp_path / "t", trace)
    np.testing.assert_array_equal(read_trace(tmp_path / "t").routes, trace.routes)


@pytest.mark.parametrize(
    ("shape", "locality", "share", "miss_rate"),
    [((40, 256, 8), 0.496, 0.37, 0.16), ((43, 256, 6), 0.868, 0.11, 0.39)],
)
def test_the_miss_rates_of_the_paper(shape, locality, share, miss_rate):
    trace = synthetic_trace(*shape, steps=300, locality=locality, seed=7)
    result = replay(trace, round(share * shape[0] * shape[1]), warmup=150)
    assert result.miss_rate == pytest.approx(miss_rate, abs=0.01)


def test_the_locality_for_a_miss_rate_is_found():
    locality = find_locality(4, 64, 4, share=0.4, miss_rate=0.2, steps=300)
    rate = replay(synthetic_trace(4, 64, 4, 300, locality, seed=0), round(0.4 * 4 * 64), warmup=150).miss_rate
    assert rate == pytest.approx(0.2, abs=0.01)
    with pytest.raises(TraceError, match=r"never 95\.0%"):
        find_locality(4, 64, 4, share=0.4, miss_rate=0.95, steps=300)


def test_uniform_routes_miss_what_is_not_in_a_slot():
    rate = replay(synthetic_trace(4, 256, 2, 1000, locality=0.0, seed=3), 512, warmup=500).miss_rate
    assert rate == pytest.approx(0.5, abs=0.02)
