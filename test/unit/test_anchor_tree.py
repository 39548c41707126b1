"""SGLang's tree with our component, real pools, and no server: states along a path, by value, and none that is bad."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
import torch
from sglang.srt.configs.mamba_utils import Mamba2CacheParams, Mamba2StateDType, Mamba2StateShape
from sglang.srt.mem_cache import mamba_checkpoint_pool
from sglang.srt.mem_cache.allocator import TokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, MatchPrefixParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.memory_pool import HybridReqToTokenPool
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_cache.components import mamba_component
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from sglang_ft.anchors.rules import AnchorRules, Kind, Marker
from sglang_ft.config import FtConfig
from sglang_ft.engine.anchors.component import AnchorComponent
from sglang_ft.engine.anchors.decode import MOST_HELD, DecodeAnchors
from sglang_ft.engine.anchors.held import Held, Kept, Pass, StatePool
from sglang_ft.engine.anchors.serving import AnchorServing
from sglang_ft.metrics import AnchorMetrics

STATES, TOKENS = 24, 4000


class Tree:
    """A tree and its pools, and requests that are cached in it as SGLang's scheduler does."""

    def __init__(self, monkeypatch, states: int = STATES, extra_buffer: bool = False) -> None:
        arguments = SimpleNamespace(mamba_cache_chunk_size=64)
        execution = SimpleNamespace(mamba=SimpleNamespace(mamba_max_states_per_path=-1))
        monkeypatch.setattr(mamba_component, "get_server_args", lambda: arguments)
        monkeypatch.setattr(mamba_component, "get_exec", lambda: execution)
        monkeypatch.setattr(mamba_checkpoint_pool, "maybe_init_int8_mamba_checkpoint_pool", lambda **_: None)
        shape = Mamba2StateShape.create(
            tp_world_size=1,
            intermediate_size=8,
            n_groups=1,
            num_heads=2,
            head_dim=4,
            state_size=4,
            conv_kernel=4,
        )
        self.pool = HybridReqToTokenPool(
            size=4,
            mamba_size=states,
            mamba_spec_state_size=4,
            max_context_len=TOKENS,
            device="cpu",
            enable_memory_saver=False,
            cache_params=Mamba2CacheParams(
                shape=shape, layers=[0], dtype=Mamba2StateDType(conv=torch.float32, temporal=torch.float32)
            ),
            mamba_layer_ids=[0],
            enable_mamba_extra_buffer=extra_buffer,
        )
        self.kv = TokenToKVPoolAllocator(TOKENS, torch.float32, "cpu", SimpleNamespace(), need_sort=False)
        made: list[AnchorComponent] = []

        def component(cache, params):
            made.append(AnchorComponent(cache, params, AnchorMetrics(None)))
            return made[0]

        self.cache = UnifiedRadixCache(
            CacheInitParams(
                disable=False,
                req_to_token_pool=self.pool,
                token_to_kv_pool_allocator=self.kv,
                page_size=1,
                tree_components=(ComponentType.FULL, ComponentType.MAMBA),
                component_registry_override={ComponentType.MAMBA: component},
                enable_mamba_extra_buffer=extra_buffer,
            )
        )
        self.component = made[0]
        self.states = self.component.pool = StatePool(self.cache, budget=states)
        self.temporal = self.pool.mamba_pool.mamba_cache.temporal

    def match(self, ids: list[int]) -> int:
        """Tokens that a request would find."""
        key = RadixKey(ids, None)
        return len(self.cache.match_prefix(MatchPrefixParams(key=key)).device_indices)

    def begin(self, ids: list[int], anchors: dict[int, Kind]) -> SimpleNamespace:
        """A request whose prompt has been computed, with a state held at each anchor."""
        key = RadixKey(ids, None)
        found = self.cache.match_prefix(MatchPrefixParams(key=key))
        prefix = len(found.device_indices)
        lock = self.cache.inc_lock_ref(found.last_device_node)
        req = SimpleNamespace(
            rid="r",
            origin_input_ids=ids,
            output_ids=[],
            full_untruncated_fill_ids=ids,
            get_fill_ids=lambda: ids,
            extra_key=None,
            priority=0,
            session=None,
            req_pool_idx=None,
            kv=None,
            inflight_middle_chunks=0,
            mamba_pool_idx=None,
            mamba_ping_pong_track_buffer=None,
            mamba_next_track_idx=None,
            mamba_last_track_seqlen=None,
            cache_protected_len=prefix,
            last_node=found.last_device_node,
            swa_uuid_for_lock=lock.swa_uuid_for_lock,
            skip_lock_node_ids=lock.skip_lock_node_ids,
            swa_prefix_lock_released=False,
            is_chunked=0,
        )
        if self.pool.mamba_allocator.available_size() < 4:
            self.cache.evict(EvictParams(mamba_num=4))
        self.pool.alloc([req])
        slots = self.kv.alloc(len(ids) - prefix)
        if slots is None:
            self.cache.evict(EvictParams(num_tokens=len(ids)))
            slots = self.kv.alloc(len(ids) - prefix)
        self.pool.write((req.req_pool_idx, slice(0, len(ids))), torch.cat([found.device_indices, slots]))
        self.temporal[:, req.mamba_pool_idx] = float(len(ids))
        req.ft_kept = Kept()
        for position, kind in anchors.items():
            if position > prefix:
                for slot in self.states.take(1):
                    self.temporal[:, slot] = float(position)
                    req.ft_kept.held.append(Held(position, slot, kind))
        return req

    def finish(self, req: SimpleNamespace, insert: bool = True) -> None:
        length = len(req.origin_input_ids) + len(req.output_ids)
        self.cache.cache_finished_req(req, is_insert=insert, kv_len_to_handle=length)
        self.pool.free(req)

    def check(self) -> None:
        """Nothing is lost: every slot is free or in the tree, and each state is that of its position."""
        free = self.pool.mamba_allocator.available_size()
        held = self.states.outstanding
        in_tree = int(self.cache.mamba_evictable_size() + self.cache.mamba_protected_size())
        assert free + held + in_tree == self.pool.mamba_pool.size, (free, held, in_tree)
        assert self.kv.available_size() + self.cache.full_evictable_size() == TOKENS
        stack = [(self.cache.tree_core.root_node, 0)]
        while stack:
            node, depth = stack.pop()
            value = node.component_data[ComponentType.MAMBA].value
            if value is not None:
                assert (self.temporal[:, value] == float(depth)).all(), "a state of another position"
            stack += [(child, depth + len(child.key)) for child in node.children.values()]


