"""Routed experts of SGLang's models, run by the cpu_worker or from the expert cache on the GPU.

After a model is built and before its weights are loaded, the parameters of every FusedMoE layer become views of
the expert pool, so that SGLang's own weight loaders fill the pool; the layer's method then sends each step to the
worker or to the cache. A step that fails leaves a failure behind for engine/scheduler.py, which ends the requests of
that batch.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE
from sglang.srt.layers.moe.token_dispatcher import StandardCombineInput
from sglang.srt.layers.moe.topk import TopK
from sglang.srt.layers.quantization.base_config import FusedMoEMethodBase
from sglang.srt.layers.quantization.unquant import UnquantizedFusedMoEMethod

from sglang_ft.errors import CheckpointError, WorkerError
from sglang_ft.experts.bank import BankPlan, ExpertPool, plan_banks
from sglang_ft.experts.formats import FORMATS, LayerSpec, find_format
from sglang_ft.worker.protocol import Activation
from sglang_ft.worker.supervisor import Supervisor

if TYPE_CHECKING:
    from collections.abc import Callable

    from sglang_ft.engine.gpu_experts import GpuExperts
    from sglang_ft.worker.memory import MemoryFile

logger = logging.getLogger(__name__)

_ACTIVATIONS = {
    "silu": Activation.SILU,
    "gelu": Activation.GELU,
    "relu2": Activation.RELU2,
}

# Models that multiply the layer's output by the routed scaling factor themselves when they do not run on CUDA
# (their module asks for the platform at import). For all others the layer's method has to.
_SCALES_ITSELF = ("deepseek_v2", "glm4_moe", "glm4_moe_lite")


class ExpertLayers:
    """The MoE layers of one model, their pool and the worker behind them."""

    def __init__(
        self,
        model: torch.nn.Module,
        on_gpu: bool = False,
        make_file: Callable[[BankPlan], MemoryFile | None] | None = None,
    ) -> None:
        """`make_file` gives the memory of the pool; without it, or where it gives None, it is fresh."""
        self._on_gpu = on_gpu
        self.layers = [
            (name, module) for name, module in model.named_modules() if isinstance(module, FusedMoE)
        ]
        parents = {name: model.get_submodule(name.rpartition(".")[0]) for name, _ in self.layers}
        specs = [layer_spec(name, layer, parents[name], on_gpu) for name, layer in self.layers]
        self.topk = max((num_routes(layer, parents[name]) for name, layer in self.layers), default=0)
        self.plan = plan_banks(specs)
        self.pool = ExpertPool(self.plan, make_file(self.plan) if make_file and specs else None)
        self.worker: Supervisor | None = None
        self.gpu: GpuExperts | None = None
        self.failure: WorkerError | None = None
        for index, (_, layer) in enumerate(self.layers):
            self._adopt(index, layer)

    @property
    def expert_tensor_bytes(self) -> int:
        """Bytes of all experts in the pool, without the padding between banks."""
        return sum(layer.spec.expert_bytes * layer.spec.num_experts for layer in self.plan.layers)

    def take_failure(self) -> WorkerError | None:
        """The failure of the forward pass that just ended, if any."""
        failure, self.failure = self.failure, None
        return failure

    def run(
        self, index: int, layer: FusedMoE, stock: FusedMoEMethodBase, dispatch_output: Any
    ) -> torch.Tensor:
        """One step of MoE layer `index`; zeros once this forward pass has failed, its result is thrown away."""
        x, topk = dispatch_output.hidden_states, dispatch_output.topk_output
        if self.failure is None:
            assert self.worker is not None, "the worker starts before the first forward pass"
            try:
                if self.gpu is not None:
                    return self.gpu.run(index, layer, stock, dispatch_output)
                return self.worker.run(index, x, topk.topk_ids, topk.topk_weights)
            except WorkerError as e:
                logger.error("MoE layer %d: %s", index, e)
                self.failure = e
        return torch.zeros_like(x)

    def _adopt(self, index: int, layer: FusedMoE) -> None:
        fmt = self.plan.layers[index].spec.format
        for role, bank in self.pool.banks(index).items():
            parameter = layer.get_parameter(fmt.parameters[role])
            if parameter.shape != bank.shape:
                raise CheckpointError(
                    f"{self.layers[index][0]}.{fmt.parameters[role]} has shape {tuple(parameter.shape)}; "
                    f"{fmt.name} experts have {tuple(bank.shape)}"
                )
            parameter.data = bank
        stock = layer.quant_method
        del layer.quant_method  # a module: it must leave before a plain object takes its name
        layer.quant_method = PooledMoEMethod(self, index, stock)
        # Shared experts may still read the rows that a step would overwrite.
        layer.moe_runner_config.inplace = False


class PooledMoEMethod(FusedMoEMethodBase):
    """The method of a FusedMoE layer whose experts lie in the pool. `stock` is what SGLang had chosen."""

    def __init__(self, experts: ExpertLayers, index: int, stock: FusedMoEMethodBase) -> None:
        self.experts = experts
        self.index = index
        self.stock = stock

    def create_weights(self, layer: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
        raise AssertionError("the layer's weights were created by its first method")

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Nothing: the pool keeps the checkpoint's layout."""

    def apply(self, layer: torch.nn.Module, dispatch_output: Any) -> StandardCombineInput:
        """hidden_states [T, H] -> [T, H], the routed experts' sum."""
        x = dispatch_output.hidden_states
        if x.shape[0] == 0:
            return StandardCombineInput(hidden_states=x)
        out = self.experts.run(self.index, layer, self.stock, dispatch_output)
        return StandardCombineInput(hidden_states=out)


