"""The platform for machines without a GPU: SGLang's CUDA wheel served by torch on the CPU.

SGLang finds it through the entry point group `sglang.srt.platforms`. `activate` keeps it out of the way of
plain SGLang in the same environment: it answers only when our launcher chose the CPU. Importing this
package must stay cheap and free of SGLang, because SGLang imports it in every process of every server.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sglang_ft.engine.hook import Hook

PLATFORM_VARIABLE = "SGLANG_FT_LAUNCHED_ON"


def activate() -> str | None:
    """The dotted path of the platform class if our launcher chose the CPU, else None."""
    if os.environ.get(PLATFORM_VARIABLE) == "cpu":
        return "sglang_ft.engine.cpu_platform.platform.TorchCpuPlatform"
    return None


def required_environment() -> dict[str, str]:
    """Variables that the launcher sets before SGLang or torch is imported, whatever the user has there."""
    return {
        PLATFORM_VARIABLE: "cpu",
        "SGLANG_PLATFORM": "sglang_ft_cpu",
        # SGLang looks for CUDA by itself in many modules; a GPU that we do not use must stay unseen.
        "CUDA_VISIBLE_DEVICES": "",
    }


def environment() -> dict[str, str]:
    """Variables that the launcher sets unless the user did."""
    return {
        # OpenMP threads that poll between torch operations take the cores that run the experts.
        "OMP_WAIT_POLICY": "PASSIVE",
        # SGLang compiles small functions (top-k, penalties) at first use: without a GPU that takes many seconds of
        # a C++ compiler in the middle of a request, to gain microseconds.
        "TORCH_COMPILE_DISABLE": "1",
        # Kernels that oneDNN keeps, one a matrix shape: hundreds of kilobytes each, and prompts come in all lengths.
        "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "128",
        # After a crash SGLang would wait more than a minute for traces of a GPU.
        "SGLANG_PYSPY_DUMP_BEFORE_CRASH": "0",
        "SGLANG_CUDA_COREDUMP_BEFORE_CRASH": "0",
    }


def hooks() -> list[Hook]:
    """Everything in SGLang that this platform replaces."""
    from sglang_ft.engine.cpu_platform import grammar, replacements

    return [*replacements.HOOKS, *grammar.HOOKS]
