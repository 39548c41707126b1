"""python -m sglang_ft.cli.docs [FILE]: writes or prints docs/cli.md, from COMMANDS and FtConfig."""

from __future__ import annotations

import sys
from pathlib import Path

from sglang_ft.cli.main import COMMANDS
from sglang_ft.config import FtConfig, Option

HEAD = """# Command line

<!-- Written by `make docs` from python/sglang_ft/config.py and cli/main.py: change those. -->

| command | what it does |
| --- | --- |
"""

SETTINGS = """
`sglang-ft COMMAND --help` lists the arguments of each.

## Settings of sglang_ft

`sglang-ft serve` takes every flag of SGLang's own server and the flags below. Each can also be set by the
variable in the last column; the flag wins over the variable, the variable over the default.

| flag | default | takes | meaning | variable |
| --- | --- | --- | --- | --- |
"""


def page() -> str:
    """The text of docs/cli.md."""
    commands = [_row(f"`sglang-ft {name}`", command.help) for name, command in COMMANDS.items()]
    return HEAD + "".join(commands) + SETTINGS + "".join(_setting(o) for o in FtConfig.options())


def _setting(o: Option) -> str:
    default = f"{o.default_text} {o.unit}" if o.unit else o.default_text
    return _row(f"`{o.flag}`", default, o.allowed, o.help, f"`{o.env}`")


def _row(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"


if __name__ == "__main__":
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(page())
    else:
        print(page(), end="")
