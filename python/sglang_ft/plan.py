"""The short plan that the server prints before it loads: what runs where, and how large it is."""

from __future__ import annotations

from dataclasses import dataclass

from sglang_ft.checkpoint import ModelSummary

GIB = 1 << 30


@dataclass(frozen=True)
class StartPlan:
    """Decisions of one start. Bytes are host memory; `isa` is what the worker reported or will choose."""

    model: ModelSummary
    platform: str
    dtype: str
    worker_threads: int
    isa: str
    context_length: int
    available_bytes: int
    reserve_gib: float

    @property
    def pool_bytes(self) -> int:
        return self.model.pool_bytes_as(self.dtype) if self.model.is_moe else 0


def render(plan: StartPlan) -> str:
    """The plan as a table of two columns."""
    rows = [
        ("model", f"{plan.model.path} ({plan.model.architecture})"),
        ("experts", _experts(plan.model)),
        ("expert pool", _pool(plan)),
        ("other weights", f"{_size(plan.model.other_bytes)} on the {plan.platform.upper()}, {plan.dtype}"),
        ("context", f"{plan.context_length:,} tokens"),
        ("memory", f"{_size(plan.available_bytes)} available, {plan.reserve_gib:g} GiB kept free"),
    ]
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"  {name:<{width}}  {value}" for name, value in rows)


def _experts(model: ModelSummary) -> str:
    if not model.is_moe:
        return "none: a dense model, served as by SGLang"
    return (
        f"{model.num_moe_layers} of {model.num_layers} layers x {model.num_experts}, top {model.top_k}, "
        f"{_size(model.expert_bytes)} each ({model.hidden} x {model.moe_intermediate}, {model.dtype})"
    )


def _pool(plan: StartPlan) -> str:
    if not plan.model.is_moe:
        return "none"
    if plan.platform == "gpu":
        where = "host memory; what the GPU has room for is copied to it, the rest on demand or run here:"
    else:
        where = "all in the cpu_worker:"
    return f"{_size(plan.pool_bytes)}, {where} {plan.worker_threads} threads, {plan.isa}"


def _size(nbytes: int) -> str:
    for unit, name in ((GIB, "GiB"), (1 << 20, "MiB")):
        if nbytes >= unit:
            return f"{nbytes / unit:.2f} {name}"
    return f"{nbytes / 1024:.1f} KiB"
