"""Imported by the process that SGLang's processes are forked from: everything that they import. See prefork.py.

An error here is not reported: the scheduler process meets it again, and can say it where a user looks.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1


def _prepare() -> None:
    launcher = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # SGLang's processes tell their parent by this signal that they fail; it is the launcher who acts on it.
    signal.signal(signal.SIGQUIT, lambda *_: os.kill(launcher, signal.SIGQUIT))
    with contextlib.suppress(Exception):
        from sglang_ft.engine import entry

        entry.prepare()
        import sglang.srt.managers.detokenizer_manager
        import sglang.srt.managers.scheduler
        import sglang.srt.managers.tp_worker
        import sglang.srt.model_executor.model_runner
        import sglang.srt.models.registry  # noqa: F401


_prepare()
