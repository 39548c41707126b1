"""TorchCpuPlatform: what SGLang asks an out-of-tree platform about the device.

SGLang loads this module in the middle of importing its own utilities: import nothing of SGLang at the top but
the platform interface.
"""

from __future__ import annotations

from typing import Any

import psutil
import torch
from sglang.srt.platforms.interface import PlatformEnum, SRTPlatform

from sglang_ft.engine.cpu_platform import defaults, heap


class TorchCpuPlatform(SRTPlatform):
    """The host's cores as SGLang's device; every operator in torch."""

    _enum = PlatformEnum.OOT
    device_name = "cpu"
    device_type = "cpu"

    def apply_server_args_defaults(self, server_args: Any) -> None:
        defaults.apply(server_args)

    def init_backend(self) -> None:
        from sglang_ft.engine.cpu_platform.attention import register

        register()
        heap.start_trimming()

    def get_default_attention_backend(self) -> str:
        return defaults.ATTENTION_BACKEND

    def get_mha_kv_pool_cls(self) -> type:
        from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

        return MHATokenToKVPool

    def get_mla_kv_pool_cls(self) -> type:
        from sglang_ft.engine.cpu_platform.pools import LatentKVPool

        return LatentKVPool

    def get_paged_allocator_cls(self) -> type:
        from sglang_ft.engine.cpu_platform.pools import TokenAllocator

        return TokenAllocator

    def get_dispatch_key_name(self) -> str:
        return "native"

    def get_device(self, device_id: int = 0) -> str:
        return "cpu"

    def get_device_name(self, device_id: int = 0) -> str:
        return "cpu"

    def get_device_total_memory(self, device_id: int = 0) -> int:
        return psutil.virtual_memory().total

    def get_current_memory_usage(self, device: torch.device | None = None) -> float:
        memory = psutil.virtual_memory()
        return memory.total - memory.available

    def get_torch_distributed_backend_str(self) -> str:
        return "gloo"

    def get_torch_profiler_activity_str(self) -> str:
        return "CPU"

    def get_torch_profiler_activity(self) -> torch.profiler.ProfilerActivity:
        return torch.profiler.ProfilerActivity.CPU
