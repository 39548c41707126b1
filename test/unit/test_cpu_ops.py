"""The CPU platform's recurrent operators against transformers' own torch code, and attention against sums by hand."""

from __future__ import annotations

import math

import pytest
import torch
from transformers.models.qwen3_next import modeling_qwen3_next as qwen3_next

from sglang_ft.engine.cpu_platform.attend import Scoring, attend_sequence
from sglang_ft.engine.cpu_platform.ops import conv, delta_rule, gated

HEADS, K, V = 3, 16, 24


def random_tokens(count: int, dtype: torch.dtype = torch.float64) -> dict[str, torch.Tensor]:
    return {
        "q": torch.randn(count, HEADS, K, dtype=dtype),
        "k": torch.randn(count, HEADS, K, dtype=dtype),
        "v": torch.randn(count, HEADS, V, dtype=dtype),
        "g": -torch.rand(count, HEADS, dtype=dtype),
        "beta": torch.rand(count, HEADS, dtype=dtype),
    }


def run_chunked(tokens: dict[str, torch.Tensor], states: torch.Tensor, starts: list[int]):
    """Ours, with keys and queries normalised as in the models."""
    q = delta_rule.l2_normalize(tokens["q"]) * K**-0.5
    k = delta_rule.l2_normalize(tokens["k"])
    return delta_rule.delta_rule_chunked(
        q, k, tokens["v"], tokens["g"], tokens["beta"], states, torch.tensor(starts)
    )


