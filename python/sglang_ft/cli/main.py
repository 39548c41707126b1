"""sglang-ft: one command with subcommands. Each lives in its own module and is imported when it is called."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from typing import NamedTuple

import sglang_ft
from sglang_ft.config import suggestion
from sglang_ft.errors import FtError


class Command(NamedTuple):
    """A subcommand: the module with its `main(argv) -> exit status`, and a line for the help."""

    module: str
    help: str


COMMANDS = {
    "serve": Command(
        "sglang_ft.launch_server", "start the server; the same as python -m sglang_ft.launch_server"
    ),
    "plan": Command(
        "sglang_ft.cli.plan", "plan the memory of a model on a machine, before anything is loaded"
    ),
    "convert": Command("sglang_ft.cli.convert", "convert a checkpoint for loading at the speed of the disk"),
    "verify": Command("sglang_ft.cli.verify", "check every byte of a converted checkpoint"),
    "pool": Command("sglang_ft.cli.pool", "list or drop expert pools that --ft-keep-pool left in memory"),
    "anchors": Command(
        "sglang_ft.cli.anchors", "show where a conversation's recurrent states are kept for the next turn"
    ),
    "doctor": Command("sglang_ft.cli.doctor", "check this machine; each problem comes with its cure"),
    "bench": Command(
        "sglang_ft.cli.bench", "replay route traces through the expert cache; write synthetic ones"
    ),
    "calibrate": Command("sglang_ft.cli.calibrate", "measure link and CPU for the experts of a model"),
    "collect-env": Command("sglang_ft.cli.environment", "print versions and hardware for a bug report"),
}
USER_ERROR = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand. Returns its exit status; 2 after an error that is the user's to mend."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help"):
        print(usage())
        return 0 if arguments else USER_ERROR
    if arguments[0] == "--version":
        print(f"sglang-ft {sglang_ft.__version__}")
        return 0
    try:
        return _module(arguments[0]).main(arguments[1:])
    except FtError as e:
        print(f"sglang-ft: {e}", file=sys.stderr)
        return USER_ERROR


def usage() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {command.help}" for name, command in COMMANDS.items()]
    return "\n".join(
        [
            "usage: sglang-ft COMMAND [ARGUMENTS]",
            "",
            *lines,
            "",
            "sglang-ft COMMAND --help tells more; --version",
        ]
    )


def _module(name: str):  # type: ignore[no-untyped-def]  # a module with main()
    if name not in COMMANDS:
        raise FtError(f"{name}: no such command{suggestion(name, COMMANDS)}\n\n{usage()}")
    return importlib.import_module(COMMANDS[name].module)


if __name__ == "__main__":
    sys.exit(main())