def layer_spec(name: str, layer: FusedMoE, parent: torch.nn.Module, on_gpu: bool = False) -> LayerSpec:
    """Describes a FusedMoE layer for the worker. Raises CheckpointError for what we cannot run."""
    config = layer.moe_runner_config
    method = layer.quant_method
    plain = isinstance(method, UnquantizedFusedMoEMethod)
    quantization = None if plain else type(method).__name__
    dtype = str(config.params_dtype).removeprefix("torch.")
    fmt = find_format(quantization, dtype)
    if fmt is None:
        raise CheckpointError(
            f"{name}: experts of type {quantization or dtype} are not supported; "
            f"supported are {', '.join(f.name for f in FORMATS)}"
        )
    if config.activation not in _ACTIVATIONS:
        raise CheckpointError(f"{name}: activation {config.activation!r} is not supported")
    clamped_swiglu = config.gemm1_alpha is not None
    return LayerSpec(
        format=fmt,
        num_experts=layer.num_local_experts,
        hidden=layer.hidden_size,
        intermediate=layer.intermediate_size_per_partition,
        activation=Activation.SWIGLU_OAI if clamped_swiglu else _ACTIVATIONS[config.activation],
        gated=config.is_gated,
        interleaved=clamped_swiglu and config.gate_up_interleaved,
        bias=layer.with_bias,
        weight_on_input=config.apply_router_weight_on_input,
        output_scale=_output_scale(layer, parent, on_gpu),
        act_alpha=config.gemm1_alpha or 0.0,
        act_limit=config.gemm1_clamp_limit or config.swiglu_limit or 0.0,
    )


def num_routes(layer: FusedMoE, parent: torch.nn.Module) -> int:
    """Experts that a row is routed to. Some models (OLMoE) tell only their router, not the layer."""
    if layer.moe_runner_config.top_k is not None:
        return layer.moe_runner_config.top_k
    routers = [module for module in parent.children() if isinstance(module, TopK)]
    return routers[0].topk_config.top_k if routers else layer.num_local_experts


def _output_scale(layer: FusedMoE, parent: torch.nn.Module, on_gpu: bool) -> float:
    factor = layer.moe_runner_config.routed_scaling_factor
    if factor is None or layer.should_fuse_routed_scaling_factor_in_topk:
        return 1.0
    modules = {cls.__module__.rpartition(".")[2] for cls in type(parent).__mro__}
    return 1.0 if not on_gpu and modules.intersection(_SCALES_ITSELF) else factor
