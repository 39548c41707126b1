"""Memory nodes, from made-up machines; and the system call itself, where this kernel has it."""

from __future__ import annotations

import ctypes
import errno
import platform
from pathlib import Path

import pytest

from sglang_ft.worker import numa
from sglang_ft.worker.memory import MemoryFile


def machine(folder: Path, has_memory: str, allowed: str) -> dict[str, Path]:
    (folder / "has_memory").write_text(has_memory)
    (folder / "status").write_text(f"Name:\tpython\nMems_allowed:\t3\nMems_allowed_list:\t{allowed}\n")
    return {"root": folder, "status": folder / "status"}


@pytest.mark.parametrize(
    "has_memory, allowed, want",
    [
        ("0\n", "0", [0]),
        ("0-1\n", "0-1", [0, 1]),
        ("0-3,8\n", "0-63", [0, 1, 2, 3, 8]),
        ("0-3\n", "1,3", [1, 3]),
        ("0-1\n", "1", [1]),
        ("\n", "0", []),
        ("nonsense\n", "0", []),
    ],
)
def test_nodes_with_memory_that_may_be_used(tmp_path, has_memory, allowed, want):
    assert numa.memory_nodes(**machine(tmp_path, has_memory, allowed)) == want


def test_a_kernel_that_tells_nothing(tmp_path):
    assert numa.memory_nodes(tmp_path, tmp_path / "status") == []


@pytest.fixture
def calls(monkeypatch):
    made = []

    def mbind(number, address, nbytes, nodes):
        made.append((address, nbytes, nodes))
        return calls.error

    calls.error = 0
    monkeypatch.setattr(numa, "_mbind", mbind)
    monkeypatch.setattr(numa.platform, "machine", lambda: "x86_64")
    return made


def test_one_node_needs_nothing(calls):
    assert not numa.spread(4096, 100, [0]) and not numa.spread(4096, 100, []) and not calls


def test_several_nodes_share_the_memory(calls):
    assert numa.spread(4096, 100, [0, 1, 3]) and calls == [(4096, 100, [0, 1, 3])]


def test_a_refusal_is_told_and_costs_only_speed(calls, monkeypatch, caplog):
    monkeypatch.setattr(numa, "_mbind", lambda *args: errno.EPERM)
    assert not numa.spread(4096, 100, [0, 1])
    assert "numactl" in caplog.text and "not permitted" in caplog.text


def test_an_unknown_machine_is_left_alone(calls, monkeypatch):
    monkeypatch.setattr(numa.platform, "machine", lambda: "riscv64")
    assert not numa.spread(4096, 100, [0, 1]) and not calls


def test_the_kernel_takes_the_call():
    number = numa._MBIND.get(platform.machine())
    nodes = numa.memory_nodes()
    if number is None or not nodes:
        pytest.skip("no memory nodes here")
    file = MemoryFile("ft-test-numa", 8 << 20)
    error = numa._mbind(number, file.address, file.size, nodes)
    if error == errno.EPERM:
        pytest.skip("this container forbids it")
    assert error == 0
    mode, get_mempolicy = ctypes.c_int(), {"x86_64": 239, "aarch64": 236}[platform.machine()]
    by_address = 2
    result = numa._libc.syscall(
        ctypes.c_long(get_mempolicy),
        ctypes.byref(mode),
        None,
        ctypes.c_ulong(0),
        ctypes.c_void_p(file.address),
        ctypes.c_ulong(by_address),
    )
    assert result == 0 and mode.value == numa._MPOL_INTERLEAVE
    file.bytes.fill_(3)
    assert numa._mbind(number, file.address, file.size, [900]) == errno.EINVAL, "a node that is not there"
    file.close()
