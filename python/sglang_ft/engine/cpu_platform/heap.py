"""Gives freed heap memory back to the system now and then.

Torch's temporaries come in all sizes; between long-lived objects they leave holes that glibc would keep
(docs/lab-notes.md has what this gives back, and what still grows).
"""

from __future__ import annotations

import ctypes
import threading

PERIOD_S = 15.0


def start_trimming() -> None:
    """Starts the thread that trims this process's heap every PERIOD_S seconds; nothing where libc cannot."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        threading.Thread(target=_trim, args=(libc,), name="ft-trim", daemon=True).start()


def _trim(libc: ctypes.CDLL) -> None:
    pause = threading.Event()
    while not pause.wait(PERIOD_S):
        libc.malloc_trim(0)
