"""The plan of GPU and host memory, made from a checkpoint's headers and config before anything is allocated.

`plan` answers for a machine that need not be this one; `divide` is the same decision for a server that has loaded the
dense weights and knows what is left. Speeds are estimates from bandwidths and a typical miss rate.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sglang_ft.config import MoeMode
from sglang_ft.errors import MemoryBudgetError
from sglang_ft.memory.shapes import ModelMemory

if TYPE_CHECKING:
    from sglang_ft.checkpoint import ModelSummary

GIB = 1 << 30

DEFAULT_CONTEXT = 32 << 10
CHUNKS = (8192, 4096, 2048, 1024, 512)
_KV_SHARE = 0.2
"""Of what is left after the dense weights; the KV cache gets it when the user names no number of slots."""
_KV_LEAST = 1 * GIB
_BUFFER_SHARES = (4, 2)
"""Prefill borrows a quarter of the slots for its buffers, or half of them where they are few."""
_MOST_GROUPS = 32
"""Of a layer."""
_LEAST_STREAMED_CHUNK = 1024
"""A shorter chunk would stream the pool too often."""

# On the GPU whatever the model; measured on an H200 with SGLang 0.5.17.
DENSE_ITEM, RESERVE_ITEM = "dense weights", "reserve"
CUDA_ITEM, CUDA_BYTES = "CUDA and libraries", int(0.75 * GIB)
_WORKSPACE = int(0.4 * GIB)
_GRAPHS = int(0.25 * GIB)
_RESERVE, _RESERVE_SHARE = int(0.25 * GIB), 0.02
_SMALL_GPU = 16 * GIB
_STATES_A_REQUEST = 3  # the live one, and two that are kept in turn while decoding
_STATES_KEPT = 16  # and so many for later turns, when the user names no number
_STATES_SHARE = 0.05  # of what the dense weights leave, at most

_PROCESSES = 4 * GIB
"""Tokenizer, scheduler and detokenizer with their libraries."""

# Share of slots -> share of routes that miss. The paper's figure 4b at 11 % (39 %) and 37 % (16 %) of the experts.
_MISSES = ((0.0, 1.0), (0.11, 0.39), (0.37, 0.16), (0.7, 0.05), (1.0, 0.0))
_LAYER_S = 50e-6
"""Of a layer whatever its size: some twenty small kernels."""
_MOE_S, _MISS_S = 10e-6, 25e-6
_DENSE_SHARE, _EXPERTS_SHARE, _STREAM_SHARE = 0.8, 0.6, 0.95


@dataclass(frozen=True)
class Machine:
    """Bytes that may be used, 0 without a GPU; bytes a second of link and CPU, both busy, and of the GPU's memory."""

    gpu_bytes: int
    ram_bytes: int
    link: float = 25e9
    cpu: float = 45e9
    gpu: float = 0.9e12


@dataclass(frozen=True)
class Wishes:
    """What the user asks for; 0 and auto: ours to choose."""

    mode: MoeMode = "auto"
    slots: int = 0
    context: int = 0
    requests: int = 0
    chunk: int = 0
    kv_tokens: int = 0
    states: int = 0
    """Recurrent states that are kept for later turns."""
    ram_reserve: int = 2 * GIB


@dataclass(frozen=True)
class Item:
    """One line of the plan."""

    name: str
    where: str
    nbytes: int


@dataclass(frozen=True)
class Problem:
    """Why a plan does not fit, with a number, and what mends it."""

    what: str
    cure: str


@dataclass(frozen=True)
class GpuPlan:
    """What the experts get of the GPU. `group`: experts of each of the two buffers that prefill borrows of the slots;
    0: none, long prompts run on the CPU or need no buffers."""

    mode: MoeMode
    slots: int
    group: int = 0


@dataclass(frozen=True)
class Speeds:
    """Estimates: tokens a second of one request; the most that streaming what is not cached once a chunk allows."""

    miss_rate: float
    decode: float
    prefill_at_most: float


@dataclass(frozen=True)
class MemoryPlan:
    """Where everything goes. It fits when there is no problem."""

    experts: GpuPlan
    total_experts: int
    kv_tokens: int
    requests: int
    states: int
    """Recurrent states, of running requests and kept ones."""
    chunk: int
    items: tuple[Item, ...]
    problems: tuple[Problem, ...]
    speeds: Speeds

    @property
    def fits(self) -> bool:
        return not self.problems

    def total(self, where: str) -> int:
        return sum(item.nbytes for item in self.items if item.where == where)

    def beside_experts(self) -> int:
        """GPU memory that is taken after the experts: everything but them, the dense weights and CUDA's own."""
        before = (DENSE_ITEM, CUDA_ITEM, "expert slots")
        return sum(item.nbytes for item in self.items if item.where == "gpu" and item.name not in before)


