"""Memory plans: the paper's machines and models, what never happens, and what a user reads when it does not fit."""

import json
import math
from functools import cache
from pathlib import Path

import header_checkpoints
import pytest
from header_checkpoints import GIB
from hypothesis import given
from hypothesis import strategies as st

from sglang_ft import checkpoint
from sglang_ft.checkpoint import FormatError, ModelSummary
from sglang_ft.cli import main as cli
from sglang_ft.memory import planner, shapes
from sglang_ft.memory.planner import GpuPlan, Machine, MemoryPlan, Wishes, plan
from sglang_ft.memory.shapes import Kinds, ModelMemory
from sglang_ft.memory.sizes import parse_size

ROOT = Path(__file__).parents[2]
MODELS = {
    "Qwen3.6-35B-A3B BF16": lambda: header_checkpoints.qwen36(nvfp4=False),
    "Qwen3.6-35B-A3B NVFP4": lambda: header_checkpoints.qwen36(nvfp4=True),
    "DeepSeek-V4-Flash MXFP4": header_checkpoints.deepseek_v4_flash,
    "GLM-5.2 NVFP4": header_checkpoints.glm52,
}
# GPU memory and bandwidth classes of the paper's six machines (table 1); host memory as the models need it.
MACHINES = {
    "RTX 3090 server": Machine(24 * GIB, 128 * GIB, 25e9, 57e9, 0.94e12),
    "RTX 4090 server": Machine(24 * GIB, 128 * GIB, 25e9, 77e9, 1.01e12),
    "RTX 5090 server": Machine(32 * GIB, 192 * GIB, 52.7e9, 77e9, 1.79e12),
    "RTX 5090 desktop": Machine(32 * GIB, 192 * GIB, 52.7e9, 53.8e9, 1.79e12),
    "RTX 4060 laptop": Machine(8 * GIB, 32 * GIB, 12.5e9, 47.5e9, 0.256e12),
    "RTX PRO 6000": Machine(96 * GIB, 512 * GIB, 53e9, 60e9, 1.79e12),
}
GOLDEN = [
    # machine, model, experts, chunk, tokens of KV cache, tokens a second
    ("RTX 3090 server", "Qwen3.6-35B-A3B BF16", GpuPlan("hybrid", 2120, 256), 8192, 131_324, 60),
    ("RTX 4090 server", "Qwen3.6-35B-A3B BF16", GpuPlan("hybrid", 2120, 256), 8192, 131_324, 67),
    ("RTX 5090 server", "Qwen3.6-35B-A3B BF16", GpuPlan("hybrid", 3458, 256), 8192, 131_332, 104),
    ("RTX 5090 desktop", "Qwen3.6-35B-A3B BF16", GpuPlan("hybrid", 3458, 256), 8192, 131_332, 98),
    ("RTX 4060 laptop", "Qwen3.6-35B-A3B NVFP4", GpuPlan("hybrid", 704, 64), 8192, 32_777, 39),
    ("RTX 5090 server", "DeepSeek-V4-Flash MXFP4", GpuPlan("hybrid", 1421, 128), 8192, 132_348, 49),
    ("RTX 5090 desktop", "DeepSeek-V4-Flash MXFP4", GpuPlan("hybrid", 1421, 128), 8192, 132_348, 44),
    ("RTX PRO 6000", "GLM-5.2 NVFP4", GpuPlan("hybrid", 2247, 256), 8192, 119_228, 13),
]


@cache
def model(name: str) -> tuple[ModelSummary, ModelMemory]:
    import tempfile

    config, tensors = MODELS[name]()
    with tempfile.TemporaryDirectory() as folder:
        path = header_checkpoints.write(Path(folder) / "model", config, tensors)
        try:
            summary = checkpoint.summarize(path, needs_tokenizer=False)
        except FormatError as e:
            summary = e.summary
    return summary, shapes.describe(checkpoint.text_config(config))


