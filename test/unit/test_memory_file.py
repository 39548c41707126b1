"""Memory files: huge pages where the kernel gives them, and what is left of a file when it goes."""

import gc
from pathlib import Path

import pytest
import torch

from sglang_ft.errors import MemoryBudgetError
from sglang_ft.worker import memory
from sglang_ft.worker.memory import HUGE_PAGE, MemoryFile


def mappings(name: str) -> list[str]:
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if name in line]


@pytest.mark.parametrize("size", [1, 4096, HUGE_PAGE, 3 * HUGE_PAGE + 12345, 40 * HUGE_PAGE])
def test_huge_pages_change_nothing_but_speed(size):
    file = MemoryFile("ft-test-huge", size)
    assert file.address % HUGE_PAGE == 0
    huge = file.allocate_huge()
    assert huge % HUGE_PAGE == 0 and huge <= size
    assert not file.bytes.any(), "it is still empty"
    file.bytes.copy_(torch.arange(size).to(torch.uint8))
    file.seal_writes()
    assert torch.equal(file.bytes, torch.arange(size).to(torch.uint8))
    file.close()


def test_a_kernel_without_them_leaves_small_pages(monkeypatch):
    monkeypatch.setattr(memory, "_COLLAPSE", 12345)
    file = MemoryFile("ft-test-small", 4 * HUGE_PAGE)
    assert file.allocate_huge() == 0
    file.bytes.fill_(7)
    assert file.bytes.sum() == 7 * 4 * HUGE_PAGE
    file.close()


def test_the_mapping_goes_with_the_last_tensor():
    before = len(Path("/proc/self/maps").read_text().splitlines())
    for _ in range(20):
        file = MemoryFile("ft-test-life", HUGE_PAGE + 5)
        view = file.view(2, (3,), torch.uint8)
        file.close()
        del file
        assert mappings("ft-test-life") and view.sum() == 0
        del view
    gc.collect()
    assert not mappings("ft-test-life")
    assert len(Path("/proc/self/maps").read_text().splitlines()) < before + 15


def test_more_than_the_address_space_is_refused_in_words():
    with pytest.raises(MemoryBudgetError, match="cannot map"):
        MemoryFile("ft-test-large", 1 << 60)