@pytest.fixture(params=[False, True], ids=["no_buffer", "extra_buffer"])
def tree(request, monkeypatch) -> Tree:
    return Tree(monkeypatch, extra_buffer=request.param)


def ids_of(*parts: int) -> list[int]:
    """A sequence of runs, each of its own numbers: ids_of(50, 30) and ids_of(50, 20) share fifty tokens."""
    return [1000 * i + n for i, length in enumerate(parts) for n in range(length)]


def test_states_are_found_at_every_anchor_of_a_finished_prompt(tree):
    ids = ids_of(300)
    req = tree.begin(ids, {64: Kind.SYSTEM, 128: Kind.USER, 256: Kind.TOOL_CALL})
    tree.cache.cache_unfinished_req(req)
    tree.finish(req)
    tree.check()
    for cut, expected in ((300, 300), (299, 256), (256, 256), (200, 128), (127, 64), (63, 0)):
        found = tree.match(ids[:cut] + [9, 9, 9])
        assert found == (256 if tree.cache.enable_mamba_extra_buffer and cut == 300 else expected), cut


def test_a_request_that_ends_with_its_first_token_keeps_its_states(tree):
    req = tree.begin(ids_of(200), {64: Kind.USER, 128: Kind.USER})
    tree.finish(req)
    tree.check()
    assert tree.match(ids_of(150)) == 128


def test_a_request_that_failed_leaves_nothing(tree):
    req = tree.begin(ids_of(200), {64: Kind.USER, 128: Kind.USER})
    tree.finish(req, insert=False)
    tree.check()
    assert tree.states.outstanding == 0 and tree.match(ids_of(200)) == 0


def test_two_requests_with_one_prefix_share_their_states(tree):
    first, second = (tree.begin(ids_of(200), {64: Kind.USER, 128: Kind.USER}) for _ in range(2))
    for req in (first, second):
        tree.cache.cache_unfinished_req(req)
    for req in (first, second):
        tree.finish(req)
    tree.check()
    assert tree.match(ids_of(130)) == 128


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_bad_state_is_not_stored(tree, bad):
    req = tree.begin(ids_of(200), {64: Kind.USER, 128: Kind.USER, 192: Kind.USER})
    for held in req.ft_kept.held[1:]:
        tree.temporal[:, held.slot] = bad
    tree.temporal[:, req.mamba_pool_idx] = bad
    tree.cache.cache_unfinished_req(req)
    tree.finish(req)
    tree.check()
    assert tree.match(ids_of(200)) == 64


def test_the_state_at_the_end_of_the_system_prompt_outlives_many_tool_calls(monkeypatch):
    tree = Tree(monkeypatch)
    system = ids_of(1000)
    for i in range(40):
        ids = system + [5_000_000 + 1000 * i + n for n in range(30)]
        req = tree.begin(ids, {960: Kind.SYSTEM, 1024: Kind.TOOL_CALL})
        tree.cache.cache_unfinished_req(req)
        tree.finish(req)
        tree.check()
        assert tree.match(system + [7]) == 960


def test_random_requests_under_pressure_lose_nothing(tree):
    rng = random.Random(0)
    running: list[SimpleNamespace] = []
    for _ in range(150):
        parts = [rng.randrange(20, 90) for _ in range(rng.randrange(1, 6))]
        ids = [1000 * (i * 3 + rng.randrange(2)) + n for i, length in enumerate(parts) for n in range(length)]
        anchors = {
            p: rng.choice(list(Kind)) for p in sorted(rng.sample(range(1, len(ids)), min(6, len(ids) - 1)))
        }
        req = tree.begin(ids, anchors)
        tree.cache.cache_unfinished_req(req)
        running.append(req)
        while len(running) > rng.randrange(3):
            tree.finish(running.pop(rng.randrange(len(running))), insert=rng.random() < 0.9)
    for req in running:
        tree.finish(req)
    tree.check()
    assert tree.states.outstanding == 0


