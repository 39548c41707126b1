"""What a hook into SGLang is. Registered and verified by install.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from sglang.srt.plugins.hook_registry import HookType


class Hook(NamedTuple):
    """One hook: `function` is called as HookRegistry describes for its `kind`.

    `signature` is `str(inspect.signature(target))` of the SGLang version that this release was made for, without
    annotations; when the installed one differs, we refuse to start. None: the hook passes everything on unseen.
    """

    target: str
    kind: HookType
    function: Callable[..., Any]
    signature: str | None
