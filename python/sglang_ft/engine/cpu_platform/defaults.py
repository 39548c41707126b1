"""Server arguments of the CPU platform: defaults, and what it cannot serve."""

from __future__ import annotations

import os
from typing import Any

from sglang_ft.errors import ConfigError

ATTENTION_BACKEND = "ft_cpu"

# Tokens of KV cache when memory allows; more would only be committed and never filled by one machine.
MAX_TOTAL_TOKENS = 131072
MAX_RUNNING_REQUESTS = 64
# Recurrent states: three a running request (SGLang's own rule), and those of prefixes.
STATES_A_REQUEST = 3
ANCHOR_STATES = 192

SERVER_ARGS: dict[str, Any] = {
    "device": "cpu",
    "attention_backend": ATTENTION_BACKEND,
    "sampling_backend": "pytorch",
    "grammar_backend": "xgrammar",
    "page_size": 1,
    "chunked_prefill_size": 2048,
    "max_running_requests": MAX_RUNNING_REQUESTS,
    "max_total_tokens": MAX_TOTAL_TOKENS,
    # Of the memory that is free at start, experts and dense weights included; what remains is for activations.
    # The KV cache stays far below it unless memory is short: MAX_TOTAL_TOKENS bounds it.
    "mem_fraction_static": 0.97,
    "moe_runner_backend": "triton",
}

# Fields without an "unset" value, and what SGLang itself filled in before the platform is asked.
FORCED: dict[str, Any] = {
    # There is no second stream to overlap with.
    "disable_overlap_schedule": True,
    # SGLang gives an out-of-tree platform one KV pool for all layers; windows are applied in attention.
    "disable_hybrid_swa_memory": True,
    "disable_shared_experts_fusion": True,
    "disable_custom_all_reduce": True,
}


def apply(server_args: Any) -> None:
    """Fills the arguments that the user left open; refuses those that need a GPU.

    Raises:
        ConfigError: all unusable arguments at once.
    """
    refuse(server_args)
    for name, value in SERVER_ARGS.items():
        if getattr(server_args, name) is None:
            setattr(server_args, name, value)
    # SGLang writes its own names for the CPU here before it asks the platform.
    if server_args.attention_backend == "intel_amx":
        server_args.attention_backend = ATTENTION_BACKEND
    if server_args.moe_runner_backend == "auto":
        server_args.moe_runner_backend = SERVER_ARGS["moe_runner_backend"]
    for name, value in FORCED.items():
        setattr(server_args, name, value)
    # SGLang keeps the inputs of short convolutions in bfloat16 whatever the model computes in.
    dtype = str(server_args.get_model_config().dtype).removeprefix("torch.")
    os.environ.setdefault("SGLANG_MAMBA_CONV_DTYPE", dtype)


def refuse(server_args: Any) -> None:
    """Raises one ConfigError that names every argument which cannot work without a GPU."""
    problems = []
    if server_args.device != "cpu":
        problems.append(f"--device {server_args.device}: this server runs on the CPU; leave the flag out")
    if server_args.speculative_algorithm is not None:
        problems.append(
            f"--speculative-algorithm {server_args.speculative_algorithm}: not supported without a GPU"
        )
    for flag in (
        "enable_torch_compile",
        "enable_deterministic_inference",
        "enable_lora",
        "enable_mixed_chunk",
    ):
        if getattr(server_args, flag):
            problems.append(f"--{flag.replace('_', '-')}: not supported without a GPU")
    for flag in ("tp_size", "pp_size", "dp_size", "ep_size"):
        if getattr(server_args, flag) > 1:
            problems.append(
                f"--{flag.replace('_', '-')} {getattr(server_args, flag)}: without a GPU it must be 1"
            )
    if server_args.page_size not in (None, 1):
        problems.append(f"--page-size {server_args.page_size}: without a GPU it must be 1")
    if server_args.kv_cache_dtype not in ("auto", "bfloat16", "bf16"):
        problems.append(
            f"--kv-cache-dtype {server_args.kv_cache_dtype}: without a GPU the KV cache has the model's type"
        )
    if problems:
        raise ConfigError("cannot serve on the CPU:\n" + "\n".join(f"  {p}" for p in problems))