@pytest.mark.parametrize(
    "name, pool, expert",
    [
        ("Qwen3.6-35B-A3B BF16", 64.4, 6.29),
        ("Qwen3.6-35B-A3B NVFP4", 18.1, 1.77),
        ("DeepSeek-V4-Flash MXFP4", 147.2, 13.37),
        ("GLM-5.2 NVFP4", 407.7, 21.23),
    ],
)
def test_sizes_by_headers_alone(name, pool, expert):
    summary, _ = model(name)
    assert summary.pool_bytes / 1e9 == pytest.approx(pool, rel=2e-3)
    assert summary.expert_bytes / 1e6 == pytest.approx(expert, rel=2e-3)


@pytest.mark.parametrize("machine, name, experts, chunk, kv_tokens, speed", GOLDEN)
def test_the_paper_s_machines(machine, name, experts, chunk, kv_tokens, speed):
    got = plan(*model(name), MACHINES[machine], Wishes())
    assert (got.experts, got.chunk, got.kv_tokens) == (experts, chunk, kv_tokens)
    assert got.fits and round(got.speeds.decode) == speed


def test_the_estimate_is_near_what_was_measured():
    measured = json.loads((ROOT / "benchmark" / "results" / "decode.json").read_text())["metrics"]
    summary, memory = model("Qwen3.6-35B-A3B BF16")
    link, cpu = (summary.expert_bytes / measured[f"{name}_us_an_expert"] * 1e6 for name in ("link", "cpu"))
    machine = Machine(141 * GIB, 128 * GIB, link, cpu, 4.3e12)
    got = planner.estimate(summary, memory, machine, GpuPlan("hybrid", int(measured["slots"])), 8192)
    assert got.miss_rate == pytest.approx(0.16, abs=0.005)
    assert got.decode == pytest.approx(measured["hybrid_tokens_s"], rel=0.15)
    resident = planner.estimate(summary, memory, machine, GpuPlan("resident", 10240), 8192)
    assert resident.decode == pytest.approx(measured["stock_tokens_s"], rel=0.15)


sizes = st.integers(0, 160 * GIB)


@given(
    st.sampled_from(list(MODELS)),
    sizes,
    st.integers(1, 1000).map(lambda n: n * GIB),
    st.sampled_from([0, 1000, 32 << 10, 200_000]),
    st.sampled_from(["auto", "resident", "cache", "hybrid", "cpu"]),
    st.sampled_from([0, 1, 500, 50_000]),
    st.sampled_from([0, 512, 8192]),
)
def test_a_plan_that_fits_is_within_the_machine(name, gpu, ram, context, mode, slots, chunk):
    summary, memory = model(name)
    wishes = Wishes(mode, slots, context, chunk=chunk)
    got = plan(summary, memory, Machine(gpu, ram), wishes)
    if got.fits:
        assert got.total("gpu") <= gpu and got.total("host") <= ram
        assert got.kv_tokens >= (context or 32 << 10)
        assert mode in ("auto", got.experts.mode) or got.experts.mode == "cpu"
        assert got.speeds.decode > 0
    assert got.chunk == chunk or not chunk
    assert 0 <= got.experts.slots <= got.total_experts
    assert all(problem.what and problem.cure for problem in got.problems)
    assert not gpu or planner.render(got, Machine(gpu, ram), "x")


@given(st.sampled_from(list(MODELS)), sizes, st.integers(0, 40 * GIB))
def test_more_gpu_memory_decodes_hardly_slower(name, gpu, more):
    small, large = (plan(*model(name), Machine(n, 1000 * GIB), Wishes(requests=4)) for n in (gpu, gpu + more))
    if small.fits and gpu:
        # A longer chunk may cost some slots.
        assert large.speeds.decode >= 0.8 * small.speeds.decode


