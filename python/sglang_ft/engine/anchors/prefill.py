"""Checkpoints of a prefill chunk: which positions, and how the layers of a forward pass store their states.

SGLang's backends of linear attention already store one state a request from what their scan passes at the borders of
its blocks, by lists of indices that they make once a pass. Ours lengthen those lists, so no layer runs other code and
nothing is computed twice:

    conv state at p: the layer's last inputs before p      track_conv_indices -> conv_states_mask_indices
    scan state at p: row (p - start) / block of h          track_ssm_h_src    -> track_ssm_h_dst

Short convolutions have no scan: their inputs are stored when the convolution runs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from sglang_ft.anchors.choose import Grid, choose
from sglang_ft.anchors.rules import Anchor, AnchorRules, Kind
from sglang_ft.engine.anchors.held import Held, Kept, Pass, StatePool

FLA_BLOCK = 64  # tokens of one block of the scans of gated delta net and KDA


@dataclass
class ExtendPlan(Pass):
    """Checkpoints of one forward pass over new tokens, of all its requests."""

    tokens: list[int] = field(default_factory=list)  # tokens of the pass before each checkpoint
    rows: list[int] = field(default_factory=list)  # row of h with its state
    slots: list[torch.Tensor] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)  # requests whose state after the pass is kept
    end_slots: list[torch.Tensor] = field(default_factory=list)
    end_pass: Pass = field(default_factory=Pass)


@dataclass(frozen=True)
class Scan:
    """How the recurrent layers of a model run over a chunk."""

    block: int  # tokens between two states that a scan passes; 1: any position, there is no scan
    width: int  # inputs that a convolution looks back
    packed: bool = False  # blocks are counted over all requests of a pass, not from the start of each

    def grid(self, page_size: int, first: int) -> Grid:
        """For a request whose chunk begins at token `first` of the pass."""
        block = max(self.block, page_size)
        return Grid(block, first % block if self.packed else 0, self.width)

    def rows(self, length: int) -> int:
        """Rows of h that a request of `length` new tokens takes, where blocks are counted for each request."""
        return 0 if self.packed else -(-length // self.block)


class PrefillPlanner:
    """Chooses the checkpoints of each chunk and takes slots for them."""

    def __init__(
        self,
        rules: AnchorRules,
        scan: Scan,
        pool: StatePool,
        page_size: int,
        keeps_ends: bool,
        began_from: Callable[[int, int], None],
    ) -> None:
        """`keeps_ends`: SGLang does not keep the state at the exact end of a prompt."""
        self.rules = rules
        self.scan = scan
        self.pool = pool
        self.page_size = page_size
        self.keeps_ends = keeps_ends
        self.began_from = began_from

    def plan(self, batch: Any) -> ExtendPlan | None:
        """The checkpoints of a batch that is about to run."""
        plan, first, row = ExtendPlan(), 0, 0
        for i, req in enumerate(batch.reqs):
            length = batch.extend_lens[i]
            start = batch.prefix_lens[i]
            kept = self._kept(req, start)
            for anchor, slot in self._chosen(req, kept, start, length, first):
                kept.held.append(Held(anchor.position, slot, anchor.kind, plan))
                offset = anchor.position - start
                plan.tokens.append(first + offset)
                plan.rows.append(
                    (first + offset) // self.scan.block
                    if self.scan.packed
                    else row + offset // self.scan.block
                )
                plan.slots.append(slot)
            self._end(req, kept, start + length, i, plan)
            first += length
            row += self.scan.rows(length)
        return plan if plan.slots or plan.ends else None

    def _kept(self, req: Any, start: int) -> Kept:
        """The request's notes; made when its first chunk begins."""
        kept, length = getattr(req, "ft_kept", None), len(req.full_untruncated_fill_ids)
        if kept is None or kept.length != length:  # new, or begun again with what it had sampled
            kept = req.ft_kept = Kept(self.rules.find(req.full_untruncated_fill_ids), length=length)
            if start:
                self.began_from(req.last_node, start)
        return kept

    def _chosen(
        self, req: Any, kept: Kept, start: int, length: int, first: int
    ) -> list[tuple[Anchor, torch.Tensor]]:
        stop, anchors = start + length, kept.anchors
        if req.mamba_branching_seqlen is not None:  # where another prompt went a different way
            anchors = [*anchors, Anchor(req.mamba_branching_seqlen, Kind.OTHER)]
        if stop == len(req.full_untruncated_fill_ids):
            anchors = [*anchors, Anchor(stop, Kind.PROMPT)]
        grid = self.scan.grid(self.page_size, first)
        chosen = choose(anchors, start, stop, grid, self.pool.budget)
        slots = self.pool.take(len(chosen))
        # Fewer slots than wanted: the same rule chooses again.
        if len(slots) < len(chosen):
            chosen = choose(chosen, start, stop, grid, len(slots))
        return list(zip(chosen, slots, strict=True))

    def _end(self, req: Any, kept: Kept, stop: int, index: int, plan: ExtendPlan) -> None:
        if not self.keeps_ends or stop != len(req.full_untruncated_fill_ids) or stop % self.page_size:
            return
        for slot in self.pool.take(1):
            kept.held.append(Held(stop, slot, Kind.PROMPT, plan.end_pass))
            plan.ends.append(index)
            plan.end_slots.append(slot)


def lengthen(metadata: Any, plan: ExtendPlan, width: int, device: Any) -> None:
    """Adds the checkpoints of `plan` to the lists by which a backend's layers store states. `width`: see Scan."""
    slots = torch.cat(plan.slots).long()
    where = torch.tensor([plan.tokens, plan.rows], dtype=torch.int64).to(device, non_blocking=True)
    inputs = where[0].unsqueeze(1) - width + torch.arange(width, device=device)
    metadata.track_conv_indices = _cat(metadata.track_conv_indices, inputs)
    metadata.conv_states_mask_indices = _cat(metadata.conv_states_mask_indices, slots)
    metadata.track_ssm_h_src = _cat(metadata.track_ssm_h_src, where[1])
    metadata.track_ssm_h_dst = _cat(metadata.track_ssm_h_dst, slots)
    none = slots[:0]
    metadata.track_ssm_final_src = _cat(metadata.track_ssm_final_src, none)
    metadata.track_ssm_final_dst = _cat(metadata.track_ssm_final_dst, none)
    metadata.has_mamba_track_mask = True
    plan.done = True


def _cat(old: torch.Tensor | None, new: torch.Tensor) -> torch.Tensor:
    return new if old is None else torch.cat([old.to(new.dtype), new])


def store_inputs(x: torch.Tensor, conv_states: torch.Tensor, plan: ExtendPlan) -> None:
    """The states of a short convolution: its last inputs. x [C, T]; conv_states [slots, C, W - 1], written."""
    width = conv_states.shape[-1]
    ends = torch.tensor(plan.tokens, device=x.device)
    inputs = ends.unsqueeze(1) - width + torch.arange(width, device=x.device)
    conv_states[torch.cat(plan.slots).long()] = x[:, inputs].transpose(0, 1).to(conv_states.dtype)
    plan.done = True
