"""Imports once instead of in each process: a process that has imported all of SGLang forks scheduler and detokenizer.

Importing SGLang takes each process many seconds of CPU time. The forking process (Python's forkserver, with
preload.py) imports while the launcher does, has no threads and serves nothing. Only without a GPU: a process that has
looked for CUDA devices cannot be forked into one that uses them, and some of SGLang's modules look at import.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

from sglang.srt.plugins.hook_registry import HookType

from sglang_ft import runtime
from sglang_ft.engine.hook import Hook

_METRICS = "PROMETHEUS_MULTIPROC_DIR"
_PRELOAD = "sglang_ft.engine.preload"
_ENVIRONMENT = "environment"


def start() -> None:
    """Starts the forking process; it imports while this one goes on."""
    if multiprocessing.get_start_method(allow_none=True) == "fork":
        return  # whoever started this process has imported everything already
    # prometheus_client decides at import whether several processes count together.
    if _METRICS not in os.environ:
        folder = Path(os.environ[runtime.ENV]) / "metrics"
        folder.mkdir()
        os.environ[_METRICS] = str(folder)
    multiprocessing.set_forkserver_preload([_PRELOAD])
    forkserver.ensure_running()


def hooks() -> list[Hook]:
    """For the launcher: SGLang's processes are forked instead of spawned."""

    def configured(result: Any, server_args: Any) -> None:
        multiprocessing.set_start_method("forkserver", force=True)
        runtime.write(_ENVIRONMENT, **os.environ)

    return [
        Hook(
            "sglang.srt.entrypoints.engine._set_envs_and_config",
            HookType.AFTER,
            configured,
            "(server_args)",
        )
    ]


def enter() -> None:
    """In a process of SGLang that may have been forked: what a spawned one would have from the launcher."""
    environment = runtime.read(_ENVIRONMENT)
    if environment:
        os.environ.clear()
        os.environ.update(environment)
    signal.signal(signal.SIGQUIT, signal.SIG_DFL)
