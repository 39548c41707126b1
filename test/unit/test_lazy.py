"""Lazy tensors: whatever a weight loader does with them ends in the same bits as with real ones."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from sglang_ft.errors import CheckpointError
from sglang_ft.weights import lazy
from sglang_ft.weights.lazy import Ahead, LazyTensor, Reads

TENSORS = {
    "a": torch.randn(8, 96, 64).bfloat16(),
    "b": torch.randn(33, 7),
    "c": torch.randn(5).half(),
    "d": torch.randint(0, 255, (4, 3, 5), dtype=torch.uint8),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("lazy")
    save_file({k: TENSORS[k] for k in "ab"}, path / "one.safetensors")
    save_file({k: TENSORS[k] for k in "cd"}, path / "two.safetensors")
    return path


@pytest.fixture(params=["whole", "in pieces", "by threads"])
def reads(folder, request, monkeypatch):
    if request.param == "in pieces":
        monkeypatch.setattr(lazy, "_PIECE", 4096)
    reads = Reads(folder, by_kernel=request.param != "by threads")
    yield reads
    reads.close()


VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "whole": lambda t: t,
    "one expert": lambda t: t[3],
    "narrow": lambda t: t.narrow(1, 16, 48),
    "chunk": lambda t: t.chunk(2, dim=1)[1],
    "split": lambda t: t.split([32, 64], dim=1)[1],
    "transposed": lambda t: t.transpose(1, 2),
    "of one expert, transposed": lambda t: t[2].t(),
    "every second row": lambda t: t[:, ::2],
    "view": lambda t: t.view(8, 2, 48, 64)[:, 1],
    "permuted and sliced": lambda t: t.permute(2, 0, 1)[5:, 1:3],
    "one row": lambda t: t[7, 95],
    "one element": lambda t: t[0, 0, 3],
    "reshaped, unsqueezed": lambda t: t.reshape(8, -1).unsqueeze(0),
    "detached data": lambda t: t.detach().data,
}


@pytest.mark.parametrize("view", VIEWS)
def test_views_arrive_where_they_are_copied(reads, view):
    want = VIEWS[view](TENSORS["a"])
    got = VIEWS[view](reads.tensor("a"))
    assert isinstance(got, LazyTensor) and got.shape == want.shape and got.dtype == want.dtype
    to = torch.zeros(want.shape, dtype=want.dtype)
    to.copy_(got)
    reads.wait()
    assert torch.equal(to, want)


def test_targets_may_be_views_and_of_another_type(reads):
    bank = torch.zeros(8, 192, 64)
    for expert in range(8):
        bank[expert].narrow(0, 96, 96).copy_(reads.tensor("a")[expert])
    bank[0, :5, 0] = reads.tensor("c")
    reads.wait()
    assert torch.equal(bank[:, 96:], TENSORS["a"].float())
    assert torch.equal(bank[0, :5, 0], TENSORS["c"].float())


@pytest.mark.parametrize(
    "work",
    [
        lambda t: t + 1,
        lambda t: t.float(),
        lambda t: t.contiguous(),
        lambda t: t.transpose(0, 1).contiguous(),
        lambda t: torch.cat([t, t]),
        lambda t: t.sum(),
        lambda t: t.clone(),
        lambda t: t.to(torch.float16)[2:],
    ],
)
@pytest.mark.parametrize("name", ["a", "b", "d"])
def test_what_needs_data_reads_it(reads, work, name):
    assert torch.equal(work(reads.tensor(name)), work(TENSORS[name]))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=200, deadline=None)
@given(st.data())
def test_any_slices(folder, data):
    reads = Reads(folder)
    name = data.draw(st.sampled_from("abd"))
    lazy_one, real = reads.tensor(name), TENSORS[name]
    for _ in range(data.draw(st.integers(1, 3))):
        dim = data.draw(st.integers(0, real.dim() - 1))
        begin = data.draw(st.integers(0, real.shape[dim] - 1))
        length = data.draw(st.integers(1, real.shape[dim] - begin))
        lazy_one, real = lazy_one.narrow(dim, begin, length), real.narrow(dim, begin, length)
        if data.draw(st.booleans()):
            other = data.draw(st.integers(0, real.dim() - 1))
            lazy_one, real = lazy_one.transpose(dim, other), real.transpose(dim, other)
    to = torch.empty(real.shape, dtype=real.dtype)
    to.copy_(lazy_one)
    reads.wait()
    reads.close()
    assert torch.equal(to, real)


@pytest.mark.parametrize("most", [1, 1000, 1 << 30])
@pytest.mark.parametrize("order", ["abcd", "dcba", "bdca", "cad"])
def test_tensors_read_ahead_come_in_any_order(reads, most, order):
    ahead = Ahead(reads, reads.names(), most)
    for name in order:
        assert torch.equal(ahead.take(name), TENSORS[name])
    assert ahead.take("nothing") is None
    assert torch.equal(ahead.take(order[0]), TENSORS[order[0]]), "asked for again it is read again"


def test_no_more_is_read_ahead_than_allowed(reads):
    names = reads.names()
    assert set(names[:2]) == {"a", "b"} and set(names[2:]) == {"c", "d"}, "file by file"
    ahead = Ahead(reads, names, most_bytes=1)
    for name in names:
        ahead.take(name)
        assert not ahead._started, "only what was asked for"
    ahead = Ahead(reads, names)
    ahead.take(names[0])
    assert set(ahead._started) == set(names[1:])
    assert ahead._bytes == sum(TENSORS[name].nbytes for name in names[1:])


def test_progress_counts_every_byte(folder):
    counted = []
    reads = Reads(folder, lambda address, nbytes: counted.append(nbytes))
    for name, tensor in TENSORS.items():
        torch.empty(tensor.shape, dtype=tensor.dtype).copy_(reads.tensor(name))
    reads.wait()
    reads.close()
    assert sum(counted) == sum(t.nbytes for t in TENSORS.values())


def test_progress_says_where_the_bytes_went(folder):
    told: list[tuple[int, int]] = []
    reads = Reads(folder, lambda address, nbytes: told.append((address, nbytes)))
    to = torch.zeros(3, *TENSORS["a"].shape[1:], dtype=torch.bfloat16)
    to[1:].copy_(reads.tensor("a")[2:4])
    reads.wait()
    reads.close()
    begin, total = to[1].data_ptr(), to[1:].nbytes
    assert sum(n for _, n in told) == total
    assert min(a for a, _ in told) == begin and max(a + n for a, n in told) == begin + total


def test_what_no_file_has_is_none(reads):
    assert reads.tensor("nothing") is None


def test_a_failing_read_is_raised_with_its_tensor(tmp_path):
    save_file({"x": torch.ones(5000)}, tmp_path / "x.safetensors")
    reads = Reads(tmp_path)
    (tmp_path / "x.safetensors").write_bytes((tmp_path / "x.safetensors").read_bytes()[:9000])
    torch.empty(5000).copy_(reads.tensor("x"))
    with pytest.raises(CheckpointError, match="x: .*x.safetensors"):
        reads.wait()
    reads.close()
