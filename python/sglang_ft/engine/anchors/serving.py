"""Anchors of this process's scheduler: made with its cache, fed by hooks around batches, passes and results."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from sglang.kernels.ops.mamba import mamba_state_scatter_triton
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.plugins.hook_registry import HookType
from sglang.srt.runtime_context import get_context, get_schedule

from sglang_ft.anchors import find
from sglang_ft.config import FtConfig
from sglang_ft.engine.anchors.component import AnchorComponent
from sglang_ft.engine.anchors.decode import DecodeAnchors, DecodePlan
from sglang_ft.engine.anchors.held import StatePool
from sglang_ft.engine.anchors.prefill import (
    FLA_BLOCK,
    ExtendPlan,
    PrefillPlanner,
    Scan,
    lengthen,
    store_inputs,
)
from sglang_ft.engine.hook import Hook
from sglang_ft.memory.planner import recurrent_slots
from sglang_ft.metrics import AnchorMetrics

logger = logging.getLogger(__name__)

# With --ft-anchor-states on a GPU: requests that run at once unless the user says so; states of each (the live one,
# two that SGLang tracks in turn and two of decode.py); and how much of what is free states may take.
_RUNNING, _STATES_A_REQUEST, _STATES_SHARE = 8, 5, 0.5


class AnchorServing:
    """Nothing until a cache of a model with recurrent layers is made, and nothing where anchors cannot work."""

    def __init__(self, config: FtConfig) -> None:
        self.config = config
        self.tokenizer: Any = None
        self.prefill: PrefillPlanner | None = None
        self.decode: DecodeAnchors | None = None
        self._running: ExtendPlan | DecodePlan | None = None  # of the pass that this thread runs or launches
        # A GPU reads a plan's tensors after the host has gone on; two passes are under way at most.
        self._launched: deque[ExtendPlan | DecodePlan] = deque(maxlen=4)

    # ---- when the server starts ----

    def make_cache(self, original: Callable, ctx: Any, server_args: Any, params: Any) -> Any:
        """Around SGLang's maker of the tree."""
        why_not = self._refusal(ctx, server_args, params)
        if why_not is not None:
            if ctx.is_hybrid_ssm and self.config.anchors != find.OFF:
                logger.warning("No anchors: %s", why_not)
            return original(ctx, server_args, params)
        exporter = AnchorMetrics(server_args.served_model_name if server_args.enable_metrics else None)
        made: list[AnchorComponent] = []

        def component(cache: Any, params: Any) -> AnchorComponent:
            made.append(AnchorComponent(cache, params, exporter))
            return made[0]

        params.component_registry_override = {ComponentType.MAMBA: component}
        cache = original(ctx, server_args, params)
        self._start(cache, made[0], ctx, server_args)
        return cache

    def _refusal(self, ctx: Any, server_args: Any, params: Any) -> str | None:
        """Why this server has no anchors; None when it has."""
        pool = ctx.params.req_to_token_pool
        checks = {
            "the model has no recurrent layers": not ctx.is_hybrid_ssm,
            "--ft-anchors off": self.config.anchors == find.OFF,
            "there is no tokenizer (--skip-tokenizer-init)": self.tokenizer is None,
            "the prefix cache is off (--disable-radix-cache)": ctx.disable_radix_cache,
            "a layer has a sliding window in the same tree": ctx.is_hybrid_swa,
            "the cache has a second level (--enable-hierarchical-cache)": ctx.enable_hierarchical_cache,
            f"--speculative-algorithm {server_args.speculative_algorithm}": (
                server_args.speculative_algorithm is not None
            ),
            "--enable-unified-memory": getattr(server_args, "enable_unified_memory", False),
            "--enable-linear-replayssm": getattr(server_args, "enable_linear_replayssm", False),
        }
        if why := next((why for why, is_so in checks.items() if is_so), None):
            return why
        if scan_of(ctx.tp_worker.model_runner.attn_backend, server_args, pool) is None:
            return f"the recurrent layers run by --linear-attn-backend {server_args.linear_attn_backend}"
        return None

    def _start(self, cache: Any, component: AnchorComponent, ctx: Any, server_args: Any) -> None:
        pool = cache.req_to_token_pool
        overlap = not server_args.disable_overlap_schedule
        extra = cache.enable_mamba_extra_buffer
        live = 1 + pool.mamba_ping_pong_track_buffer_size if extra else 2
        states = StatePool(cache, max(0, pool.mamba_pool.size - live * pool.size))
        component.pool = states
        rules = find.rules(
            self.tokenizer, _chat_template(server_args), _parser_markers(server_args), self.config.anchors
        )
        scan = scan_of(ctx.tp_worker.model_runner.attn_backend, server_args, pool)
        assert scan is not None
        self.prefill = PrefillPlanner(
            rules, scan, states, cache.page_size, keeps_ends=extra, began_from=component.began_from
        )
        ends = set(ctx.model_config.hf_eos_token_id or ())
        self.decode = DecodeAnchors(rules, ends, states, overlap, pool.device)
        logger.info(
            "Anchors: %d states of %.2f MiB, %d of them beside those of running requests, one a block of %d tokens; %s",
            pool.mamba_pool.size,
            pool.mamba_pool.mamba_cache.mem_usage_bytes() / (pool.mamba_pool.size + 1) / 2**20,
            states.budget,
            scan.block,
            find.describe(rules),
        )

    def profile_available_bytes(
        self, original: Callable, configurator: Any, pre_model_load_memory: int
    ) -> int:
        """Around SGLang's division of a GPU's memory: as many states as --ft-anchor-states asks for."""
        config, schedule = configurator.mambaish_config, get_schedule()
        if config is not None and self.config.anchor_states and schedule.max_mamba_cache_size is None:
            from sglang_ft.engine.gpu_experts import available_memory

            states = recurrent_slots(
                available_memory(),
                config.mamba2_cache_params.mamba_cache_per_req,
                schedule.max_running_requests or _RUNNING,
                _STATES_A_REQUEST,
                self.config.anchor_states,
                _STATES_SHARE,
            )
            get_context().override("sglang_ft.anchors", max_mamba_cache_size=states)
        return original(configurator, pre_model_load_memory)

    def leave_states(self, most: int, configurator: Any, token_capacity: int) -> int:
        """After SGLang's count of requests that may run at once, which would give all states to them."""
        schedule = get_schedule()
        states = schedule.max_mamba_cache_size
        if configurator.mambaish_config is None or schedule.max_running_requests is not None or not states:
            return most
        wanted = self.config.anchor_states or states // 2
        return requests_beside(wanted, states, most, _STATES_A_REQUEST)

    # ---- around batches, passes and results ----

    def before_extend(self, batch: Any) -> None:
        batch.ft_plan = self.prefill.plan(batch) if self.prefill and not batch.is_dllm() else None

    def before_decode(self, batch: Any) -> None:
        batch.ft_plan = self.decode.plan(batch) if self.decode else None

    def run(self, original: Callable, worker: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Around one forward pass with its sampling."""
        self._running = getattr(batch, "ft_plan", None)
        if self._running is not None:
            self._launched.append(self._running)
        try:
            return original(worker, batch, *args, **kwargs)
        finally:
            self._running = None

    def metadata_made(self, backend: Any, forward_batch: Any) -> None:
        """A backend of linear attention has made its lists for the pass."""
        plan = self._running
        if isinstance(plan, ExtendPlan) and plan.slots and forward_batch.forward_mode.is_extend():
            lengthen(backend.forward_metadata, plan, backend.conv_states_shape[-1], backend.device)

    def before_conv(self, x: torch.Tensor, conv_states: torch.Tensor | None) -> None:
        """A short convolution is about to run over a chunk; x [C, T]."""
        if isinstance(self._running, ExtendPlan) and self._running.slots and conv_states is not None:
            store_inputs(x, conv_states, self._running)

    def ran(self, runner: Any, forward_batch: Any) -> None:
        """The layers of a pass are done, or launched; its tokens may be sampled much later."""
        plan = forward_batch.ft_plan = self._running
        if isinstance(plan, ExtendPlan) and plan.ends:
            pool = runner.req_to_token_pool
            live = pool.get_mamba_indices(forward_batch.req_pool_indices).long()
            pool.mamba_pool.copy_from(live[plan.ends], torch.cat(plan.end_slots).long())
            plan.end_pass.done = True

    def sampled(self, runner: Any, forward_batch: Any, tokens: torch.Tensor) -> None:
        """The next tokens [B] of a pass are sampled, on the device at least."""
        plan = getattr(forward_batch, "ft_plan", None)
        if not isinstance(plan, DecodePlan):
            return
        assert self.decode is not None
        plan.done = True
        pool, rows = runner.req_to_token_pool, len(plan.slots)
        mask = torch.isin(tokens[:rows].long(), self.decode.first_ids)
        if mask.device.type == "cpu" and not mask.any():
            return
        live = pool.get_mamba_indices(forward_batch.req_pool_indices[:rows]).long()
        copy_masked(runner, pool, live, mask, plan.slots)

    def stash_before_abort(self, scheduler: Any) -> None:
        """Of a request that ends in the middle of its prompt, the chunks that have run stay for its retry."""
        req = scheduler._pending_chunked_abort_req
        if self.prefill is None or req is None or scheduler.chunked_req is not req:
            return
        if not getattr(req, "skip_radix_cache_insert", False) and req.extend_range is not None:
            if req.extend_range.end > len(req.prefix_indices):
                scheduler.stash_chunked_request(req)


def requests_beside(anchors: int, states: int, most: int, a_request: int) -> int:
    """Requests that may run at once, at most `most`, so that `anchors` of all states are left; at least one."""
    return max(1, min(most, (states - anchors) // a_request))


def copy_masked(
    runner: Any, pool: Any, source: torch.Tensor, mask: torch.Tensor, target: torch.Tensor
) -> None:
    """Copies states [B] of masked requests; one launch where SGLang has a kernel for the pool's layout."""
    linear = getattr(runner.attn_backend, "linear_attn_backend", None)
    layout = linear._track_pools() if linear is not None else None
    if layout is None or len(pool.mamba_pool.mamba_cache.conv) > 1:
        # The others copy to the slot that nobody reads.
        pool.mamba_pool.copy_from(source, torch.where(mask, target, 0))
        return
    mamba_state_scatter_triton.track_mamba_states_all_layers(
        layout[0], layout[1], source, mask, target, len(source)
    )


def scan_of(attn_backend: Any, server_args: Any, pool: Any) -> Scan | None:
    """How the recurrent layers behind a backend scan; None where their states cannot be had."""
    from sglang.srt.layers.attention.hybrid_linear_attn_backend import Mamba2AttnBackend
    from sglang.srt.layers.attention.linear.gdn_backend import GDNAttnBackend
    from sglang.srt.layers.attention.linear.kda_backend import KDAAttnBackend
    from sglang.srt.layers.attention.linear.short_conv_backend import ShortConvAttnBackend

    linear = getattr(attn_backend, "linear_attn_backend", None)
    convs = pool.mamba_pool.mamba_cache.conv
    if linear is None or not hasattr(linear, "conv_states_shape"):
        return None
    width = linear.conv_states_shape[-1]
    if type(linear) is ShortConvAttnBackend:
        return Scan(1, width) if len(convs) == 1 else None
    if server_args.linear_attn_backend != "triton":
        return None
    if isinstance(linear, (GDNAttnBackend, KDAAttnBackend)):
        return Scan(FLA_BLOCK, width)
    if isinstance(linear, Mamba2AttnBackend):
        return Scan(linear.mamba_chunk_size, width, packed=True)
    return None


def _chat_template(server_args: Any) -> str | None:
    """The text of a template that the user gave as a file; None: the tokenizer's own."""
    path = server_args.chat_template
    return Path(path).read_text() if path and path.endswith(".jinja") and Path(path).is_file() else None


def _parser_markers(server_args: Any) -> list:
    from sglang_ft.engine.anchors.markers import parser_markers

    return parser_markers(server_args.reasoning_parser, server_args.tool_call_parser)


def hooks(serving: AnchorServing, on_gpu: bool) -> list[Hook]:
    """Hooks for the scheduler process. Without a GPU the CPU platform sizes the pool of states."""

    def tokenizer_made(result: None, scheduler: Any) -> None:
        serving.tokenizer = scheduler.tokenizer

    def extend_prepared(result: None, batch: Any) -> None:
        serving.before_extend(batch)

    def decode_prepared(result: None, batch: Any) -> None:
        serving.before_decode(batch)

    def metadata_made(result: None, backend: Any, forward_batch: Any) -> None:
        serving.metadata_made(backend, forward_batch)

    def ran(result: Any, runner: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> None:
        serving.ran(runner, forward_batch)

    def sampled(
        tokens: torch.Tensor, runner: Any, logits_output: Any, forward_batch: Any, *args: Any
    ) -> None:
        serving.sampled(runner, forward_batch, tokens)

    def step_known(processor: Any, req: Any, batch: Any, result: Any, i: int) -> None:
        if serving.decode is not None:
            serving.decode.processed(req)

    managers, attention = "sglang.srt.managers", "sglang.srt.layers.attention"
    batch = f"{managers}.schedule_batch.ScheduleBatch"
    found = [
        Hook(f"{managers}.scheduler.Scheduler.init_tokenizer", HookType.AFTER, tokenizer_made, "(self)"),
        Hook(
            "sglang.srt.mem_cache.registry._create_unified_radix_cache",
            HookType.AROUND,
            serving.make_cache,
            "(ctx, server_args, params)",
        ),
        Hook(f"{batch}.prepare_for_extend", HookType.AFTER, extend_prepared, "(self)"),
        Hook(f"{batch}.prepare_for_decode", HookType.AFTER, decode_prepared, "(self)"),
        Hook(
            f"{managers}.tp_worker.TpModelWorker.forward_batch_generation",
            HookType.AROUND,
            serving.run,
            "(self, batch, forward_batch=None, pp_proxy_tensors=None, is_verify=False, skip_attn_backend_init=None, "
            "*, capture_hidden_mode=None)",
        ),
        Hook(
            "sglang.srt.model_executor.model_runner.ModelRunner.forward",
            HookType.AFTER,
            ran,
            "(self, forward_batch, skip_attn_backend_init=None, pp_proxy_tensors=None, reinit_attn_backend=False, "
            "split_forward_count=1)",
        ),
        Hook(
            "sglang.srt.model_executor.model_runner.ModelRunner.sample",
            HookType.AFTER,
            sampled,
            "(self, logits_output, forward_batch)",
        ),
        Hook(
            f"{managers}.scheduler_components.batch_result_processor.SchedulerBatchResultProcessor"
            "._mamba_prefix_cache_update",
            HookType.BEFORE,
            step_known,
            "(self, req, batch, result, i)",
        ),
        Hook(
            f"{managers}.scheduler.Scheduler.process_pending_chunked_abort",
            HookType.BEFORE,
            serving.stash_before_abort,
            "(self)",
        ),
    ]
    for backend in ("linear.gdn_backend.GDNAttnBackend", "linear.kda_backend.KDAAttnBackend"):
        found.append(
            Hook(
                f"{attention}.{backend}.init_forward_metadata",
                HookType.AFTER,
                metadata_made,
                "(self, forward_batch)",
            )
        )
    mamba2 = f"{attention}.hybrid_linear_attn_backend.Mamba2AttnBackend.init_forward_metadata"
    found.append(Hook(mamba2, HookType.AFTER, metadata_made, "(self, forward_batch)"))
    if on_gpu:
        target = "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator._profile_available_bytes"
        sized = serving.profile_available_bytes
        found.append(Hook(target, HookType.AROUND, sized, "(self, pre_model_load_memory)"))
        if serving.config.anchors != find.OFF:
            target = "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator.resolve_max_num_reqs"
            found.append(Hook(target, HookType.AFTER, serving.leave_states, "(self, token_capacity)"))
    return [*found, short_conv_hook(serving)]


def short_conv_hook(serving: AnchorServing) -> Hook:
    """Models with short convolutions alone run them themselves, by this function."""

    def conv(original: Callable, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if serving.prefill is not None and serving.prefill.scan.block == 1:
            states = kwargs.get("conv_states", args[5] if len(args) > 5 else None)
            serving.before_conv(x, states)
        return original(x, *args, **kwargs)

    return Hook(
        "sglang.srt.layers.attention.mamba.causal_conv1d.causal_conv1d_fn",
        HookType.AROUND,
        conv,
        "(x, weight, bias=None, query_start_loc=None, cache_indices=None, has_initial_state=None, conv_states=None, "
        "activation='silu', pad_slot_id=-1, **kwargs)",
    )