def divide(
    mode: MoeMode,
    slots: int,
    expert_bytes: int,
    num_experts: int,
    layers: int,
    available: int,
    kv_least: int = _KV_LEAST,
    kv_most: float = math.inf,
) -> GpuPlan:
    """Mode, slots and prefill's buffers for `available` bytes that experts and KV cache share; see Wishes.

    Unless the user names slots, the KV cache is left a fifth, within `kv_least` and `kv_most` bytes. Raises
    MemoryBudgetError for what cannot fit.
    """
    everything = layers * num_experts
    need = everything * expert_bytes
    left = max(0, available - max(kv_least, int(min(available * _KV_SHARE, kv_most))))
    if mode == "resident" and need > available:
        raise MemoryBudgetError(
            f"--ft-moe-mode resident: all experts need {need / GIB:.2f} GiB of GPU memory, "
            f"{available / GIB:.2f} GiB are available; leave the flag out to cache a part of them"
        )
    if mode == "resident" or (mode == "auto" and not slots and need <= left):
        return GpuPlan("resident", everything)
    if mode == "cpu":
        return GpuPlan("cpu", 0)
    if slots and slots * expert_bytes > available:
        raise MemoryBudgetError(
            f"--ft-slots {slots} need {slots * expert_bytes / GIB:.2f} GiB of GPU memory, "
            f"{available / GIB:.2f} GiB are available"
        )
    slots = min(everything, slots or left // expert_bytes)
    if not slots:
        return GpuPlan("cpu", 0)
    return GpuPlan("hybrid" if mode == "auto" else mode, slots, buffer_group(slots, num_experts))


def buffer_group(slots: int, num_experts: int) -> int:
    """Experts of each of prefill's two buffers: a layer's, or the largest part of them that leaves enough slots."""
    for share in _BUFFER_SHARES:
        group = num_experts
        while group * _MOST_GROUPS >= num_experts:
            if 2 * group <= slots // share:
                return group
            group = (group + 1) // 2 if group > 1 else 0
    return 0


def recurrent_slots(free: int, state: int, running: int, a_request: int, anchors: int, share: float) -> int:
    """Recurrent states to make room for: `a_request` for each running one, and `anchors` for prefixes.

    At most `share` of the `free` bytes, of which prefixes give way first; at least one running request's four.
    """
    return max(4, min(running * a_request + anchors, int(free * share) // state))


def plan(model: ModelSummary, memory: ModelMemory, machine: Machine, wishes: Wishes) -> MemoryPlan:
    """The plan for a MoE model. Never raises for what does not fit: `problems` has all of it."""
    problems: list[Problem] = []
    requests = wishes.requests or (4 if machine.gpu_bytes >= _SMALL_GPU else 1)
    context = wishes.context or min(model.context_length or DEFAULT_CONTEXT, DEFAULT_CONTEXT)
    if model.context_length and context > model.context_length:
        problems.append(
            Problem(
                f"a context of {context:,} tokens: the model was made for {model.context_length:,}",
                f"--context {model.context_length}",
            )
        )
    states = _count_states(model, memory, machine, wishes, requests)
    base = [
        Item(DENSE_ITEM, "gpu", model.other_bytes),
        Item(CUDA_ITEM, "gpu", CUDA_BYTES),
        Item("attention workspace", "gpu", _WORKSPACE),
        Item("CUDA graphs", "gpu", _GRAPHS),
        Item("recurrent states", "gpu", states * memory.state),
        Item(RESERVE_ITEM, "gpu", max(_RESERVE, int(_RESERVE_SHARE * machine.gpu_bytes))),
    ]
    if machine.gpu_bytes == 0:
        return _without_gpu(model, memory, machine, wishes, context, requests, problems)
    kv_least = math.ceil((wishes.kv_tokens or context) * memory.kv_token)
    chunk, experts, room = _choose_chunk(model, memory, machine, wishes, base, kv_least, requests, problems)
    taken = _taken(model, experts)
    kv_tokens = wishes.kv_tokens or _kv_tokens(memory, room - taken, model, context, requests)
    if room - taken < kv_least:
        problems.append(_context_problem(memory, room, kv_least, context))
    items = [
        *base,
        Item("activations of a chunk", "gpu", _activations(memory, chunk, requests)),
        Item("expert slots", "gpu", experts.slots * model.expert_bytes),
        Item("KV cache", "gpu", math.ceil(kv_tokens * memory.kv_token)),
        *_host_items(model, wishes),
    ]
    sizes = (kv_tokens, requests, states, chunk)
    return _finish(model, memory, machine, experts, sizes, items, problems)


def _count_states(
    model: ModelSummary, memory: ModelMemory, machine: Machine, wishes: Wishes, requests: int
) -> int:
    """Recurrent states: of running requests, and as many kept ones as are wanted or a twentieth of the memory holds."""
    if not memory.state:
        return 0
    left = max(0, (machine.gpu_bytes or machine.ram_bytes) - model.other_bytes)
    kept = wishes.states or min(_STATES_KEPT, int(_STATES_SHARE * left / memory.state))
    return _STATES_A_REQUEST * requests + kept


def _choose_chunk(
    model: ModelSummary,
    memory: ModelMemory,
    machine: Machine,
    wishes: Wishes,
    base: Sequence[Item],
    kv_least: int,
    requests: int,
    problems: list[Problem],
) -> tuple[int, GpuPlan, int]:
    """Chunk, experts and the bytes that experts and KV cache share.

    The longest chunk with which experts stream or all are resident; where none does, a short one that leaves the more
    to slots.
    """
    fixed = sum(item.nbytes for item in base)
    without_streams = None
    for chunk in (wishes.chunk,) if wishes.chunk else CHUNKS:
        room = machine.gpu_bytes - fixed - _activations(memory, chunk, requests)
        refused = []
        try:
            experts = divide(
                wishes.mode,
                wishes.slots,
                model.expert_bytes,
                model.num_experts,
                model.num_moe_layers,
                max(room, 0),
                kv_least,
                kv_least * requests,
            )
        except MemoryBudgetError as e:
            experts = GpuPlan("cpu", 0)
            refused = [Problem(str(e), "leave the flag out, or free GPU memory")]
        fits = not refused and room - _taken(model, experts) >= kv_least
        option = (chunk, experts, room, refused)
        streams = experts.group and chunk >= _LEAST_STREAMED_CHUNK
        if fits and (experts.mode == "resident" or streams):
            break
        if fits and chunk >= _LEAST_STREAMED_CHUNK:
            without_streams = option
    else:
        option = without_streams or option
    chunk, experts, room, refused = option
    problems += refused
    return chunk, experts, room


def _activations(memory: ModelMemory, chunk: int, requests: int) -> int:
    return chunk * memory.chunk_token + 2 * requests * memory.logits_row


def _taken(model: ModelSummary, experts: GpuPlan) -> int:
    return experts.slots * model.expert_bytes


def _kv_tokens(memory: ModelMemory, nbytes: int, model: ModelSummary, context: int, requests: int) -> int:
    most = max(context, (model.context_length or context) * requests)
    return min(most, int(max(nbytes, 0) / memory.kv_token)) if memory.kv_token else most


def _context_problem(memory: ModelMemory, room: int, kv_least: int, context: int) -> Problem:
    if room <= 0:
        return Problem(
            f"the GPU lacks {-room / GIB:.2f} GiB for the dense weights and what serving takes beside them",
            "a GPU with more memory, a smaller quantization, or --vram 0 for the CPU alone",
        )
    possible = int(room / memory.kv_token) // 1024 * 1024 if memory.kv_token else context
    return Problem(
        f"a context of {context:,} tokens takes {kv_least / GIB:.2f} GiB of KV cache, {room / GIB:.2f} GiB are left",
        f"--context {possible}" if possible else "a GPU with more memory",
    )


def _host_items(model: ModelSummary, wishes: Wishes) -> list[Item]:
    return [
        Item("expert pool", "host", model.pool_bytes),
        Item("processes", "host", _PROCESSES),
        Item("kept free", "host", wishes.ram_reserve),
    ]


def _without_gpu(
    model: ModelSummary,
    memory: ModelMemory,
    machine: Machine,
    wishes: Wishes,
    context: int,
    requests: int,
    problems: list[Problem],
) -> MemoryPlan:
    chunk = wishes.chunk or CHUNKS[2]
    states = _count_states(model, memory, machine, wishes, requests)
    kv_tokens = wishes.kv_tokens or context
    items = [
        *_host_items(model, wishes),
        Item("dense weights", "host", model.other_bytes),
        Item("recurrent states", "host", states * memory.state),
        Item("activations of a chunk", "host", _activations(memory, chunk, requests)),
        Item("KV cache", "host", math.ceil(kv_tokens * memory.kv_token)),
    ]
    experts = GpuPlan("cpu", 0)
    if wishes.mode not in ("auto", "cpu") or wishes.slots:
        problems.append(Problem("--ft-moe-mode or --ft-slots without a GPU", "leave them out"))
    sizes = (kv_tokens, requests, states, chunk)
    return _finish(model, memory, machine, experts, sizes, items, problems)


def _finish(
    model: ModelSummary,
    memory: ModelMemory,
    machine: Machine,
    experts: GpuPlan,
    sizes: tuple[int, int, int, int],
    items: list[Item],
    problems: list[Problem],
) -> MemoryPlan:
    total = model.num_moe_layers * model.num_experts
    host = sum(item.nbytes for item in items if item.where == "host")
    if host > machine.ram_bytes:
        problems.append(
            Problem(
                f"the host needs {host / GIB:.1f} GiB of memory, {model.pool_bytes / GIB:.1f} of it for the expert "
                f"pool; {machine.ram_bytes / GIB:.1f} GiB are there",
                f"{math.ceil((host - machine.ram_bytes) / GIB)} GiB more memory, or a smaller quantization",
            )
        )
    speeds = estimate(model, memory, machine, experts, chunk=sizes[-1])
    used = tuple(item for item in items if item.nbytes)
    return MemoryPlan(experts, total, *sizes, used, tuple(problems), speeds)


def estimate(
    model: ModelSummary, memory: ModelMemory, machine: Machine, experts: GpuPlan, chunk: int
) -> Speeds:
    """Speeds of one request by bytes and bandwidths; on the reference machine within a tenth of what was measured."""
    total = model.num_moe_layers * model.num_experts
    misses = 0.0 if experts.mode == "resident" else miss_rate(experts.slots / total)
    dense = machine.gpu if machine.gpu_bytes else machine.cpu
    step = model.num_layers * _LAYER_S + model.other_bytes / (_DENSE_SHARE * dense)
    missed = model.top_k * misses
    rates = {"cache": machine.link, "cpu": machine.cpu, "hybrid": machine.link + machine.cpu}
    hits = (model.top_k - missed) * model.expert_bytes / (_EXPERTS_SHARE * machine.gpu)
    moe = _MOE_S + max(
        hits, missed * model.expert_bytes / rates.get(experts.mode, math.inf) + min(missed, 1) * _MISS_S
    )
    step += model.num_moe_layers * moe
    streamed = total - max(0, experts.slots - 2 * experts.group) if experts.group else 0
    stream = streamed * model.expert_bytes / (_STREAM_SHARE * machine.link)
    return Speeds(misses, 1 / step, chunk / stream if stream else math.inf)


def miss_rate(share: float) -> float:
    """Of a least-recently-used cache with slots for `share` of the experts: between the points of _MISSES."""
    for (low, high_rate), (high, low_rate) in zip(_MISSES, _MISSES[1:], strict=False):
        if share <= high:
            part = (share - low) / (high - low)
            if low_rate == 0:
                return high_rate * (1 - part)
            return high_rate * (low_rate / high_rate) ** part
    return 0.0


def render_items(plan: MemoryPlan, where: str) -> list[str]:
    """A line for each thing that goes to the "gpu" or the "host"."""
    return [f"  {item.name:<24}{item.nbytes / GIB:9.2f} GiB" for item in plan.items if item.where == where]


def render(plan: MemoryPlan, machine: Machine, bandwidths: str) -> str:
    """The plan as text; `bandwidths` says where they come from."""
    lines = []
    for where, name, size in (("gpu", "GPU", machine.gpu_bytes), ("host", "host", machine.ram_bytes)):
        if not any(item.where == where for item in plan.items):
            continue
        lines.append(f"{name}: {plan.total(where) / GIB:.2f} of {size / GIB:.2f} GiB")
        lines += render_items(plan, where)
    experts, speeds = plan.experts, plan.speeds
    share = f", {100 * experts.slots / plan.total_experts:.0f} %" if plan.total_experts else ""
    prefill = f"streams groups of {experts.group}" if experts.group else "in slots"
    if experts.mode == "cpu" or (experts.slots < plan.total_experts and not experts.group):
        prefill = "by the worker"
    lines += [
        f"experts: {experts.mode}, {experts.slots:,} of {plan.total_experts:,} in slots{share}; prefill {prefill}, "
        f"{plan.chunk:,} tokens a chunk",
        f"context: {plan.kv_tokens:,} tokens of KV cache, up to {plan.requests} requests at once",
        f"speed, estimated ({bandwidths}): {speeds.decode:.0f} tokens/s decoding one request, "
        f"{100 * speeds.miss_rate:.0f} % of the routes missing"
        + (
            f"; prefill at most {speeds.prefill_at_most:,.0f} tokens/s"
            if speeds.prefill_at_most < math.inf
            else ""
        ),
    ]
    for problem in plan.problems:
        lines.append(f"does not fit: {problem.what}\n  mend: {problem.cure}")
    return "\n".join(lines)
