"""Registers our hooks into SGLang and refuses to start when one is missing or was made for another signature.

SGLang itself only logs a hook that failed, and would then serve without it.
"""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Callable, Iterable
from typing import Any

from sglang.srt.plugins.hook_registry import HookRegistry

from sglang_ft.engine.hook import Hook
from sglang_ft.errors import HookError


def install(hooks: Iterable[Hook]) -> None:
    """Registers `hooks`, applies them and verifies that each is in place. Raises HookError naming the hook."""
    hooks = list(hooks)
    for hook in hooks:
        check_signature(hook)
    for hook in hooks:
        HookRegistry.register(hook.target, hook.function, hook.kind)
    HookRegistry.apply_hooks()
    for hook in hooks:
        if not in_place(hook):
            raise HookError(
                f"the hook on {hook.target} is not in place: SGLang did not apply it (see its log above)"
            )


def in_place(hook: Hook) -> bool:
    """Whether calls to the target go through the hook's function."""
    if isinstance(hook.function, type):
        return _resolve(hook.target) is hook.function
    return any(hook.function in _closure(wrapper) for wrapper in _wrappers(_resolve(hook.target)))


def check_signature(hook: Hook) -> None:
    """Raises HookError unless the target is there and has the signature that the hook was made for."""
    try:
        target = _resolve(hook.target)
    except (AttributeError, ImportError, ValueError) as e:
        raise HookError(f"the hook on {hook.target} has no target in the installed sglang: {e}") from e
    found = signature_of(target)
    if hook.signature not in (None, found):
        raise HookError(
            f"the hook on {hook.target} was made for the signature {hook.signature}, the installed sglang has {found}"
        )


def signature_of(target: Any) -> str:
    """Parameter names, kinds and defaults of a callable; annotations are left out, they come in many spellings."""
    signature = inspect.signature(target)
    plain = [p.replace(annotation=inspect.Parameter.empty) for p in signature.parameters.values()]
    return str(signature.replace(parameters=plain, return_annotation=inspect.Signature.empty))


def _resolve(target: str) -> Any:
    owner, _, name = target.rpartition(".")
    return getattr(pkgutil.resolve_name(owner), name)


def _wrappers(function: Any) -> Iterable[Any]:
    """The chain of wrappers that HookRegistry put around a function, outermost first."""
    while function is not None:
        yield function
        function = getattr(function, "__wrapped__", None)


def _closure(function: Callable) -> list[Any]:
    cells = getattr(function, "__closure__", None) or ()
    return [cell.cell_contents for cell in cells]