@given(st.sampled_from(list(MODELS)), st.integers(6, 96), st.integers(32 << 10, 1 << 20))
def test_the_context_that_is_proposed_fits(name, gpu, context):
    got = plan(*model(name), Machine(gpu * GIB, 1000 * GIB), Wishes(context=context))
    for problem in got.problems:
        if problem.cure.startswith("--context") and "was made for" not in problem.what:
            proposed = int(problem.cure.split()[1])
            again = plan(*model(name), Machine(gpu * GIB, 1000 * GIB), Wishes(context=proposed))
            assert not any("KV cache" in p.what for p in again.problems), (got, again)


def test_experts_that_are_resident_with_a_shorter_chunk_are_no_problem():
    summary, memory = model("Qwen3.6-35B-A3B BF16")
    fits = [
        n
        for n in range(64 * 4, 80 * 4)
        if plan(summary, memory, Machine(n * GIB // 4, 1000 * GIB), Wishes("resident", requests=1)).fits
    ]
    least = plan(summary, memory, Machine(fits[0] * GIB // 4, 1000 * GIB), Wishes("resident", requests=1))
    assert least.experts.mode == "resident" and least.chunk < 8192
    assert fits == list(range(fits[0], 80 * 4)), "more memory never takes it away"


def test_every_problem_is_told_at_once():
    got = plan(*model("GLM-5.2 NVFP4"), Machine(32 * GIB, 64 * GIB), Wishes("resident", context=10_000_000))
    text = "\n".join(problem.what for problem in got.problems)
    for part in ("was made for 202,752", "--ft-moe-mode resident", "the GPU lacks", "the host needs"):
        assert part in text, text


def test_miss_rates_between_the_points():
    assert [planner.miss_rate(s) for s in (0, 0.11, 0.37, 1)] == pytest.approx([1, 0.39, 0.16, 0])
    shares = [i / 100 for i in range(101)]
    rates = [planner.miss_rate(share) for share in shares]
    assert rates == sorted(rates, reverse=True)


@pytest.mark.parametrize(
    "text, kinds, kv_token, state",
    [
        (
            {"num_hidden_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2},
            Kinds(4, 0, 0),
            4 * 2 * 2 * 16 * 2,
            0,
        ),
        (
            {"layer_types": ["full_attention", "sliding_attention"], "head_dim": 8, "num_attention_heads": 1},
            Kinds(1, 1, 0),
            1.8 * 2 * 8 * 2,
            0,
        ),
        (
            {"num_hidden_layers": 3, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "index_head_dim": 128},
            Kinds(3, 0, 0),
            3 * (576 * 2 + 132),
            0,
        ),
        (
            {
                "num_hidden_layers": 4,
                "num_attention_heads": 2,
                "head_dim": 8,
                "linear_attn_config": {
                    "kda_layers": [1, 2, 3],
                    "num_heads": 2,
                    "head_dim": 8,
                    "short_conv_kernel_size": 4,
                },
            },
            Kinds(1, 0, 3),
            2 * 2 * 8 * 2,
            3 * (2 * 8 * 8 * 4 + 3 * 16 * 3 * 2),
        ),
        (
            {
                "hybrid_override_pattern": "M-M*",
                "num_attention_heads": 1,
                "head_dim": 4,
                "mamba_num_heads": 2,
                "mamba_head_dim": 4,
                "ssm_state_size": 8,
                "n_groups": 1,
                "conv_kernel": 4,
            },
            Kinds(1, 0, 2),
            2 * 4 * 2,
            2 * (2 * 4 * 8 * 4 + (8 + 16) * 3 * 2),
        ),
        (
            {
                "layer_types": ["conv", "full_attention"],
                "hidden_size": 16,
                "num_attention_heads": 2,
                "conv_L_cache": 3,
            },
            Kinds(1, 0, 1),
            2 * 2 * 8 * 2,
            16 * 2 * 2,
        ),
    ],
)
def test_what_layers_remember(text, kinds, kv_token, state):
    got = shapes.describe(text)
    assert (got.kinds, got.kv_token, got.state) == (kinds, pytest.approx(kv_token), state)


@pytest.mark.parametrize(
    "text, want",
    [("8GiB", 8 * GIB), ("8g", 8 * GIB), ("64k", 65536), ("1.5 GB", 1.5 * GIB), ("32000", 32000), ("0", 0)],
)
def test_sizes_on_the_command_line(text, want):
    assert parse_size(text) == want


def run(capsys, *argv: str) -> tuple[int, str, str]:
    status = cli.main(["plan", *argv])
    out = capsys.readouterr()
    return status, out.out, out.err


@pytest.fixture
def qwen(tmp_path):
    return str(header_checkpoints.write(tmp_path / "qwen", *header_checkpoints.qwen36(nvfp4=False)))


def test_the_command_says_what_goes_where(capsys, qwen):
    status, out, _ = run(
        capsys, "--model-path", qwen, "--vram", "24GiB", "--ram", "96GiB", "--context", "64k"
    )
    assert status == 0
    assert "expert pool" in out and "60.00 GiB" in out and "in slots" in out


def test_the_command_s_exit_status_says_that_it_does_not_fit(capsys, qwen):
    status, out, _ = run(capsys, "--model-path", qwen, "--vram", "4GiB", "--ram", "32GiB")
    assert status == 1
    assert "the GPU lacks" in out and "the host needs" in out and "mend: " in out


def test_the_command_prints_json(capsys, qwen):
    status, out, _ = run(capsys, "--model-path", qwen, "--vram", "24G", "--ram", "96G", "--json")
    plan = json.loads(out)
    assert status == 0 and plan["fits"] and plan["experts"]["slots"] > 0
    used = sum(item["nbytes"] for item in plan["items"] if item["where"] == "gpu")
    assert 23 * GIB < used <= 24 * GIB


def test_quantized_experts_are_planned_for_and_named(capsys, tmp_path):
    path = header_checkpoints.write(tmp_path / "q", *header_checkpoints.qwen36(nvfp4=True))
    status, out, _ = run(capsys, "--model-path", str(path), "--vram", "8GiB", "--ram", "32GiB")
    assert status == 1
    assert "quantized (modelopt NVFP4" in out and "16.88 GiB" in out


def test_a_config_alone_is_enough(capsys, tmp_path):
    config, _ = header_checkpoints.qwen36(nvfp4=False)
    (tmp_path / "config.json").write_text(json.dumps(config))
    status, out, _ = run(capsys, "--model-path", str(tmp_path), "--vram", "24GiB", "--ram", "96GiB")
    assert status == 0 and "dense weights are not counted" in out


@pytest.mark.parametrize(
    "argv, words",
    [
        (("--vram", "24GiB", "--model-path", "/nowhere/at-all"), "no such directory"),
        (("--vram", "24GiB", "--model-path", str(ROOT / "demo" / "model"), "--link-gb-s", "0"), "above 0"),
    ],
)
def test_what_cannot_be_planned_is_refused_in_words(capsys, argv, words):
    status, _, err = run(capsys, *argv)
    assert status == 2 and words in err


def test_a_dense_model_has_no_experts_to_plan_for(capsys, tmp_path):
    config = {"architectures": ["Qwen3ForCausalLM"], "num_hidden_layers": 1, "hidden_size": 8}
    path = header_checkpoints.write(tmp_path / "dense", config, [header_checkpoints.dense(1000)])
    status, _, err = run(capsys, "--model-path", str(path), "--vram", "8GiB")
    assert status == 2 and "dense" in err


def test_plans_are_values(tmp_path):
    first, second = (plan(*model("GLM-5.2 NVFP4"), MACHINES["RTX PRO 6000"], Wishes()) for _ in range(2))
    assert first == second and isinstance(first, MemoryPlan)
    assert math.isfinite(first.speeds.prefill_at_most)
