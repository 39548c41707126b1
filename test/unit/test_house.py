"""The house rules: imports point downwards only, nothing ties the project to one machine."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "python" / "sglang_ft"

# What a user touches may use everything; engine/ may use everything below; below nobody looks up.
TOP = {"launch_server", "cli"}
ENGINE = {"engine"}
TEXT_FILES = (
    "*.py",
    "*.cpp",
    "*.h",
    "*.cu",
    "*.cuh",
    "*.md",
    "*.toml",
    "*.sh",
    "*.yaml",
    "*.yml",
    "*.json",
    "*.lock",
    "*.txt",
)


def modules():
    return sorted(PACKAGE.rglob("*.py"))


def part(path: Path) -> str:
    """Top-level part of the package that a file belongs to, like 'engine' or 'config'."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported(path: Path) -> set[str]:
    """Absolute names of everything that a file imports, anywhere in it."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path}: relative import"
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def top_level(names: set[str]) -> set[str]:
    return {name.split(".")[0] for name in names}


def ours(names: set[str]) -> set[str]:
    return {name.split(".")[1] for name in names if name.startswith("sglang_ft.")}


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_point_downwards(path):
    names = imported(path)
    here = part(path)
    if here not in ENGINE:
        assert "sglang" not in top_level(names), "only engine/ imports sglang"
    if here not in TOP | ENGINE:
        assert not ours(names) & (TOP | ENGINE), "nothing below looks up at engine/ or the launcher"
    if here in ENGINE:
        assert not ours(names) & TOP, "engine/ does not know the launcher or the command line"


def test_the_check_sees_imports_of_every_form(tmp_path):
    file = tmp_path / "m.py"
    file.write_text(
        "import sglang.srt\ndef f():\n    from sglang_ft.engine import moe\n    from sglang_ft import cli\n"
    )
    names = imported(file)
    assert "sglang" in top_level(names)
    assert ours(names) == {"engine", "cli"}


def text_files():
    folders = [
        ROOT / name
        for name in (
            "python",
            "cpu_worker",
            "sgl-ft-kernel",
            "test",
            "benchmark",
            "demo",
            "docs",
            "docker",
            "scripts",
        )
    ]
    files = [f for folder in folders for pattern in TEXT_FILES for f in folder.rglob(pattern)]
    return (
        files
        + [f for pattern in (*TEXT_FILES, "Makefile") for f in ROOT.glob(pattern)]
        + [ROOT / ".ci" / "run"]
    )


def test_no_file_names_a_path_of_one_machine_or_a_package_host():
    machine = re.compile(r"(?<![\w.~}])/(?:root|home/\w+|work|opt/pypi)(?:/|\b)")
    host = re.compile(r"(?:files\.python" + r"hosted|py" + r"pi)\.org")
    for file in text_files():
        for number, line in enumerate(file.read_text(errors="replace").splitlines(), 1):
            found = machine.search(line) or host.search(line)
            assert not found or file == Path(__file__), f"{file}:{number}: {line.strip()[:100]}"
