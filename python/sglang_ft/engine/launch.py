"""The launcher's middle part: from a command line to a running server.

Everything that can be refused is refused here, before a process starts or a weight is read.
"""

from __future__ import annotations

import argparse
import os
import shutil
from collections.abc import Sequence
from typing import Any

from sglang_ft import runtime
from sglang_ft.config import FtConfig, add_help_group
from sglang_ft.errors import FtError

# What SGLang leaves off and our users expect; a flag of the user's comes later on the line and wins.
_DEFAULTS = ("--enable-metrics", "--reasoning-parser", "auto", "--tool-call-parser", "auto")


def launch(argv: Sequence[str]) -> None:
    """Serves until stopped. Raises FtError for what the user can mend."""
    config, rest = FtConfig.parse(argv, os.environ)
    config.publish(os.environ)
    _choose_platform(config)
    from sglang_ft.engine import install  # imports sglang, which reads the environment

    install.check_version(config.force_version)
    if {"-h", "--help"}.intersection(rest):
        _print_help()
        return
    server_args = _server_args(rest)
    folder = runtime.create()
    try:
        _serve(config, server_args)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _choose_platform(config: FtConfig) -> None:
    """Sets the environment of the chosen platform, for this process and its children."""
    from sglang_ft.engine import cpu_platform

    if config.platform == "gpu":
        raise FtError(
            "--ft-platform gpu: this version runs attention and experts on the CPU only; leave the flag out"
        )
    for name, value in cpu_platform.environment().items():
        os.environ.setdefault(name, value)


def _server_args(argv: Sequence[str]) -> Any:
    from sglang.srt.server_args import prepare_server_args

    return prepare_server_args([*_DEFAULTS, *argv])


def _print_help() -> None:
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser(prog="sglang-ft serve")
    ServerArgs.add_cli_args(parser)
    add_help_group(parser)
    parser.print_help()


def _serve(config: FtConfig, server_args: Any) -> None:
    from sglang.srt.entrypoints import http_server
    from sglang.srt.utils import kill_process_tree

    from sglang_ft.engine import entry, install, routes

    early = routes.EarlyServer(server_args.host, server_args.port, answer=not server_args.ssl_certfile)
    try:
        install.install(routes.hooks(early))
        http_server.launch_server(server_args, run_scheduler_process_func=entry.run_scheduler_process)
    except Exception as e:
        refusal = runtime.read("error").get("text")
        if refusal is None:
            raise
        raise FtError(refusal) from e
    finally:
        kill_process_tree(os.getpid(), include_parent=False)
