"""State of the expert cache in device memory, as the kernels read and write it. On the host for tests of the plan."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from sglang_ft.experts import heat
from sglang_ft.experts.step import Counters, Split
from sglang_ft.kernels import abi

if TYPE_CHECKING:
    from sglang_ft.experts.compact import Compaction

_PASSES = 16
"""Passes whose counters are kept; fewer are ever under way."""


class Tables(NamedTuple):
    """A copy on the host: int32 slot_of [experts], expert_of and used [slots]; the number of the last step."""

    slot_of: torch.Tensor
    expert_of: torch.Tensor
    used: torch.Tensor
    step: int
    live: int


class CacheState:
    """Which expert lies in which slot, when it was used last, and sums over steps; see ft_cache in api.h."""

    def __init__(self, experts: int, slots: int, device: torch.device | str) -> None:
        """Empty, for so many experts of all layers and slots at most; `set_live` says how many slots there are."""
        self.device = torch.device(device)
        slots = max(slots, 1)
        self.slot_of, self.seen = self._words(experts), self._words(experts)
        self.expert_of, self.used = self._words(slots), self._words(slots)
        self._queue = self._words(2 * abi.QUEUE)
        self._control = torch.zeros(ctypes.sizeof(abi.Control), dtype=torch.uint8, device=self.device)
        self._counters = torch.zeros(len(abi.COUNTERS), dtype=torch.int64, device=self.device)
        self._split = self._words(abi.MAX_EXPERTS + 1)
        self.failure = self._on_host(torch.zeros(1, dtype=torch.int32))
        self._passes = self._on_host(torch.zeros(_PASSES, len(abi.COUNTERS), dtype=torch.int64))
        self._last_pass, self._failed_jobs = 0, 0
        self.struct = abi.Cache(
            slot_of=self.slot_of.data_ptr(),
            seen=self.seen.data_ptr(),
            expert_of=self.expert_of.data_ptr(),
            used=self.used.data_ptr(),
            queue=self._queue.data_ptr(),
            control=self._control.data_ptr(),
            counters=self._counters.data_ptr(),
            split=self._split.data_ptr(),
            failure=self.failure.data_ptr(),
        )
        self._prompt_split = self._words(abi.MAX_EXPERTS + 1)
        self.prompt_struct = abi.Cache.from_buffer_copy(self.struct)
        self.prompt_struct.split = self._prompt_split.data_ptr()
        everything = [Split(m) for m in range(abi.MAX_EXPERTS + 1)]
        self.set_split(everything)
        self.set_prompt_split(everything)
        self.reset(0)

    def _words(self, count: int) -> torch.Tensor:
        return torch.zeros(count, dtype=torch.int32, device=self.device)

    def _on_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """In memory that the device reaches too."""
        return tensor.pin_memory() if self.device.type == "cuda" else tensor

    def reset(self, live: int) -> None:
        """Empties `live` slots and zeroes the counters. The sequence of jobs goes on."""
        self.slot_of.fill_(-1)
        self.expert_of.fill_(-1)
        for t in (self.seen, self.used, self._counters):
            t.zero_()
        self.failure.zero_()
        self._write_control(live, free=live)

    def make_identity(self, live: int) -> None:
        """Every expert lies in the slot of its id."""
        ids = torch.arange(len(self.slot_of), dtype=torch.int32)
        self.slot_of.copy_(ids)
        self.expert_of[: len(ids)].copy_(ids)
        self._write_control(live, free=0)

    def seed(self, experts: list[int], live: int) -> None:
        """Of `live` slots, the first hold these experts, which are used in that order, the first one last."""
        self.reset(live)
        ids = torch.tensor(experts, dtype=torch.int64)
        stamps = heat.stamps_for(len(experts))
        where = ids.to(self.device)
        self.slot_of[where] = torch.arange(len(experts), dtype=torch.int32, device=self.device)
        self.seen[where] = stamps.to(self.device)
        self.expert_of[: len(experts)].copy_(ids)
        self.used[: len(experts)].copy_(stamps)
        self._write_control(live, free=live - len(experts))

    def begin_snapshot(self) -> Callable[[], list[int] | None]:
        """Enqueues copies of what lies where. What it returns gives the experts, hottest first, once they are there."""
        copies = [
            t.to("cpu", non_blocking=True, copy=True) for t in (self.expert_of, self.used, self._control)
        ]
        event = torch.cuda.Event() if self.device.type == "cuda" else None
        if event is not None:
            event.record(torch.cuda.current_stream(self.device))

        def experts() -> list[int] | None:
            if event is not None and not event.query():
                return None
            step = abi.Control.from_buffer_copy(bytes(copies[2].numpy())).step
            return heat.order_of(copies[0], copies[1], step)

        return experts

    def control(self) -> abi.Control:
        """A copy of the control words; waits for the device."""
        return abi.Control.from_buffer_copy(bytes(self._control.cpu().numpy()))

    def _write_control(self, live: int, free: int) -> None:
        """Sets the number of slots; everything but the sequence of jobs starts anew."""
        control = abi.Control(live_slots=live, free_slots=free, sequence=self.control().sequence)
        self._control.copy_(torch.frombuffer(bytearray(control), dtype=torch.uint8))

    def tables(self) -> Tables:
        """What is where now; waits for the device."""
        control = self.control()
        slot_of, expert_of, used = (t.cpu() for t in (self.slot_of, self.expert_of, self.used))
        return Tables(slot_of, expert_of, used, control.step, control.live_slots)

    def shrink(self, compaction: Compaction, live: int) -> None:
        """Goes on with `live` slots that hold what `compaction` says; no step may be in flight."""
        self.slot_of.copy_(compaction.slot_of)
        self.expert_of.copy_(compaction.expert_of)
        self.used.copy_(compaction.used)
        words = self._control_words()
        words[: abi.Control.step.offset // 4] = torch.tensor(
            [live, live - compaction.kept], dtype=torch.int32
        )
        self._forget_queue(words)

    def grow(self, before: int, live: int) -> None:
        """Adds slots [before, live), empty; takes effect in the order of the current stream."""
        self.expert_of[before:live] = -1
        self.used[before:live] = 0
        words = self._control_words()
        words[abi.Control.live_slots.offset // 4] = live
        words[abi.Control.free_slots.offset // 4] += live - before
        self._forget_queue(words)

    def take_slots(self, first: int, experts: torch.Tensor) -> None:
        """Notes that empty slots [first, first + n) hold `experts` [n] (ids, on the device) as if used just now."""
        end = first + len(experts)
        slots = torch.arange(first, end, dtype=torch.int32, device=self.device)
        self.slot_of[experts.long()] = slots
        self.expert_of[first:end] = experts.int()
        words = self._control_words()
        self.used[first:end] = words[abi.Control.step.offset // 4]
        words[abi.Control.free_slots.offset // 4] -= len(experts)

    def _control_words(self) -> torch.Tensor:
        return self._control.view(torch.int32)

    def _forget_queue(self, words: torch.Tensor) -> None:
        for field in (abi.Control.queue_head, abi.Control.queue_count):
            words[field.offset // 4] = 0

    def set_sequence(self, sequence: int) -> None:
        """Goes on after job `sequence`, which the host rang; no step may be in flight."""
        offset = abi.Control.sequence.offset
        value = torch.tensor([sequence], dtype=torch.int64)
        self._control[offset : offset + 8].copy_(value.view(torch.uint8))

    def set_split(self, split: Sequence[Split]) -> None:
        """What is done with m misses; the last entry stands for more. Takes effect with the next step."""
        self.split_words = self._on_host(_split_words(split))
        self._split.copy_(self.split_words, non_blocking=True)

    def set_prompt_split(self, split: Sequence[Split]) -> None:
        """The same for steps that are a part of a prompt."""
        self._prompt_split.copy_(_split_words(split))

    def counters(self) -> dict[str, int]:
        """Sums since the last reset, by name; waits for the device."""
        return dict(zip(abi.COUNTERS, self._counters.tolist(), strict=True))

    def reference_counters(self) -> Counters:
        """Those of the counters that experts/step.py has too."""
        counters = self.counters()
        return Counters(**{name: counters[name] for name in vars(Counters())})

    def end_pass(self) -> int:
        """To be called when a forward pass is enqueued: keeps the counters at its end. Returns its number."""
        self._last_pass += 1
        self._passes[self._last_pass % _PASSES].copy_(self._counters, non_blocking=True)
        return self._last_pass

    def failed(self, number: int) -> bool:
        """Whether a job failed in pass `number`, which must have ended, or in one before that nobody asked about."""
        jobs = int(self._passes[number % _PASSES, abi.COUNTERS.index("failed_jobs")])
        before = self._failed_jobs if jobs >= self._failed_jobs else 0  # counters may have been set back
        self._failed_jobs = jobs
        return jobs > before

    def last_counters(self) -> dict[str, int]:
        """Counters at the end of the last pass or the one before; from any thread, asks nothing of the device."""
        return dict(zip(abi.COUNTERS, self._passes[self._last_pass % _PASSES].tolist(), strict=True))


def _split_words(split: Sequence[Split]) -> torch.Tensor:
    table = [split[min(m, len(split) - 1)] for m in range(abi.MAX_EXPERTS + 1)]
    return torch.tensor([s.fills | s.features << 16 for s in table], dtype=torch.int32)
