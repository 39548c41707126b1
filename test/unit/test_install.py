"""Hooks into SGLang: registered, verified, and refused by name when SGLang is not as expected."""

from __future__ import annotations

import os
import subprocess
import sys
import types

import pytest
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from sglang_ft.config import FtConfig
from sglang_ft.engine import control, cpu_platform, entry
from sglang_ft.engine.hook import Hook
from sglang_ft.engine.install import check_signature, in_place, install, signature_of
from sglang_ft.errors import HookError


@pytest.fixture
def module(monkeypatch):
    """A module to hook, and a registry that forgets it afterwards."""
    made = types.ModuleType("hooked_module")
    exec(
        "def area(width, height=2, *, scale: float = 1.0) -> float:\n    return width * height * scale",
        made.__dict__,
    )
    monkeypatch.setitem(sys.modules, made.__name__, made)
    monkeypatch.setattr(HookRegistry, "_hooks", type(HookRegistry._hooks)(list))
    monkeypatch.setattr(HookRegistry, "_patched", set())
    return made


def twice(original, *args, **kwargs):
    return 2 * original(*args, **kwargs)


SIGNATURE = "(width, height=2, *, scale=1.0)"


def test_an_installed_hook_is_in_place_and_called(module):
    hook = Hook("hooked_module.area", HookType.AROUND, twice, SIGNATURE)
    assert not in_place(hook)
    install([hook])
    assert in_place(hook)
    assert module.area(3) == 12


def test_two_hooks_on_one_function_are_both_found(module):
    hooks = [
        Hook("hooked_module.area", HookType.AROUND, twice, SIGNATURE),
        Hook("hooked_module.area", HookType.AFTER, lambda result, *a, **k: result + 1, SIGNATURE),
    ]
    install(hooks)
    assert all(map(in_place, hooks))
    assert module.area(3) == 13


def test_a_changed_signature_is_refused_by_name_before_anything_is_hooked(module):
    hook = Hook("hooked_module.area", HookType.AROUND, twice, "(width, height=2)")
    with pytest.raises(HookError, match=r"hooked_module\.area.*\(width, height=2\).*scale"):
        install([hook])
    assert module.area(3) == 6


@pytest.mark.parametrize("target", ["hooked_module.volume", "no_such_module.area", "hooked_module.Box.area"])
def test_a_missing_target_is_refused_by_name(module, target):
    with pytest.raises(HookError, match=target.replace(".", r"\.")):
        install([Hook(target, HookType.AROUND, twice, SIGNATURE)])


def test_a_hook_that_sglang_did_not_apply_is_refused_by_name(module, monkeypatch):
    monkeypatch.setattr(HookRegistry, "apply_hooks", classmethod(lambda cls: None))
    with pytest.raises(HookError, match=r"hooked_module\.area"):
        install([Hook("hooked_module.area", HookType.AROUND, twice, SIGNATURE)])


def test_signatures_are_compared_without_annotations():
    def function(a: int, *args: str, b: list[int] | None = None) -> None: ...

    assert signature_of(function) == "(a, *args, b=None)"


def test_the_hooks_of_a_gpu_fit_the_installed_sglang(monkeypatch):
    monkeypatch.delenv(cpu_platform.PLATFORM_VARIABLE, raising=False)
    hooks = [*entry.scheduler_hooks(FtConfig()), *control.main_hooks()]
    assert any("FusedMoE" in hook.target for hook in hooks), "these are a GPU's"
    for hook in hooks:
        check_signature(hook)


def test_plain_sglang_in_the_same_environment_is_untouched():
    code = """
import os, sys
assert not any(name.startswith(("SGLANG_FT", "SGLANG_PLATFORM")) for name in os.environ)
from sglang.srt.plugins import load_plugins
from sglang.srt.plugins.hook_registry import HookRegistry
from sglang.srt.platforms import current_platform
load_plugins()
ours = [t for t, hooks in HookRegistry._hooks.items() for _, f, _ in hooks if f.__module__.startswith("sglang_ft")]
print(type(current_platform).__module__, ours, "sglang_ft.engine.entry" in sys.modules)
"""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("SGLANG_FT", "SGLANG_PLATFORM"))}
    result = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    platform, rest = result.stdout.strip().splitlines()[-1].split(" ", 1)
    assert platform.startswith("sglang.srt.platforms")
    assert rest == "[] False"
