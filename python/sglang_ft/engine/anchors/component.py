"""The tree's component of recurrent states, with anchors: many states a request, dropped by value, never a bad one.

SGLang's component keeps one state at the end of what a request inserts and drops the least recently used. Its
mechanics (locks, splits, copies on a hit) stay; ours adds the held states of a request along the inserted path.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from sglang.srt.mem_cache.base_prefix_cache import InsertParams, InsertResult, MatchPrefixParams, MatchResult
from sglang.srt.mem_cache.unified_cache.components import ComponentType, MambaComponent
from sglang.srt.mem_cache.unified_cache.components.tree_component import EvictLayer

from sglang_ft.anchors.rules import Kind
from sglang_ft.anchors.value import Use, Worth
from sglang_ft.engine.anchors.held import Held, Kept, StatePool, finite, kept_of
from sglang_ft.metrics import AnchorMetrics

_USE = "ft_use"  # in a node's metadata: the Use of its state
_CHECKED = "ft_checked"  # the state has been looked at for NaN


class AnchorComponent(MambaComponent):
    """One for the server's tree. `pool` is set by whoever makes the tree, once the tree exists."""

    pool: StatePool

    def __init__(self, cache: Any, params: Any, metrics: AnchorMetrics) -> None:
        super().__init__(cache, params)
        self.worth = Worth()
        self.metrics = metrics
        self._kind = Kind.OTHER  # of the state that is being inserted
        self._order: list[tuple[float, Any]] = []
        self._on_host = str(cache.req_to_token_pool.device) == "cpu"

    # ---- into the tree ----

    def prepare_for_caching_req(
        self, req: Any, insert_params: InsertParams, token_ids_len: int, is_finished: bool
    ) -> int | None:
        kept = kept_of(req)
        at_end = token_ids_len == len(req.full_untruncated_fill_ids)
        self._kind = Kind.ASSISTANT if is_finished else Kind.PROMPT if at_end else Kind.OTHER
        good = self._live_state_is_good(req)
        main = self._take_main(req, kept, token_ids_len, good)
        if main is None:
            if not good:
                return 0
            return super().prepare_for_caching_req(req, insert_params, token_ids_len, is_finished)
        self._kind = main.kind
        insert_params.mamba_value = self._as_value(main.slot)
        return main.position

    def _take_main(self, req: Any, kept: Kept | None, end: int, good: bool) -> Held | None:
        """The last held state, where SGLang has none or only a coarse one to put at the end of what is inserted."""
        if kept is None or (good and not self.cache.enable_mamba_extra_buffer):
            return None
        tracked = (req.mamba_last_track_seqlen or 0) if good else 0
        for held in sorted(kept.held, key=lambda h: -h.position):
            if tracked < held.position <= end and self._fits_pages(held.position):
                kept.held.remove(held)
                if self._is_good(held):
                    kept.main = held
                    return held
        return None

    def _is_good(self, held: Held) -> bool:
        """Gives the slot of a bad state back. On a GPU states are looked at when they are first asked for."""
        if held.source is not None and not held.source.done:
            self.pool.give_back(held.slot)  # its pass took a way on which nothing is stored
            return False
        if not self._on_host or finite(self.cache.req_to_token_pool.mamba_pool, held.slot):
            return True
        self.metrics.refused()
        self.pool.give_back(held.slot)
        return False

    def _live_state_is_good(self, req: Any) -> bool:
        """The tree is about to get the state that the request computes with."""
        if not self._on_host or self.cache.enable_mamba_extra_buffer or req.mamba_pool_idx is None:
            return True
        good = finite(self.cache.req_to_token_pool.mamba_pool, req.mamba_pool_idx.view(1))
        if not good:
            self.metrics.refused()
        return good

    def _fits_pages(self, position: int) -> bool:
        return position % self.cache.page_size == 0

    def _as_value(self, slot: torch.Tensor) -> torch.Tensor:
        """What the tree stores for a state: its slot, or an int8 copy where SGLang was told to keep those."""
        if self.int8_ckpt_pool is None:
            return slot
        return self._commit_int8_checkpoint(slot)

    def cleanup_after_caching_req(
        self,
        req: Any,
        is_finished: bool,
        insert_result: InsertResult | None = None,
        insert_params: InsertParams | None = None,
    ) -> None:
        kept = kept_of(req)
        if kept is None or kept.main is None:
            super().cleanup_after_caching_req(req, is_finished, insert_result, insert_params)
        else:
            self._settle_main(req, kept, is_finished, insert_result, insert_params)
        if kept is None:
            return
        if insert_result is not None and insert_params is not None and insert_params.key is not None:
            self._insert_held(kept, insert_params)
        if is_finished:
            self.pool.release(kept)

    def _settle_main(
        self,
        req: Any,
        kept: Kept,
        is_finished: bool,
        result: InsertResult | None,
        params: InsertParams | None,
    ) -> None:
        assert kept.main is not None and params is not None and params.mamba_value is not None
        inserted = result is not None and not result.mamba_exist
        if self.int8_ckpt_pool is not None:
            self.pool.give_back(kept.main.slot)
            if not inserted:
                self._free_mamba_value(params.mamba_value)
        elif inserted:
            self.pool.handed_over()
        else:
            self.pool.give_back(kept.main.slot)
        kept.main = None
        req.mamba_last_track_seqlen = None
        if is_finished:
            self.cache.req_to_token_pool.free_mamba_cache(req)

    def _insert_held(self, kept: Kept, params: InsertParams) -> None:
        """The held states along a path that the tree has just got."""
        assert params.key is not None and params.value is not None
        waiting = []
        for held in kept.held:
            if held.position > len(params.key):
                waiting.append(held)
            elif not self._fits_pages(held.position):
                self.pool.give_back(held.slot)
            else:
                self._insert_one(held, params)
        kept.held = waiting

    def _insert_one(self, held: Held, params: InsertParams) -> None:
        if not self._is_good(held):
            return
        value = self._as_value(held.slot)
        self._kind = held.kind
        result = self.cache.insert(
            dataclasses.replace(
                params,
                key=params.key[: held.position],
                value=params.value[: held.position],
                # All of it is the tree's already: nothing is stored and nothing freed but the state.
                prev_prefix_len=held.position,
                chunked=True,
                mamba_value=value,
            )
        )
        if self.int8_ckpt_pool is not None:
            self.pool.give_back(held.slot)
            if result.mamba_exist:
                self._free_mamba_value(value)
        elif result.mamba_exist:
            self.pool.give_back(held.slot)
        else:
            self.pool.handed_over()

    def commit_insert_component_data(
        self, node: Any, is_new_leaf: bool, params: InsertParams, result: InsertResult, cache_actions: list
    ) -> None:
        super().commit_insert_component_data(node, is_new_leaf, params, result, cache_actions)
        if not result.mamba_exist:
            self._metadata(node)[_USE] = self.worth.new(self._kind)
            self._metadata(node).pop(_CHECKED, None)
            self.metrics.kept(self._kind)

    # ---- reuse ----

    def began_from(self, node_id: int, tokens: int) -> None:
        """A request was admitted that begins `tokens` tokens into its prompt, from the state of a node."""
        node = self.tree_core.node_by_id(node_id)
        use = self._use(node)
        self.worth.used(use)
        self.metrics.reused(use.kind, tokens)

    def finalize_match_result_in_cache(self, params: MatchPrefixParams, result: MatchResult) -> MatchResult:
        if params.cow_mamba and not self._on_host and not self._checked(result.best_match_node):
            return self.cache.match_prefix(params)
        return super().finalize_match_result_in_cache(params, result)

    def _checked(self, node_id: int) -> bool:
        """On a GPU a state is looked at when it is first asked for: at the time of saving, that would stall it."""
        node = self.tree_core.node_by_id(node_id)
        value = node.component_data[self.component_type].value
        if value is None or self.int8_ckpt_pool is not None or _CHECKED in self._metadata(node):
            return True
        torch.cuda.synchronize()  # the pass that writes the state may be in flight on another stream
        if finite(self.cache.req_to_token_pool.mamba_pool, value):
            self._metadata(node)[_CHECKED] = True
            return True
        if node.component_data[self.component_type].lock_ref:
            return True  # its request computes with it: it has gone wrong already, and ends
        self.metrics.refused()
        self._drop(node)
        return False

    def _drop(self, node: Any) -> None:
        """Takes a state out of the tree; the KV cache of its tokens stays."""
        frees: dict[ComponentType, list[torch.Tensor]] = {self.component_type: []}
        self.tree_core._evict_component_and_detach_lru(node, self, device_frees=frees, host_frees={})
        self.tree_core._update_evictable_leaf_sets(node)
        self.cache._free_values(frees, {})

    # ---- dropping ----

    def _evict_device_start(self, request_cnt: int) -> None:
        super()._evict_device_start(request_cnt)
        if not self.tree_core.enable_session_radix_cache:
            nodes = self.tree_core.lru_lists[self.component_type].cache.values()
            free = [n for n in nodes if n.component_data[self.component_type].lock_ref == 0]
            self._order = sorted(((self._worth_of(n), n) for n in free), key=lambda pair: -pair[0])

    def _evict_device_next_node(
        self, tracker: dict[ComponentType, int], device_frees: dict, host_frees: dict
    ) -> int | None:
        """As SGLang's, with the order by value: the id of a leaf to drop with its KV; others lose their state here."""
        ct = self.component_type
        if self.tree_core.enable_session_radix_cache:
            return super()._evict_device_next_node(tracker, device_frees, host_frees)
        lru = self.tree_core.lru_lists[ct]
        while tracker[ct] < self._evict_device_request_cnt and self._order:
            worth, node = self._order.pop()
            if not lru.in_list(node) or node.component_data[ct].lock_ref:
                continue
            self.worth.dropped(worth)
            if node in self.tree_core.evictable_device_leaves:
                return node.id
            core = self.tree_core
            core._evict_component_and_detach_lru(
                node,
                self,
                target=EvictLayer.DEVICE,
                tracker=tracker,
                device_frees=device_frees,
                host_frees=host_frees,
            )
            core._cascade_evict(node, self, tracker, device_frees=device_frees, host_frees=host_frees)
        return None

    def evict_component(
        self, node: Any, device_frees: dict, host_frees: dict, target: EvictLayer = EvictLayer.DEVICE
    ) -> tuple[int, int]:
        if EvictLayer.DEVICE in target and node.component_data[self.component_type].value is not None:
            self.metrics.dropped(self._use(node).kind)
            self._metadata(node).pop(_USE, None)
        return super().evict_component(node, device_frees, host_frees, target)

    def _worth_of(self, node: Any) -> float:
        return self.worth.of(self._use(node), self._distance(node))

    def _distance(self, node: Any) -> int:
        """Tokens between a node's state and the one before it on its path."""
        distance, parent = len(node.key), node.parent
        while parent is not None and parent is not self.tree_core.root_node:
            if parent.component_data[self.component_type].value is not None:
                break
            distance += len(parent.key)
            parent = parent.parent
        return distance

    def _use(self, node: Any) -> Use:
        return self._metadata(node).get(_USE) or Use(Kind.OTHER, self.worth.clock)

    def _metadata(self, node: Any) -> dict[str, Any]:
        return node.component_data[self.component_type].metadata
