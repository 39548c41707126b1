"""The scheduler process: installs our hooks, then runs SGLang's scheduler.

SGLang starts this process with the spawn method and imports this module in it before anything of its own that needs
a device, so the platform is prepared at import.
"""

from __future__ import annotations

import functools
import logging
import os
import sys
from typing import Any, NoReturn

from sglang_ft import preflight, runtime, startup
from sglang_ft.config import FtConfig
from sglang_ft.engine import install, prefork
from sglang_ft.engine.hook import Hook
from sglang_ft.errors import FtError

logger = logging.getLogger(__name__)

EXIT_REFUSED = 2


def run_scheduler_process(*args: Any, **kwargs: Any) -> None:
    """Target of SGLang's scheduler process; the arguments are SGLang's."""
    prefork.enter()
    startup.mark("scheduler process and its first imports", in_scheduler=True)
    try:
        prepare()
        from sglang.srt.managers.scheduler import run_scheduler_process as run
    except FtError as e:
        _refuse(e)
    startup.mark("scheduler's imports", in_scheduler=True)
    run(*args, **kwargs)


def run_detokenizer_process(*args: Any, **kwargs: Any) -> None:
    """Target of SGLang's detokenizer process; the arguments are SGLang's."""
    prefork.enter()
    from sglang.srt.managers.detokenizer_manager import run_detokenizer_process as run

    run(*args, **kwargs)


@functools.cache
def prepare() -> None:
    """Puts our hooks in place, once in a process and those that are forked from it. Raises FtError."""
    config = FtConfig.inherited(os.environ)
    preflight.check_sglang_version(config.force_version)
    install.install(scheduler_hooks(config))


def scheduler_hooks(config: FtConfig) -> list[Hook]:
    """All hooks of the scheduler process, for a GPU unless the CPU platform is active."""
    from sglang_ft.engine import control, cpu_platform, experts, fairness, loader, scheduler, seeds
    from sglang_ft.engine.anchors import serving as anchors

    on_gpu = cpu_platform.activate() is None
    serving = experts.ExpertServing(config, on_gpu)
    found = [*experts.hooks(serving, _refuse), *scheduler.hooks(serving, on_gpu), *seeds.hooks()]
    found += control.scheduler_hooks(serving.change)
    found += anchors.hooks(anchors.AnchorServing(config), on_gpu)
    found += fairness.hooks(fairness.DecodeTurns(config.decode_gap_ms / 1000))
    found += loader.hooks(serving.reads)
    if not on_gpu:
        return [*cpu_platform.hooks(), *found]
    from sglang_ft.engine import gpu_experts, memory_guard

    def executor() -> gpu_experts.GpuExperts | None:
        return serving.experts.gpu if serving.experts else None

    return [*found, *gpu_experts.hooks(executor), *memory_guard.hooks(executor)]


def _refuse(error: FtError) -> NoReturn:
    """Ends the process with a text for the user; the launcher shows it once more at the very end."""
    runtime.write("error", text=str(error))
    print(f"sglang_ft: {error}", file=sys.stderr, flush=True)
    os._exit(EXIT_REFUSED)
