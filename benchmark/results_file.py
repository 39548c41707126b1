"""The form of every result file: name, date, machine, versions, command, and flat metrics (name: number).

Says nothing that identifies a host: no names, users or paths.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path

RESULTS = Path(__file__).parent / "results"
_PACKAGES = ("sglang-ft", "sglang", "torch", "transformers", "flash-linear-attention")


def machine_section() -> dict[str, str | int | float]:
    """CPU model, cores, best instruction set flags, memory in GiB, kernel and GPU (when torch sees one)."""
    cpuinfo = Path("/proc/cpuinfo").read_text()
    fields = dict(line.split(":", 1) for line in cpuinfo.splitlines() if ":" in line)
    fields = {key.strip(): value.strip() for key, value in fields.items()}
    flags = set(fields.get("flags", fields.get("Features", "")).split())
    wanted = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "bf16")
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "cpu": fields.get("model name", platform.machine()),
        "cores": len(os.sched_getaffinity(0)),
        "isa": " ".join(flag for flag in wanted if flag in flags),
        "memory_gib": round(pages / 2**30, 1),
        "kernel": platform.release().split("-")[0],
        "gpu": _gpu(),
    }


def _gpu() -> str:
    import torch

    return torch.cuda.get_device_name(0) if torch.cuda.is_available() else "none"


def versions_section() -> dict[str, str]:
    """Python and the packages that matter, where they are installed."""
    versions = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return versions


def command_line() -> str:
    """This script's command; files by their names only."""
    arguments = [Path(word).name if word.startswith("/") else word for word in sys.argv[1:]]
    script = Path(sys.argv[0]).resolve().relative_to(RESULTS.parents[1])
    return " ".join(["python", str(script), *arguments])


def write(
    path: Path,
    name: str,
    metrics: Mapping[str, float | None],
    replace: bool = True,
    notes: Sequence[str] = (),
) -> None:
    """Writes the file; with `replace` False other metrics of an existing file, and its notes, stay.

    None: not measured, `notes` say why.
    """
    before = json.loads(path.read_text()) if not replace and path.exists() else {}
    old, notes = before.get("metrics", {}), [*before.get("notes", []), *notes]
    content = {
        "name": name,
        "date": datetime.date.today().isoformat(),
        "machine": machine_section(),
        "versions": versions_section(),
        "command": command_line(),
        "metrics": {**old, **{key: _rounded(value) for key, value in metrics.items()}},
        **({"notes": notes} if notes else {}),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=2) + "\n")
    print(f"wrote {path.name}: {len(content['metrics'])} metrics")


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.6g}")
