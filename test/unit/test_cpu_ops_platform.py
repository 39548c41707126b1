"""What the CPU platform decides: when it is active, which requests decode together, how much it keeps."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from sglang_ft.engine import cpu_platform
from sglang_ft.engine.cpu_platform.attend import Scoring, attend, attend_sequence, decode_groups


def test_platform_is_active_only_when_the_launcher_chose_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(cpu_platform.PLATFORM_VARIABLE, raising=False)
    assert cpu_platform.activate() is None
    monkeypatch.setenv(cpu_platform.PLATFORM_VARIABLE, "gpu")
    assert cpu_platform.activate() is None
    monkeypatch.setenv(
        cpu_platform.PLATFORM_VARIABLE, cpu_platform.required_environment()[cpu_platform.PLATFORM_VARIABLE]
    )
    assert cpu_platform.activate() == "sglang_ft.engine.cpu_platform.platform.TorchCpuPlatform"


def test_looking_for_the_platform_imports_neither_torch_nor_sglang() -> None:
    code = (
        "import sys; from sglang_ft.engine import cpu_platform; cpu_platform.activate();"
        "assert not {'torch', 'sglang'} & set(sys.modules), 'imported'"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_requests_of_similar_length_decode_together_with_little_padding() -> None:
    lengths = torch.tensor([1, 900, 3, 2, 1000, 17, 512])
    table = torch.arange(8 * 1024).view(8, 1024)
    groups = decode_groups(lengths, table, torch.arange(1, 8), None)
    assert sorted(row for group in groups for row in group.rows.tolist()) == list(range(7))
    for group in groups:
        assert group.mask.sum() * 2 >= group.mask.numel()
        for row, slots, mask in zip(group.rows.tolist(), group.slots, group.mask[:, 0], strict=True):
            assert slots[mask].tolist() == table[row + 1, : lengths[row]].tolist()


def test_a_window_leaves_only_the_newest_tokens() -> None:
    table = torch.arange(3 * 64).view(3, 64)
    groups = decode_groups(torch.tensor([2, 40, 5]), table, torch.arange(3), window=4)
    seen = {
        row: slots[mask].tolist()
        for group in groups
        for row, slots, mask in zip(group.rows.tolist(), group.slots, group.mask[:, 0], strict=True)
    }
    assert seen == {0: [0, 1], 1: list(range(64 + 35, 64 + 40)), 2: list(range(128, 133))}


@pytest.mark.parametrize("window", [None, 4])
def test_decoding_in_a_group_equals_each_request_alone(window: int | None) -> None:
    lengths, table = torch.tensor([9, 1, 12, 15]), torch.randperm(64).view(4, 16)
    keys, values, q = torch.randn(64, 2, 8), torch.randn(64, 2, 8), torch.randn(4, 6, 8)
    scoring = Scoring(0.3, window=window, sinks=torch.randn(6))
    for group in decode_groups(lengths, table, torch.arange(4), window):
        together = attend(q[group.rows, None], keys[group.slots], values[group.slots], group.mask, scoring)
        for i, row in enumerate(group.rows.tolist()):
            slots = table[row, : lengths[row]]
            alone = attend_sequence(q[row : row + 1], keys[slots], values[slots], scoring)
            torch.testing.assert_close(together[i], alone)