def run_steps(tokens: dict[str, torch.Tensor], state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Ours, token by token, one sequence; state [H, V, K]."""
    q = delta_rule.l2_normalize(tokens["q"]) * K**-0.5
    k = delta_rule.l2_normalize(tokens["k"])
    state, out = state.unsqueeze(0), []
    for t in range(len(q)):
        one = slice(t, t + 1)
        step, state = delta_rule.delta_rule_step(
            q[one], k[one], tokens["v"][one], tokens["g"][one], tokens["beta"][one], state
        )
        out.append(step)
    return torch.cat(out), state[0]


def reference(function, tokens: dict[str, torch.Tensor], state: torch.Tensor):
    """transformers' function for one sequence; its states are [1, H, K, V] and float32."""
    out, last = function(
        **{
            "query": tokens["q"][None],
            "key": tokens["k"][None],
            "value": tokens["v"][None],
            "g": tokens["g"][None],
            "beta": tokens["beta"][None],
        },
        initial_state=state.transpose(-1, -2)[None],
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    return out[0], last[0].transpose(-1, -2)


@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 128, 200])
def test_delta_rule_matches_transformers_chunked_and_recurrent(length: int) -> None:
    tokens = random_tokens(length, torch.float32)
    state = torch.randn(HEADS, V, K)
    ours = run_chunked(tokens, state[None], [0, length])
    for function in (qwen3_next.torch_chunk_gated_delta_rule, qwen3_next.torch_recurrent_gated_delta_rule):
        out, last = reference(function, tokens, state)
        torch.testing.assert_close(ours.output, out, atol=2e-5, rtol=2e-5)
        torch.testing.assert_close(ours.states[0], last, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("length", [1, 63, 64, 65, 200])
def test_chunked_delta_rule_equals_the_recurrence_in_double_precision(length: int) -> None:
    tokens = random_tokens(length)
    state = torch.randn(HEADS, V, K, dtype=torch.float64)
    ours = run_chunked(tokens, state[None], [0, length])
    out, last = run_steps(tokens, state)
    torch.testing.assert_close(ours.output, out, atol=1e-11, rtol=1e-11)
    torch.testing.assert_close(ours.states[0], last, atol=1e-11, rtol=1e-11)


@pytest.mark.parametrize("lengths", [[1], [64, 1, 130], [7, 200, 3, 64], [0, 5, 0]])
def test_delta_rule_of_a_batch_equals_each_sequence_alone(lengths: list[int]) -> None:
    starts = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    tokens = random_tokens(starts[-1])
    states = torch.randn(len(lengths), HEADS, V, K, dtype=torch.float64)
    together = run_chunked(tokens, states, starts)
    for i in range(len(lengths)):
        part = {name: x[starts[i] : starts[i + 1]] for name, x in tokens.items()}
        alone = run_chunked(part, states[i : i + 1], [0, lengths[i]])
        torch.testing.assert_close(together.output[starts[i] : starts[i + 1]], alone.output)
        torch.testing.assert_close(together.states[i], alone.states[0])


@pytest.mark.parametrize("split", [1, 7, 63, 64, 65, 100, 149])
def test_delta_rule_continues_from_a_state_wherever_the_prompt_is_cut(split: int) -> None:
    tokens = random_tokens(150)
    state = torch.zeros(1, HEADS, V, K, dtype=torch.float64)
    whole = run_chunked(tokens, state, [0, 150])
    head = run_chunked({n: x[:split] for n, x in tokens.items()}, state, [0, split])
    tail = run_chunked({n: x[split:] for n, x in tokens.items()}, head.states, [0, 150 - split])
    torch.testing.assert_close(torch.cat([head.output, tail.output]), whole.output)
    torch.testing.assert_close(tail.states, whole.states)


def test_chunk_states_are_the_states_before_each_chunk() -> None:
    tokens = random_tokens(64 * 2 + 5 + 70)
    states = torch.randn(2, HEADS, V, K, dtype=torch.float64)
    result = run_chunked(tokens, states, [0, 133, 203])
    assert len(result.chunk_states) == 3 + 2
    for chunk, (sequence, start, stop) in enumerate(
        [(0, 0, 0), (0, 0, 64), (0, 0, 128), (1, 133, 133), (1, 133, 197)]
    ):
        part = {name: x[start:stop] for name, x in tokens.items()}
        expected = run_steps(part, states[sequence])[1] if stop > start else states[sequence]
        torch.testing.assert_close(result.chunk_states[chunk], expected)


def test_delta_rule_with_strong_decay_stays_finite() -> None:
    tokens = random_tokens(128, torch.float32) | {"g": torch.full((128, HEADS), -30.0)}
    result = run_chunked(tokens, torch.randn(1, HEADS, V, K), [0, 128])
    out, last = run_steps(tokens, torch.zeros(HEADS, V, K))
    assert result.output.isfinite().all()
    torch.testing.assert_close(result.output[64:], out[64:], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(result.states[0], last, atol=1e-5, rtol=1e-5)


def test_gates_match_the_formula_of_the_paper() -> None:
    a, b, a_log, dt_bias = torch.randn(5, 4), torch.randn(5, 4), torch.randn(4), torch.randn(4)
    decay, strength = delta_rule.decay_and_strength(a, b, a_log, dt_bias)
    torch.testing.assert_close(decay, -torch.exp(a_log) * torch.log1p(torch.exp(a + dt_bias)))
    torch.testing.assert_close(strength, 1 / (1 + torch.exp(-b)))


CHANNELS, WIDTH = 6, 4


def convolve_by_hand(x: torch.Tensor, state: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor):
    """One sequence: x [T, C], state [C, W - 1]."""
    padded = torch.cat([state, x.T], dim=1)[None]
    out = torch.nn.functional.conv1d(padded, weight[:, None], bias, groups=CHANNELS)
    return torch.nn.functional.silu(out[0]).T, padded[0, :, -(WIDTH - 1) :]


@pytest.mark.parametrize("lengths", [[1], [2, 9], [5, 1, 3, 70], [3, 0, 2]])
def test_causal_conv_of_a_batch_equals_each_sequence_alone(lengths: list[int]) -> None:
    starts = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    x, weight, bias = torch.randn(starts[-1], CHANNELS), torch.randn(CHANNELS, WIDTH), torch.randn(CHANNELS)
    states = torch.randn(len(lengths), CHANNELS, WIDTH - 1)
    out, after = conv.causal_conv(x, weight, bias, states, torch.tensor(starts), silu=True)
    for i in range(len(lengths)):
        part = slice(starts[i], starts[i + 1])
        if lengths[i] == 0:
            torch.testing.assert_close(after[i], states[i])
            continue
        expected, last = convolve_by_hand(x[part], states[i], weight, bias)
        torch.testing.assert_close(out[part], expected)
        torch.testing.assert_close(after[i], last)


def test_causal_conv_step_matches_transformers() -> None:
    x, weight, bias = torch.randn(5, CHANNELS), torch.randn(CHANNELS, WIDTH), torch.randn(CHANNELS)
    states = torch.randn(5, CHANNELS, WIDTH - 1)
    out, after = conv.causal_conv_step(x, weight, bias, states, silu=True)
    # transformers keeps one input more than is needed, and updates in place.
    theirs = torch.cat([torch.zeros(5, CHANNELS, 1), states], dim=2)
    expected = qwen3_next.torch_causal_conv1d_update(x.unsqueeze(2), theirs, weight, bias, "silu")
    torch.testing.assert_close(out, expected.squeeze(2))
    torch.testing.assert_close(after, theirs[:, :, 1:])


def test_gated_norm_matches_transformers() -> None:
    norm = qwen3_next.Qwen3NextRMSNormGated(V, eps=1e-5)
    torch.nn.init.normal_(norm.weight)
    x, gate = torch.randn(7, V), torch.randn(7, V)
    ours = gated.gated_norm(x, norm.weight, None, gate, 1e-5, None, True, False, False)
    torch.testing.assert_close(ours, norm(x, gate))


def test_grouped_norm_normalises_each_group_after_the_gate() -> None:
    x, gate, weight = torch.randn(3, 8), torch.randn(3, 8), torch.randn(8)
    ours = gated.gated_norm(x, weight, None, gate, 0.0, 4, False, False, True)
    product = (x * gate.sigmoid()).view(3, 2, 4)
    expected = (product / product.square().mean(-1, keepdim=True).sqrt()).view(3, 8) * weight
    torch.testing.assert_close(ours, expected)


def test_interleaved_projections_are_taken_apart_as_in_transformers() -> None:
    import tiny_models

    config = tiny_models.qwen3_next()
    layer = qwen3_next.Qwen3NextGatedDeltaNet(config, 0)
    heads = layer.num_k_heads, layer.num_v_heads, layer.head_k_dim, layer.head_v_dim
    qkvz = torch.randn(5, layer.in_proj_qkvz.out_features)
    ba = torch.randn(5, layer.in_proj_ba.out_features)
    q, k, v, z, b, a = (x[0] for x in layer.fix_query_key_value_ordering(qkvz[None], ba[None]))
    ours = gated.split_by_head(qkvz, ba, *heads)
    torch.testing.assert_close(ours[0], torch.cat([q.flatten(1), k.flatten(1), v.flatten(1)], dim=1))
    for mine, theirs in zip(ours[1:], (z, b, a), strict=True):
        torch.testing.assert_close(mine, theirs)


def test_projections_in_blocks_are_taken_apart() -> None:
    parts = [torch.randn(5, n) for n in (2 * 8, 2 * 8, 4 * 6, 4 * 6, 4, 4)]
    qkvz, ba = torch.cat(parts[:4], dim=1), torch.cat(parts[4:], dim=1)
    qkv, z, b, a = gated.split_in_blocks(qkvz, ba, 2, 4, 8, 6)
    torch.testing.assert_close(qkv, torch.cat(parts[:3], dim=1))
    torch.testing.assert_close(z.flatten(1), parts[3])
    torch.testing.assert_close(b, parts[4])
    torch.testing.assert_close(a, parts[5])


def attend_by_hand(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scoring: Scoring) -> torch.Tensor:
    """Loops over heads, queries and keys; q [M, H, D], k [N, G, D], v [N, G, E]."""
    (rows, heads, _), (total, groups, _) = q.shape, k.shape
    out = torch.zeros(rows, heads, v.shape[2], dtype=q.dtype)
    for h in range(heads):
        g = h // (heads // groups)
        for i in range(rows):
            position = total - rows + i
            first = 0 if scoring.window is None else max(0, position - scoring.window)
            seen = range(first, position + 1 if scoring.causal else total)
            logits = [float(q[i, h] @ k[j, g]) * scoring.scale for j in seen]
            if scoring.cap:
                logits = [scoring.cap * math.tanh(x / scoring.cap) for x in logits]
            weights = [math.exp(x) for x in logits]
            total_weight = sum(weights) + (0 if scoring.sinks is None else math.exp(float(scoring.sinks[h])))
            out[i, h] = sum(w * v[j, g] for w, j in zip(weights, seen, strict=True)) / total_weight
    return out


@pytest.mark.parametrize("rows", [1, 5, 9])
@pytest.mark.parametrize(
    "scoring",
    [
        Scoring(0.3),
        Scoring(0.3, causal=False),
        Scoring(0.3, window=2),
        Scoring(0.3, cap=1.5),
        Scoring(0.3, sinks=torch.linspace(-1, 2, 6, dtype=torch.float64)),
        Scoring(0.3, window=3, cap=2.0, sinks=torch.linspace(-1, 2, 6, dtype=torch.float64)),
    ],
    ids=["plain", "both_ways", "window", "cap", "sinks", "all"],
)
@pytest.mark.parametrize("block", [1 << 24, 100], ids=["one_block", "blocks"])
def test_attention_matches_sums_by_hand(
    monkeypatch: pytest.MonkeyPatch, rows: int, scoring: Scoring, block: int
) -> None:
    monkeypatch.setattr("sglang_ft.engine.cpu_platform.attend.MAX_BLOCK_SCORES", block)
    q, k, v = torch.randn(rows, 6, 8), torch.randn(9, 2, 8), torch.randn(9, 2, 5)
    ours = attend_sequence(q, k, v, scoring)
    torch.testing.assert_close(ours, attend_by_hand(q, k, v, scoring), atol=1e-5, rtol=1e-5)
