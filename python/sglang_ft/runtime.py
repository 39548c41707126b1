"""What the processes of one server tell each other on the side: how far loading is, how the worker fares.

A folder of small JSON files, private to the user, each with one writer, replaced atomically. The HTTP process reads
them for /health while the scheduler process is busy or dead.
"""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

ENV = "SGLANG_FT_RUN_DIR"


def create() -> Path:
    """Makes the folder and names it in the environment, for child processes."""
    folder = Path(tempfile.mkdtemp(prefix="sglang-ft-"))
    os.environ[ENV] = str(folder)
    return folder


def write(topic: str, **values: Any) -> None:
    """Replaces what is known about `topic` ('load', 'worker', 'error')."""
    folder = os.environ.get(ENV)
    if not folder:
        return
    temporary = Path(folder) / f".{topic}.{os.getpid()}"
    temporary.write_text(json.dumps(values))
    temporary.replace(Path(folder) / f"{topic}.json")


def read(topic: str) -> dict[str, Any]:
    """What was last written about `topic`; empty when nothing was."""
    try:
        return json.loads((Path(os.environ.get(ENV, "/nonexistent")) / f"{topic}.json").read_text())
    except (OSError, ValueError):
        return {}