RULES = AnchorRules([Marker("a", (5,), Kind.THINKING), Marker("bc", (6, 7), Kind.TOOL_CALL)])


def sample(
    tree: Tree, decode: DecodeAnchors, req: SimpleNamespace, tokens: list[int], seen: bool = True
) -> None:
    """Decode steps: the live state follows, and is copied where the token just sampled begins a marker."""
    for token in tokens:
        plan = decode.plan(SimpleNamespace(reqs=[req]))
        if plan is not None:
            plan.done = seen
        position = len(req.origin_input_ids) + len(req.output_ids)
        if plan is not None and torch.isin(torch.tensor([token]), decode.first_ids).any():
            tree.temporal[:, plan.slots] = float(position)
        req.output_ids.append(token)
        slot = tree.kv.alloc(1)
        tree.pool.write((req.req_pool_idx, slice(position, position + 1)), slot)
        decode.processed(req)


def test_states_before_sampled_markers_are_kept(tree):
    decode = DecodeAnchors(RULES, {2}, tree.states, overlap=True, device="cpu")
    req = tree.begin(ids_of(100), {64: Kind.USER})
    tree.cache.cache_unfinished_req(req)
    out = [11, 12, 5, 13, 6, 14, 6, 7, 15, 2]
    sample(tree, decode, req, out)
    kinds = {h.position: h.kind for h in req.ft_kept.held if h.position >= 100}
    assert kinds == {102: Kind.THINKING, 106: Kind.TOOL_CALL, 109: Kind.ASSISTANT}, "6 and 14 is no marker"
    tree.temporal[:, req.mamba_pool_idx] = 110.0
    tree.finish(req)
    tree.check()
    whole = ids_of(100) + out
    assert [tree.match([*whole[:n], 99]) for n in (102, 105, 106, 109)] == [102, 102, 106, 109]


def test_what_no_pass_has_stored_is_not_kept(tree):
    """A pass may run on a way that our lists do not reach: then its slots hold anything."""
    req = tree.begin(ids_of(200), {64: Kind.USER, 128: Kind.USER})
    ran, skipped = Pass(), Pass()
    ran.done = True
    req.ft_kept.held = [h._replace(source=s) for h, s in zip(req.ft_kept.held, (ran, skipped), strict=True)]
    tree.cache.cache_unfinished_req(req)
    decode = DecodeAnchors(RULES, {2}, tree.states, overlap=False, device="cpu")
    sample(tree, decode, req, [11, 5, 12, 2], seen=False)
    assert all(h.position < 200 for h in req.ft_kept.held)
    tree.temporal[:, req.mamba_pool_idx] = 204.0
    tree.finish(req)
    tree.check()
    assert tree.match([*ids_of(200)[:150], 9]) == 64


def test_an_answer_of_many_markers_holds_few_states(tree):
    decode = DecodeAnchors(RULES, (), tree.states, overlap=False, device="cpu")
    req = tree.begin(ids_of(10), {})
    sample(tree, decode, req, [5, 11] * 40)
    assert len(req.ft_kept.held) == min(MOST_HELD, STATES)
    tree.finish(req, insert=False)
    tree.check()


def test_an_abort_in_the_middle_of_a_prompt_keeps_the_chunks_that_have_run(tree):
    """SGLang tears such a request down without storing its newest chunk."""
    serving = AnchorServing(FtConfig())
    serving.prefill = SimpleNamespace()
    req = tree.begin(ids_of(256), {64: Kind.SYSTEM, 192: Kind.USER})
    req.extend_range, req.prefix_indices = SimpleNamespace(end=256), []
    scheduler = SimpleNamespace(
        chunked_req=req,
        _pending_chunked_abort_req=req,
        stash_chunked_request=lambda r: tree.cache.cache_unfinished_req(r, chunked=True),
    )
    serving.stash_before_abort(scheduler)
    tree.finish(req, insert=False)
    tree.check()
    assert tree.match([*ids_of(256)[:200], 9]) == 192
    assert tree.states.outstanding == 0


def test_an_abort_after_a_failed_pass_keeps_nothing_of_it(tree):
    serving = AnchorServing(FtConfig())
    serving.prefill = SimpleNamespace()
    req = tree.begin(ids_of(256), {64: Kind.SYSTEM})
    req.extend_range, req.prefix_indices, req.skip_radix_cache_insert = SimpleNamespace(end=256), [], True
    scheduler = SimpleNamespace(chunked_req=req, _pending_chunked_abort_req=req)
    serving.stash_before_abort(scheduler)
    tree.finish(req, insert=False)
    tree.check()
    assert tree.match(ids_of(256)) == 0
