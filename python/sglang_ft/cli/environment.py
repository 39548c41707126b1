"""sglang-ft collect-env: what a bug report needs, as plain text. Reads, changes nothing."""

from __future__ import annotations

import argparse
import os
import platform
import re
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from sglang_ft.preflight import GIB, available_memory
from sglang_ft.worker.topology import physical_cores

PACKAGES = ("sglang-ft", "sglang", "sglang-kernel", "torch", "transformers", "flashinfer-python", "triton")
ISA_FLAGS = (
    "avx2",
    "fma",
    "avx512f",
    "avx512_bf16",
    "avx512_fp16",
    "amx_tile",
    "amx_bf16",
    "asimd",
    "bf16",
    "sve",
)
VARIABLES = re.compile(r"(SGLANG|SGL|OMP|CUDA|NCCL|TORCH|TRITON|HF|TRANSFORMERS)_")
_SECRET = re.compile(r"TOKEN|KEY|SECRET|PASSWORD")
_NVIDIA = Path("/proc/driver/nvidia")


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="sglang-ft collect-env", description="Print versions and hardware for a bug report."
    )
    parser.parse_args(argv)
    print("\n".join(f"{name}: {value}" for name, value in collect().items()))
    return 0


def collect() -> dict[str, str]:
    """Facts by name, in the order to print."""
    facts = {"python": platform.python_version(), "system": f"{platform.system()} {platform.release()}"}
    facts |= {name: _version(name) for name in PACKAGES}
    name, flags = cpu()
    facts["cpu"] = (
        f"{name}, {len(physical_cores())} physical cores of {os.cpu_count()} logical for this process"
    )
    facts["cpu flags"] = " ".join(flag for flag in ISA_FLAGS if flag in flags)
    facts["memory"] = f"{total_memory() / GIB:.1f} GiB, {available_memory() / GIB:.1f} GiB available"
    facts["gpu"] = ", ".join(gpus()) or "none"
    facts |= {
        name: _masked(name, value) for name, value in sorted(os.environ.items()) if VARIABLES.match(name)
    }
    return facts


def cpu() -> tuple[str, set[str]]:
    """Model name and instruction set flags, as the kernel names them."""
    text = Path("/proc/cpuinfo").read_text()
    name = re.search(r"^model name\s*: (.*)$", text, re.M)
    flags = re.search(r"^(?:flags|Features)\s*: (.*)$", text, re.M)
    return name[1] if name else platform.machine(), set(flags[1].split()) if flags else set()


def gpus() -> list[str]:
    """Models of the NVIDIA GPUs that the driver shows."""
    names = []
    for info in sorted(_NVIDIA.glob("gpus/*/information")):
        match = re.search(r"^Model:\s*(.*)$", info.read_text(), re.M)
        names.append(match[1] if match else "unknown NVIDIA GPU")
    return names


def total_memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _masked(name: str, value: str) -> str:
    return "(set)" if _SECRET.search(name) else value
