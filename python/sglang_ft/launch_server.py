"""python -m sglang_ft.launch_server: parse, check, plan, install, hand over to SGLang.

All flags of SGLang pass through; ours start with --ft- (see `sglang-ft serve --help` or docs/cli.md).
"""

from __future__ import annotations

import sys

from sglang_ft.errors import FtError


def main(argv: list[str] | None = None) -> int:
    """Serves until stopped. Returns the exit status: 0, 2 after an error that is the user's to mend, 130 on Ctrl-C."""
    argv = sys.argv[1:] if argv is None else argv
    try:
        from sglang_ft.engine.launch import launch

        launch(argv)
    except FtError as e:
        print(f"sglang_ft: {e}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130  # as a shell reports Ctrl-C
    return 0


if __name__ == "__main__":
    sys.exit(main())
