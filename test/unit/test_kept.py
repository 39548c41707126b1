"""Kept pools: real keeper processes, servers that are killed, and everything that must not be taken for a pool."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import stat
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import save_file

from sglang_ft.cli.main import main as cli
from sglang_ft.experts.bank import plan_banks
from sglang_ft.experts.formats import LayerSpec, find_format
from sglang_ft.weights import keeper, kept
from sglang_ft.worker.memory import MemoryFile

PLAN = plan_banks([LayerSpec(find_format(None, "bfloat16"), 4, 64, 32)] * 2)
NBYTES = PLAN.nbytes
IDENTITY = "1f" * 32
NAME = IDENTITY[:16]


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    """No pool of the user's is touched, and no keeper outlives its test."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    (tmp_path / "run").mkdir()
    yield keeper.folder()
    with contextlib.suppress(OSError):
        for pool in kept.pools():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pool.pid, signal.SIGKILL)


def full_pool() -> MemoryFile:
    file = MemoryFile("ft-test-pool", NBYTES)
    file.bytes.copy_(torch.arange(NBYTES).to(torch.uint8))
    file.seal_writes()
    return file


def is_full(file: MemoryFile) -> bool:
    return torch.equal(file.bytes, torch.arange(NBYTES).to(torch.uint8))


def hand_over(seconds: float = 600, identity: str = IDENTITY, model: str = "model"):
    file = full_pool()
    lease = kept.hand_over(file, identity, model, NBYTES, seconds)
    assert lease is not None
    file.close()
    return lease


