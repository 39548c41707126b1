"""How many recurrent states are kept: bounded by need, not by a share of the memory.

SGLang would give them about half of what is free, and on the CPU every page of it is committed at once. The KV
cache needs no rule of its own: `max_total_tokens` bounds it, and SGLang lowers that where memory is short.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import psutil
from sglang.srt.runtime_context import get_context, get_schedule

from sglang_ft.config import FtConfig
from sglang_ft.engine.cpu_platform.defaults import (
    ANCHOR_STATES,
    MAX_RUNNING_REQUESTS,
    STATES_A_REQUEST,
)
from sglang_ft.memory.planner import recurrent_slots

# Share of the free memory that recurrent states may take; the KV cache lives in the rest.
STATES_SHARE = 0.25


def profile_available_bytes(original: Callable, configurator: Any, pre_model_load_memory: int) -> int:
    """Around KVCacheConfigurator._profile_available_bytes: sets the number of states if the user did not."""
    config = configurator.mambaish_config
    if config is not None and get_schedule().max_mamba_cache_size is None:
        states = recurrent_slots(
            psutil.virtual_memory().available,
            config.mamba2_cache_params.mamba_cache_per_req,
            get_schedule().max_running_requests or MAX_RUNNING_REQUESTS,
            STATES_A_REQUEST,
            FtConfig.inherited(os.environ).anchor_states or ANCHOR_STATES,
            STATES_SHARE,
        )
        get_context().override("sglang_ft.cpu_platform", max_mamba_cache_size=states)
    return original(configurator, pre_model_load_memory)
