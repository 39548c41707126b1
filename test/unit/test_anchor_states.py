"""States at anchors, for every kind of recurrent layer: to go on from a checkpoint is to have run through.

A layer here is a short convolution and a recurrence, token by token and in float64; its chunked pass stores states by
the lists that the backends of SGLang use, lengthened by ours, and passes the rows of h in the layout of the kernels.
The kernels themselves run in test/server/test_anchors.py and on GPUs.
"""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
import torch

from sglang_ft.anchors.rules import AnchorRules, Kind, Marker
from sglang_ft.engine.anchors.held import StatePool
from sglang_ft.engine.anchors.prefill import PrefillPlanner, Scan, lengthen, store_inputs
from sglang_ft.engine.anchors.serving import requests_beside
from sglang_ft.engine.cpu_platform.ops import delta_rule

C, W = 6, 4  # channels, taps of the convolution
MARK = 7  # the one marker


class Layer:
    """Weights of one layer, and its pass over the new tokens of one request."""

    def __init__(self, kind: str, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.kind = kind
        self.taps = torch.randn(C, W, generator=generator, dtype=torch.float64)
        self.decay = torch.rand(C, generator=generator, dtype=torch.float64) * 0.5

    def run(self, x: torch.Tensor, conv: torch.Tensor, state: torch.Tensor):
        """x [T, C], conv [C, W - 1], state [C, C] -> outputs [T, C], last inputs, states around each token."""
        inputs = torch.cat([conv.T, x])
        states, outputs = [state], []
        for t in range(len(x)):
            y = (inputs[t : t + W].T * self.taps).sum(1).tanh()
            if self.kind == "short_conv":
                outputs.append(y)
                states.append(state)
                continue
            state = self._step(y, state)
            states.append(state)
            outputs.append(state @ y)
        return torch.stack(outputs), inputs[len(inputs) - W + 1 :].T, torch.stack(states)

    def _step(self, y: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        if self.kind == "gdn":  # one decay a head, delta rule
            state = state * (-self.decay[0]).exp()
            return state + 0.5 * torch.outer(y.roll(1) - state @ y, y)
        if self.kind == "kda":  # one decay a channel, delta rule
            state = state * (-self.decay).exp()
            return state + 0.5 * torch.outer(y.roll(1) - state @ y, y)
        return state * (-self.decay[0] * y.abs().sum()).exp() + torch.outer(y.roll(1), y)  # mamba2


SCANS = {
    "gdn": Scan(64, W - 1),
    "kda": Scan(64, W - 1),
    "mamba2": Scan(32, W - 1, packed=True),
    "short_conv": Scan(1, W - 1),
}


class Slots:
    """A pool of slots without SGLang's tree."""

    def __init__(self, count: int) -> None:
        allocator = SimpleNamespace(free=list(range(1, count)))
        allocator.available_size = lambda: len(allocator.free)
        allocator.alloc = lambda n: torch.tensor([allocator.free.pop() for _ in range(n)])
        self.req_to_token_pool = SimpleNamespace(mamba_allocator=allocator)


def request(ids: list[int], start: int) -> SimpleNamespace:
    return SimpleNamespace(
        full_untruncated_fill_ids=ids,
        is_retracted=False,
        mamba_branching_seqlen=None,
        last_node=0,
        start=start,
    )


def rows_of_h(scan: Scan, passes: list[torch.Tensor], lengths: list[int]) -> torch.Tensor:
    """States that the kernel passes at block borders: of each request, or of all tokens of the pass."""
    if not scan.packed:
        return torch.cat(
            [states[:length][:: scan.block] for states, length in zip(passes, lengths, strict=True)]
        )
    return torch.cat([s[:n] for s, n in zip(passes, lengths, strict=True)])[:: scan.block]


def run_chunk(layer: Layer, scan: Scan, planner: PrefillPlanner, reqs, xs, live, length, pools):
    """One forward pass over up to `length` new tokens of each request, as SGLang's backends do it."""
    conv_pool, ssm_pool = pools
    lens = [min(length, len(r.full_untruncated_fill_ids) - r.start) for r in reqs]
    batch = SimpleNamespace(reqs=reqs, extend_lens=lens, prefix_lens=[r.start for r in reqs])
    plan = planner.plan(batch)
    x = torch.cat([xs[i][r.start : r.start + n] for i, (r, n) in enumerate(zip(reqs, lens, strict=True))])
    done = [
        layer.run(xs[i][r.start : r.start + n], *live[i])
        for i, (r, n) in enumerate(zip(reqs, lens, strict=True))
    ]
    if plan is not None and plan.slots:
        if layer.kind == "short_conv":
            store_inputs(x.T, conv_pool, plan)
        else:
            metadata = SimpleNamespace(
                track_conv_indices=None,
                conv_states_mask_indices=None,
                track_ssm_h_src=None,
                track_ssm_h_dst=None,
                track_ssm_final_src=None,
                track_ssm_final_dst=None,
                has_mamba_track_mask=False,
            )
            lengthen(metadata, plan, W - 1, "cpu")
            conv_pool[metadata.conv_states_mask_indices] = x.T[:, metadata.track_conv_indices].transpose(0, 1)
            h = rows_of_h(scan, [states for _, _, states in done], lens)
            ssm_pool[metadata.track_ssm_h_dst] = h[metadata.track_ssm_h_src]
    outputs = []
    for i, (req, n, (out, conv, states)) in enumerate(zip(reqs, lens, done, strict=True)):
        live[i] = (conv, states[-1])
        req.start += n
        outputs.append(out)
    return outputs


@pytest.mark.parametrize("kind", SCANS)
@pytest.mark.parametrize("length", [1, 5, 64, 65, 130, 256])
def test_going_on_from_a_checkpoint_is_running_through(kind, length):
    rng, scan, layer = random.Random(length), SCANS[kind], Layer(kind, length)
    torch.manual_seed(length)
    pool = StatePool(Slots(400), budget=399)
    planner = PrefillPlanner(
        AnchorRules([Marker("m", (MARK,), Kind.USER)]),
        scan,
        pool,
        1,
        keeps_ends=False,
        began_from=lambda *_: None,
    )
    ids = [
        [rng.choice((1, 2, 3, 4, MARK) if rng.random() < 0.2 else (1, 2)) for _ in range(n)]
        for n in (300, 201, 77)
    ]
    xs = [torch.randn(len(i), C, dtype=torch.float64) for i in ids]
    reqs = [request(i, 0) for i in ids]
    live = [(torch.zeros(C, W - 1, dtype=torch.float64), torch.zeros(C, C, dtype=torch.float64)) for _ in ids]
    whole = [layer.run(x, *s)[0] for x, s in zip(xs, live, strict=True)]
    pools = torch.zeros(400, C, W - 1, dtype=torch.float64), torch.zeros(400, C, C, dtype=torch.float64)
    order = list(range(3))
    while any(r.start < len(r.full_untruncated_fill_ids) for r in reqs):
        now = [i for i in order if reqs[i].start < len(ids[i])]
        rng.shuffle(now)
        part = [live[i] for i in now]
        run_chunk(layer, scan, planner, [reqs[i] for i in now], [xs[i] for i in now], part, length, pools)
        for i, state in zip(now, part, strict=True):
            live[i] = state
    checkpoints = 0
    for req, x, expected in zip(reqs, xs, whole, strict=True):
        for held in req.ft_kept.held:
            slot = int(held.slot)
            out = layer.run(x[held.position :], pools[0][slot], pools[1][slot])[0]
            torch.testing.assert_close(out, expected[held.position :], atol=1e-9, rtol=1e-9)
            checkpoints += 1
    assert checkpoints > 3 or length <= scan.block + W, "chunks too short for a block border inside"


@pytest.mark.parametrize("kind", SCANS)
def test_every_anchor_is_at_most_a_block_behind_its_checkpoint(kind):
    scan = SCANS[kind]
    pool = StatePool(Slots(400), budget=399)
    rules = AnchorRules([Marker("m", (MARK,), Kind.USER)])
    planner = PrefillPlanner(rules, scan, pool, 1, keeps_ends=False, began_from=lambda *_: None)
    rng = random.Random(1)
    ids = [MARK if rng.random() < 0.02 else 1 for _ in range(2000)]
    req = request(ids, 37)
    planner.plan(SimpleNamespace(reqs=[req], extend_lens=[2000 - 37], prefix_lens=[37]))
    held = sorted(h.position for h in req.ft_kept.held)
    for anchor in rules.find(ids):
        if anchor.position > 37:
            assert (
                anchor.position - max([p for p in held if p <= anchor.position], default=37) < scan.block + W
            )
    assert len(held) > 5


def test_the_demo_models_operator_passes_these_states():
    """chunk_states of our own gated delta rule: row i is the state before block i of its request."""
    torch.manual_seed(0)
    lengths, H, K, V = [130, 64, 1], 2, 8, 8
    total = sum(lengths)
    q, k = (delta_rule.l2_normalize(torch.randn(total, H, K, dtype=torch.float64)) for _ in range(2))
    v = torch.randn(total, H, V, dtype=torch.float64)
    g, beta = -torch.rand(total, H, dtype=torch.float64), torch.rand(total, H, dtype=torch.float64)
    starts = torch.tensor([0, 130, 194, 195])
    states = torch.randn(3, H, V, K, dtype=torch.float64)
    result = delta_rule.delta_rule_chunked(q, k, v, g, beta, states, starts)
    expected = []
    for i, length in enumerate(lengths):
        state = states[i : i + 1]
        for t in range(length):
            if t % delta_rule.CHUNK == 0:
                expected.append(state)
            at = slice(int(starts[i]) + t, int(starts[i]) + t + 1)
            _, state = delta_rule.delta_rule_step(q[at], k[at], v[at], g[at], beta[at], state)
    torch.testing.assert_close(result.chunk_states, torch.cat(expected), atol=1e-9, rtol=1e-9)


def test_with_few_slots_the_end_of_the_system_prompt_and_the_latest_anchor_stay():
    pool = StatePool(Slots(4), budget=2)
    rules = AnchorRules([Marker("m", (MARK,), Kind.USER)])
    planner = PrefillPlanner(rules, SCANS["gdn"], pool, 1, keeps_ends=False, began_from=lambda *_: None)
    req = request(([1] * 99 + [MARK]) * 10, 0)
    planner.plan(SimpleNamespace(reqs=[req], extend_lens=[1000], prefix_lens=[0]))
    assert [h.position for h in req.ft_kept.held] == [64, 960] and pool.outstanding == 2


@pytest.mark.parametrize(
    ("anchors", "states", "most", "expected"),
    [(50, 100, 2048, 10), (50, 100, 4, 4), (0, 100, 2048, 20), (100, 100, 2048, 1), (500, 100, 2048, 1)],
)
def test_running_requests_leave_states_to_prefixes(anchors, states, most, expected):
    assert requests_beside(anchors, states, most, a_request=5) == expected