def wait_until(condition, seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it does not come true"
        time.sleep(0.02)


def only() -> kept.Kept:
    (pool,) = kept.pools()
    return pool


def test_the_next_server_gets_the_same_memory():
    first = hand_over()
    file, second = kept.take(IDENTITY, NBYTES, 600)
    assert is_full(file) and only().servers == 2
    first.close()
    second.close()
    wait_until(lambda: only().servers == 0)
    again, third = kept.take(IDENTITY, NBYTES, 600)
    assert is_full(again) and os.fstat(again.fd).st_ino == os.fstat(file.fd).st_ino
    third.close()


SERVER = """
import os, sys, signal
sys.path.insert(0, sys.argv[1])
from test_kept import hand_over, IDENTITY
lease = hand_over()
print(os.getpid(), flush=True)
signal.pause()
"""


def test_a_killed_server_leaves_its_pool():
    server = subprocess.Popen(
        [sys.executable, "-c", SERVER, str(Path(__file__).parent)], stdout=subprocess.PIPE, text=True
    )
    assert int(server.stdout.readline()) == server.pid
    assert only().servers == 1
    assert psutil.Process(only().pid).ppid() != server.pid, "a server that ends with its children leaves it"
    children = psutil.Process(server.pid).children(recursive=True)
    assert only().pid not in [child.pid for child in children]
    server.kill()
    server.wait()
    wait_until(lambda: only().servers == 0)
    file, lease = kept.take(IDENTITY, NBYTES, 600)
    assert is_full(file)
    lease.close()


def test_it_ends_some_time_after_its_last_server():
    lease = hand_over(seconds=0.3)
    pid = only().pid
    time.sleep(0.6)
    assert only().ends_in_s is None, "not while a server is there"
    lease.close()
    wait_until(lambda: not psutil.pid_exists(pid))
    assert kept.pools() == [] and not list(keeper.folder().iterdir())
    assert kept.take(IDENTITY, NBYTES, 600) is None


def test_a_later_server_says_how_long():
    hand_over(seconds=600).close()
    _, lease = kept.take(IDENTITY, NBYTES, 0.1)
    pid = only().pid
    lease.close()
    wait_until(lambda: not psutil.pid_exists(pid))


def test_a_killed_keeper_leaves_nothing_in_the_way():
    lease = hand_over()
    os.kill(only().pid, signal.SIGKILL)
    wait_until(lambda: kept.pools() == [])
    assert kept.take(IDENTITY, NBYTES, 600) is None
    assert not list(keeper.folder().iterdir())
    lease.close()
    hand_over().close()
    assert kept.take(IDENTITY, NBYTES, 600) is not None


def test_a_keeper_that_hangs_delays_a_start_and_no_more(monkeypatch):
    monkeypatch.setattr(kept, "_ANSWER_S", 0.2)
    hand_over().close()
    pid = only().pid
    os.kill(pid, signal.SIGSTOP)
    try:
        assert kept.take(IDENTITY, NBYTES, 600) is None
        assert kept.pools() == [] and kept.usable_bytes() == 0 and kept.drop_idle() == 0
    finally:
        os.kill(pid, signal.SIGCONT)
    wait_until(lambda: len(kept.pools()) == 1)


@pytest.mark.parametrize(
    "identity, nbytes", [("2e" * 32, NBYTES), (NAME + "0" * 48, NBYTES), (IDENTITY, NBYTES + 1)]
)
def test_another_pool_is_not_taken(identity, nbytes):
    hand_over().close()
    assert kept.take(identity, nbytes, 600) is None
    wait_until(lambda: only().servers == 0)


def test_a_pool_that_may_shrink_is_not_taken():
    fd = os.memfd_create("other", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, NBYTES)
    file = MemoryFile("x", NBYTES)
    file.fd = fd
    assert kept.hand_over(file, IDENTITY, "model", NBYTES, 600) is None
    assert kept.take(IDENTITY, NBYTES, 600) is None


def test_nobody_else_gets_at_it(own_folder):
    hand_over().close()
    assert stat.S_IMODE(own_folder.stat().st_mode) == 0o700
    (path,) = own_folder.iterdir()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_folder_that_others_can_enter_is_not_used(own_folder, capsys):
    own_folder.mkdir(mode=0o755)
    os.chmod(own_folder, 0o755)
    assert kept.hand_over(full_pool(), IDENTITY, "model", NBYTES, 600) is None
    assert kept.take(IDENTITY, NBYTES, 600) is None and kept.usable_bytes() == 0
    assert cli(["pool", "list"]) == 2
    assert "chmod 700" in capsys.readouterr().err


def test_what_is_sealed_cannot_be_written(tmp_path):
    hand_over().close()
    script = (
        "import sys; from sglang_ft.weights import kept\n"
        f"file, lease = kept.take({IDENTITY!r}, {NBYTES}, 600)\n"
        "print(int(file.bytes[5]), flush=True)\nfile.bytes[5] = 1\nprint('written')"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout == "5\n" and done.returncode == -signal.SIGSEGV


def test_an_unsealed_pool_may_be_registered_by_the_next_server():
    file = MemoryFile("ft-test-pool", NBYTES)
    kept.hand_over(file, IDENTITY, "model", NBYTES, 600).close()
    taken, lease = kept.take(IDENTITY, NBYTES, 600)
    taken.bytes[7] = 9
    assert file.bytes[7] == 9
    lease.close()


def test_nonsense_and_silence_do_not_disturb_a_keeper(own_folder):
    hand_over().close()
    address = str(own_folder / f"{NAME}.pool")
    connections = []
    for data in (
        b"",
        b"\n",
        b"{}\n",
        b"[1]\n",
        b'{"do": "eat"}\n',
        b'{"do": "use"}\n',
        b"\xff\xfe\n",
        b"x" * 70_000,
    ):
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(address)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            connection.sendall(data)
        connections.append(connection)
    assert only().servers == 0
    file, lease = kept.take(IDENTITY, NBYTES, 600)
    assert is_full(file)
    lease.close()
    for connection in connections:
        connection.close()


def test_two_that_start_at_once_share_one_keeper():
    first, second = hand_over(), hand_over()
    assert only().servers == 2
    first.close()
    second.close()


def test_the_command_lists_and_drops(capsys):
    assert cli(["pool", "list"]) == 0
    assert "no pool is kept" in capsys.readouterr().out
    lease = hand_over(model="/models/qwen")
    hand_over(identity="3d" * 32, model="/models/glm").close()
    wait_until(lambda: sum(p.servers for p in kept.pools()) == 1)
    assert cli(["pool", "list"]) == 0
    out = capsys.readouterr().out
    assert "used by 1 server  /models/qwen" in out and "for 10 more minutes  /models/glm" in out
    assert kept.usable_bytes() == NBYTES and kept.usable_bytes("/models/qwen") == 2 * NBYTES
    assert cli(["pool", "drop", "nothing"]) == 2
    assert "no such pool" in capsys.readouterr().err
    assert kept.drop_idle("/models/qwen") == 0 and kept.drop_idle("/models/glm") == NBYTES
    assert cli(["pool", "drop"]) == 0
    assert "a server still uses it" in capsys.readouterr().out
    wait_until(lambda: kept.pools() == [])
    lease.close()


def test_dropping_frees_the_memory():
    def shared() -> int:
        line = next(x for x in Path("/proc/meminfo").read_text().splitlines() if x.startswith("Shmem:"))
        return int(line.split()[1]) << 10

    size = 512 << 20
    file = MemoryFile("ft-test-large", size)
    file.bytes.fill_(1)
    kept.hand_over(file, IDENTITY, "model", size, 600).close()
    file.close()
    del file
    wait_until(lambda: only().servers == 0)
    before = shared()
    assert kept.drop_idle() == size
    wait_until(lambda: before - shared() > size // 2)


def checkpoint(folder: Path) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"architectures": ["X"]}))
    save_file({"a": torch.ones(100)}, folder / "model.safetensors")
    return folder


def touch(path: Path) -> None:
    os.utime(path, ns=(1, 1))


CHANGES = {
    "config": lambda f: (f / "config.json").write_text('{"architectures": ["Y"]}'),
    "weights of the same size": lambda f: save_file({"a": torch.zeros(100)}, f / "model.safetensors"),
    "weights of another size": lambda f: save_file({"a": torch.zeros(101)}, f / "model.safetensors"),
    "a new file": lambda f: save_file({"b": torch.zeros(1)}, f / "more.safetensors"),
    "times": lambda f: touch(f / "model.safetensors"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_checkpoint_has_another_identity(tmp_path, change):
    folder = checkpoint(tmp_path / "c")
    before = kept.identity(folder, PLAN)
    assert kept.identity(folder, PLAN) == before
    CHANGES[change](folder)
    assert kept.identity(folder, PLAN) != before


def test_so_has_another_layout_and_version(tmp_path, monkeypatch):
    folder = checkpoint(tmp_path / "c")
    before = kept.identity(folder, PLAN)
    other = plan_banks([LayerSpec(find_format(None, "float16"), 4, 64, 32)] * 2)
    assert kept.identity(folder, other) != before
    monkeypatch.setattr(kept.sglang_ft, "__version__", "9.9")
    assert kept.identity(folder, PLAN) != before
