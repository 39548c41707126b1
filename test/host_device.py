"""A device that is the host: what runs on a GPU, with its kernels written in Python, so that all around them is tested
where there is none.

`install` gives modules a torch whose device is the CPU, and a library with the C interface of sgl-ft-kernel over host
memory. The plan is the real one, built for the host. Streams run everything at once, in the order of its launch.
"""

from __future__ import annotations

import contextlib
import ctypes
import time
from types import ModuleType
from typing import Any

import torch

from sglang_ft import kernels
from sglang_ft.experts.formats import FORMATS, LayerSpec
from sglang_ft.experts.reference import activate
from sglang_ft.kernels import abi
from sglang_ft.worker.protocol import Activation, Block, DType, LayerFlag, Role

DTYPES = {DType.BF16: torch.bfloat16, DType.FP16: torch.float16}


def memory(address: int, nbytes: int) -> torch.Tensor:
    """uint8 [nbytes] over host memory."""
    return torch.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), dtype=torch.uint8)


def array(address: int, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    count = dtype.itemsize
    for n in shape:
        count *= n
    return memory(address, count).view(dtype).view(*shape)


class Stream:
    """Of a device that does everything when it is asked to."""

    cuda_stream = 0

    def __init__(self, *args: Any) -> None: ...
    def synchronize(self) -> None: ...
    def wait_event(self, event: Any) -> None: ...


class Event:
    def __init__(self, enable_timing: bool = False) -> None:
        self.at: float | None = None

    def record(self, stream: Any = None) -> None:
        self.at = time.monotonic()

    def query(self) -> bool:
        return True

    def synchronize(self) -> None: ...

    def elapsed_time(self, end: Event) -> float:
        assert self.at is not None and end.at is not None, "a time of an event that was never recorded"
        return (end.at - self.at) * 1e3


class Cuda:
    """torch.cuda of that device. `free` bytes can be set."""

    Stream, Event = Stream, Event
    total = 64 << 30

    def __init__(self) -> None:
        self.free = self.total
        self.allocated = 0

    def current_stream(self, device: Any = None) -> Stream:
        return Stream()

    def stream(self, stream: Stream) -> Any:
        return contextlib.nullcontext()

    def current_device(self) -> int:
        return 0

    def mem_get_info(self) -> tuple[int, int]:
        return self.free, self.total

    def memory_allocated(self) -> int:
        return self.allocated

    memory_reserved = memory_allocated

    def is_current_stream_capturing(self) -> bool:
        return False

    def synchronize(self, device: Any = None) -> None: ...
    def set_device(self, device: int) -> None: ...
    def empty_cache(self) -> None: ...


class HostTorch:
    """torch, but for where its tensors are."""

    def __init__(self) -> None:
        self.cuda = Cuda()

    def __getattr__(self, name: str) -> Any:
        value = getattr(torch, name)
        if not callable(value) or isinstance(value, type):
            return value

        def on_host(*args: Any, **kwargs: Any) -> Any:
            if "device" in kwargs:
                kwargs["device"] = "cpu"
            return value(*args, **kwargs)

        return on_host

    def device(self, *args: Any) -> torch.device:
        return torch.device("cpu")


class HostKernels:
    """sgl-ft-kernel's functions on host memory."""

    def __init__(self) -> None:
        self._plan = kernels.host_library()
        self._ranges: list[tuple[torch.Tensor, int]] = []

    # -- memory

    def ft_range_reserve(self, nbytes: int, device: int, handle: Any) -> int:
        self._ranges.append((torch.zeros(nbytes, dtype=torch.uint8), 0))
        handle._obj.value = len(self._ranges)
        return 0

    def ft_range_resize(self, handle: Any, nbytes: int) -> int:
        reserved, _ = self._ranges[self._number(handle)]
        if nbytes > len(reserved):
            return 1
        reserved[nbytes:] = 0xEE  # what is unmapped must not be read
        self._ranges[self._number(handle)] = (reserved, nbytes)
        return 0

    def ft_range_address(self, handle: Any) -> int:
        return self._ranges[self._number(handle)][0].data_ptr()

    def ft_range_mapped(self, handle: Any) -> int:
        return self._ranges[self._number(handle)][1]

    def ft_range_free(self, handle: Any) -> int:
        return 0

    def _number(self, handle: Any) -> int:
        return int(getattr(handle, "value", handle)) - 1

    def ft_host_register(self, start: int, nbytes: int, chunk: int, done: Any) -> int:
        done._obj.value = nbytes
        return 0

    def ft_host_unregister(self, start: int, nbytes: int, chunk: int) -> int:
        return 0

    def ft_device_address(self, host: int, device: Any) -> int:
        device._obj.value = host
        return 0

    def ft_error_text(self, result: int) -> bytes:
        return b"an error of the host device"

    def ft_copy_from_host(self, to: int, source: int, nbytes: int, blocks: int, stream: int) -> int:
        ctypes.memmove(to, source, nbytes)
        return 0

    def ft_copy_runs(self, copies: Any, count: int, stream: int) -> int:
        for one in copies[:count]:
            ctypes.memmove(one.to, one.from_, one.bytes)
        return 0

    def ft_gather(self, cache: Any, layer: Any, gathering: Any, blocks: int, stream: int) -> int:
        cache, layer, wanted = cache._obj, layer._obj, gathering._obj
        for expert in array(wanted.experts, torch.int32, wanted.count).tolist():
            slot = array(cache.slot_of + 4 * (layer.first_expert_id + expert), torch.int32, 1).item()
            for r in range(abi.ROLES):
                role, to = layer.role[r], wanted.to[r]
                if not role.stride or not to:
                    continue
                source = (role.slots + slot * role.stride) if slot >= 0 else role.pool + expert * role.stride
                ctypes.memmove(to + (expert - wanted.first) * role.stride, source, role.stride)
        return 0

    # -- a step

    def ft_plan(self, cache: Any, layer: Any, step: Any, stream: int) -> int:
        return self._plan.ft_plan_on_host(cache, layer, step)

    def ft_fill(self, layer: Any, step: Any, tail: int, blocks: int, stream: int) -> int:
        layer, work = layer._obj, abi.Work.from_address(step._obj.work)
        for run in work.runs[work.hits : work.hits + (0 if tail else work.fills)]:
            for role in layer.role:
                if role.stride:
                    to = role.slots + run.slot * role.stride
                    ctypes.memmove(to, role.pool + run.expert * role.stride, role.stride)
        return 0

    def ft_gate_up(self, layer: Any, step: Any, fills: int, stream: int) -> int:
        return 0  # with ft_down

    def ft_down(self, layer: Any, step: Any, fills: int, stream: int) -> int:
        layer, step = layer._obj, step._obj
        spec = _spec(layer)
        x = array(step.x, DTYPES[step.row_dtype], step.rows, layer.hidden).float()
        partial = array(step.partial, torch.float32, step.rows * step.topk, layer.hidden)
        weights = array(step.weights, torch.float32, step.rows * step.topk)
        for slot, features, pairs in _runs(layer, step, fills):
            banks = {
                role: array(layer.role[role].slots + slot * layer.role[role].stride, one.dtype, 1, *one.shape)
                for role, one in spec.format.roles(spec).items()
            }
            index = torch.tensor(pairs)
            value = x[index // step.topk] @ spec.format.weight(banks, Role.GATE_UP, 0, torch.float32).T
            if spec.weight_on_input:
                value = value * weights[index].unsqueeze(1)
            if spec.bias:
                value = value + banks[Role.GATE_UP_BIAS][0]
            h = activate(value, spec)[:, :features]
            value = h @ spec.format.weight(banks, Role.DOWN, 0, torch.float32)[:, :features].T
            partial[index] = value + banks[Role.DOWN_BIAS][0] if spec.bias else value
        return 0

    def ft_combine(self, cache: Any, layer: Any, step: Any, early: int, stream: int) -> int:
        cache, layer, step = cache._obj, layer._obj, step._obj
        pairs = step.rows * step.topk
        weights = array(step.weights, torch.float32, pairs).clone()
        if layer.flags & LayerFlag.WEIGHT_ON_INPUT:
            weights[:] = 1.0
        on_gpu = torch.zeros(pairs)
        work = abi.Work.from_address(step.work) if step.work else None
        if work is not None:
            on_gpu[:] = torch.tensor(list(work.slots[:pairs])) >= 0
        else:
            for _, _, run in _runs(layer, step, 0):
                on_gpu[run] = 1
        partial = array(step.partial, torch.float32, step.rows, step.topk, layer.hidden)
        used = torch.where(on_gpu.view(step.rows, step.topk, 1) > 0, partial, 0.0)
        total = (used * weights.view(step.rows, step.topk, 1)).sum(1) * layer.output_scale
        if work is not None and work.sequence:
            total += self._job(cache, step, work, layer.hidden)
        array(step.out, DTYPES[step.row_dtype], step.rows, layer.hidden).copy_(total)
        return 0

    def _job(self, cache: Any, step: Any, work: Any, hidden: int) -> torch.Tensor:
        ring = step.ring
        at = ring.blocks + (work.sequence - 1) % ring.num_blocks * ring.block_stride
        block, deadline = Block.from_address(at), time.monotonic() + 30
        while block.done < work.sequence:
            assert time.monotonic() < deadline, "the job never ended"
            time.sleep(1e-4)
        if block.status:
            array(cache.failure, torch.int32, 1)[0] = block.status
            counters = abi.Counters.from_address(cache.counters)
            counters.failed_jobs += 1
        rows = torch.tensor(list(work.job_routes[: step.rows * step.topk])).view(step.rows, step.topk)
        results = array(at + ring.results_offset, torch.float32, step.rows, hidden)
        return torch.where((rows >= 0).any(1, keepdim=True), results, 0.0)


def _runs(layer: abi.Layer, step: abi.Step, fills: int) -> list[tuple[int, int, list[int]]]:
    """(slot, features, pairs) of each run of the hits or the fills; without a plan each pair is one."""
    if step.work:
        work = abi.Work.from_address(step.work)
        begin, end = (work.hits, work.hits + work.fills) if fills else (0, work.hits)
        return [
            (run.slot, run.features, list(work.pairs[run.first_pair : run.first_pair + run.rows]))
            for run in work.runs[begin:end]
        ]
    valid = array(step.num_valid, torch.int32, 1).item() if step.num_valid else step.rows
    routes = array(step.routes, torch.int32, step.rows * step.topk).tolist()
    return [
        (layer.first_expert_id + e, layer.intermediate, [pair])
        for pair, e in enumerate(routes)
        if 0 <= e < layer.num_experts and pair // step.topk < valid
    ]


def _spec(layer: abi.Layer) -> LayerSpec:
    return LayerSpec(
        format=next(f for f in FORMATS if f.wire == layer.format),
        num_experts=1,
        hidden=layer.hidden,
        intermediate=layer.intermediate,
        activation=Activation(layer.activation),
        gated=bool(layer.flags & LayerFlag.GATED),
        interleaved=bool(layer.flags & LayerFlag.INTERLEAVED),
        bias=bool(layer.role[Role.GATE_UP_BIAS].stride),
        weight_on_input=bool(layer.flags & LayerFlag.WEIGHT_ON_INPUT),
        act_alpha=layer.act_alpha,
        act_limit=layer.act_limit,
    )


def install(monkeypatch: Any, *modules: ModuleType) -> HostTorch:
    """Gives these modules the host as their device, until the test ends."""
    host, library = HostTorch(), HostKernels()
    from sglang_ft.experts import decode, prefill, slots

    for module in (decode, prefill, slots, *modules):
        monkeypatch.setattr(module, "torch", host)
    monkeypatch.setattr(kernels, "library", lambda: library)
    monkeypatch.setattr(slots, "device_view", lambda address, nbytes, device: memory(address, nbytes))
    monkeypatch.setattr(torch.Tensor, "cuda", lambda tensor: tensor)
    return host
