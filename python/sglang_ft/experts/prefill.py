"""Prefill on the GPU when the experts do not fit: whole layers stream through two buffers, one ahead of the other."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from sglang_ft.experts.bank import ExpertPool
    from sglang_ft.experts.slots import RegisteredMemory
    from sglang_ft.worker.protocol import Role


class LayerStream:
    """Two GPU buffers of one layer each. Layer l + 1 is copied while layer l computes."""

    def __init__(
        self, pool: ExpertPool, memory: RegisteredMemory, cacheable: list[bool], device: torch.device
    ) -> None:
        """`cacheable[l]`: whether the link reaches layer l's experts in `memory`; others cannot be streamed."""
        self._pool, self._memory, self._cacheable = pool, memory, cacheable
        spec = pool.plan.layers[0].spec
        self._buffers = [
            {
                role: torch.empty(spec.num_experts, *one.shape, dtype=one.dtype, device=device)
                for role, one in spec.format.roles(spec).items()
            }
            for _ in range(2)
        ]
        self._holds = [-1, -1]
        self._copied = [torch.cuda.Event() for _ in range(2)]
        self._free = [torch.cuda.Event() for _ in range(2)]
        self._stream = torch.cuda.Stream(device)

    def acquire(self, layer: int) -> dict[Role, torch.Tensor]:
        """The experts of `layer`, [E, ...] a role, ready for work enqueued on the current stream from now on."""
        main = torch.cuda.current_stream()
        self._fetch(layer)
        main.wait_event(self._copied[layer % 2])
        return self._buffers[layer % 2]

    def release(self, layer: int) -> None:
        """To be called once the work on `layer` is enqueued; starts the copy of the next layer."""
        main = torch.cuda.current_stream()
        self._free[layer % 2].record(main)
        following = layer + 1
        if following < len(self._cacheable) and self._cacheable[following]:
            self._fetch(following)

    def _fetch(self, layer: int) -> None:
        side = layer % 2
        if self._holds[side] == layer:
            return
        self._stream.wait_event(self._free[side])
        self._holds[side] = layer
        with torch.cuda.stream(self._stream):
            for role, view in self._pool.plan.layers[layer].roles.items():
                self._memory.copy(self._buffers[side][role], view.offset)
            self._copied[side].record(self._stream)
