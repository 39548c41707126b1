"""What the documents name exists: files, make targets, commands and flags."""

import re
from pathlib import Path

import pytest

from sglang_ft.cli.main import COMMANDS
from sglang_ft.config import FtConfig

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "demo").glob("*.md")])
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
FLAGS = {o.flag for o in FtConfig.options()}


@pytest.fixture(params=PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def page(request):
    return request.param


def test_links_lead_somewhere(page):
    for link in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
        assert link.startswith("https://") or (page.parent / link).exists(), link


def test_make_targets_exist(page):
    for target in re.findall(r"(?:`|^)make ([a-z-]+)", page.read_text(), re.M):
        assert target in TARGETS, target


def test_commands_and_flags_exist(page):
    text = page.read_text()
    assert set(re.findall(r"(?:`|^)sglang-ft ([a-z-]+)", text, re.M)) <= COMMANDS.keys()
    assert {flag.rstrip("-") for flag in re.findall(r"--ft-[a-z-]+", text)} <= FLAGS


def test_every_make_target_is_in_the_help():
    makefile = (ROOT / "Makefile").read_text()
    assert TARGETS == set(re.findall(r"^([a-z-]+):.*## ", makefile, re.M))
