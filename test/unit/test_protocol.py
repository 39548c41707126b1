"""The Python mirror of ring.h has the compiled header's sizes, offsets and constants."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from sglang_ft.worker import protocol as p

HEADER = Path(__file__).parents[2] / "cpu_worker" / "include"
ENUMS = {
    "FT_FORMAT_": p.Format,
    "FT_ROLE_": p.Role,
    "FT_ACT_": p.Activation,
    "FT_DTYPE_": p.DType,
    "FT_LAYER_": p.LayerFlag,
    "FT_WORKER_": p.WorkerState,
    "FT_ISA_": p.Isa,
    "FT_CMD_": p.Command,
}


@pytest.fixture(scope="module")
def compiled(tmp_path_factory) -> dict[str, int]:
    """Every size, offset and constant, as a C program prints them."""
    lines = []
    for c_name, struct in p.STRUCTS.items():
        lines.append(f'printf("{c_name} %zu\\n", sizeof(struct {c_name}));')
        for field, *_ in struct._fields_:
            lines.append(f'printf("{c_name}.{field} %zu\\n", offsetof(struct {c_name}, {field}));')
    constants = [prefix + member.name for prefix, enum in ENUMS.items() for member in enum]
    constants += ["FT_OK", *(f"FT_ERR_{s.name}" for s in p.Status if s)]
    constants += ["FT_RING_MAGIC", "FT_RING_VERSION", "FT_CACHE_LINE", "FT_MAX_LAYERS", "FT_MAX_ROLES"]
    constants += ["FT_SHARED_STEP"]
    lines += [f'printf("{name} %llu\\n", (unsigned long long){name});' for name in constants]
    source = '#include "sglang_ft/ring.h"\n#include <stdio.h>\nint main(void) {' + "\n".join(lines) + "}\n"
    folder = tmp_path_factory.mktemp("layout")
    (folder / "layout.c").write_text(source)
    compiler = os.environ.get("CC") or shutil.which("cc") or "gcc"
    command = [compiler, "-std=c11", "-Wall", "-Werror", f"-I{HEADER}", "layout.c", "-o", "layout"]
    subprocess.run(command, cwd=folder, check=True)
    printed = subprocess.run([folder / "layout"], check=True, capture_output=True, text=True).stdout
    return {name: int(value) for name, value in (line.split() for line in printed.splitlines())}


@pytest.mark.parametrize("c_name", p.STRUCTS)
def test_a_struct_has_the_headers_layout(compiled, c_name):
    struct = p.STRUCTS[c_name]
    assert ctypes.sizeof(struct) == compiled[c_name]
    for field, *_ in struct._fields_:
        assert getattr(struct, field).offset == compiled[f"{c_name}.{field}"], field


def test_enums_have_the_headers_values(compiled):
    for prefix, enum in ENUMS.items():
        for member in enum:
            assert member.value == compiled[prefix + member.name], prefix + member.name
    for status in p.Status:
        assert status.value == compiled[f"FT_ERR_{status.name}" if status else "FT_OK"]


def test_limits_are_the_headers(compiled):
    assert compiled["FT_RING_MAGIC"] == p.MAGIC
    assert compiled["FT_RING_VERSION"] == p.VERSION
    assert compiled["FT_CACHE_LINE"] == p.LINE
    assert compiled["FT_MAX_LAYERS"] == p.MAX_LAYERS
    assert compiled["FT_MAX_ROLES"] == p.MAX_ROLES
    assert compiled["FT_SHARED_STEP"] == p.SHARED_STEP


def test_every_shared_flag_has_a_cache_line_of_its_own():
    flags = (
        "wake",
        "abort",
        "command_doorbell",
        "worker_asleep",
        "command_done",
        "progress",
        "worker_state",
        "stats",
    )
    for field in flags:
        assert getattr(p.RingHeader, field).offset % p.LINE == 0, field
    for field in ("doorbell", "done", "owner_waiting", "layer", "status"):
        assert getattr(p.Block, field).offset % p.LINE == 0, field
    assert ctypes.sizeof(p.Block) % p.LINE == 0
