"""Errors for the user: what is wrong, where, the number, and the flag or command that mends it.

`FtError` and its heirs are printed without a traceback by the launcher and the command line.
"""

from __future__ import annotations


class FtError(Exception):
    """An error whose text is meant for the user."""


class ConfigError(FtError):
    """A flag, environment variable or file of ours has a value that cannot be used."""


class CheckpointError(FtError):
    """The checkpoint is missing, damaged, or of a kind that cannot be served."""


class MemoryBudgetError(FtError):
    """Something does not fit; the text gives the numbers."""


class TraceError(FtError):
    """A route trace cannot be read or written, or belongs to another model."""


class HookError(FtError):
    """A hook into SGLang is missing or was written for another signature."""


class WorkerError(FtError):
    """The cpu_worker process died, stalled, or refused a command."""
