"""Synthetic weights: a pool that is filled with experts that differ, and checkpoints of every family."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tiny_models
import torch
import transformers
from benchmark import synthetic

from sglang_ft.checkpoint import summarize
from sglang_ft.experts.bank import ExpertPool, plan_banks
from sglang_ft.experts.formats import FORMATS, LayerSpec
from sglang_ft.experts.formats.base import DenseFormat
from sglang_ft.experts.replay import replay
from sglang_ft.experts.synthetic import STD, NormalBlock, fill_pool, scale_router
from sglang_ft.experts.traces import Trace, TraceHeader, router_scales, synthetic_trace
from sglang_ft.tensor_files import read_checkpoint

ROOT = Path(__file__).parents[2]
LOCALITY = 0.8


# -- the pool


@pytest.fixture(params=FORMATS, ids=lambda f: f.name)
def pool(request):
    spec = LayerSpec(request.param, num_experts=12, hidden=200, intermediate=72, bias=True)
    return ExpertPool(plan_banks([spec] * 3))


def banks(pool):
    return [bank for layer in range(len(pool.plan.layers)) for bank in pool.banks(layer).values()]


def test_every_bank_is_filled_with_small_normal_numbers(pool):
    fill_pool(pool, seed=1)
    values = torch.cat([bank.float().flatten() for bank in banks(pool)])
    assert values.mean().abs() < 0.02 * STD
    assert values.std() == pytest.approx(STD, rel=0.02)
    assert (values.abs() < STD).float().mean() == pytest.approx(0.683, abs=0.01)
    for bank in banks(pool):
        assert (bank != 0).float().mean() > 0.99


def test_no_two_experts_are_alike(pool):
    fill_pool(pool, seed=1)
    for role in pool.plan.layers[0].roles:
        experts = torch.cat([pool.bank(layer, role).flatten(1) for layer in range(3)]).float()
        similar = torch.corrcoef(experts) - torch.eye(len(experts))
        assert similar.abs().max() < 0.8, role


def test_the_filling_depends_on_the_seed_alone(pool):
    fill_pool(pool, seed=1, threads=1)
    first = [bank.clone() for bank in banks(pool)]
    fill_pool(pool, seed=1, threads=7)
    assert all(torch.equal(a, b) for a, b in zip(first, banks(pool), strict=True))
    fill_pool(pool, seed=2)
    assert not any(torch.equal(a, b) for a, b in zip(first, banks(pool), strict=True))


def test_stretches_longer_than_the_block_go_round_it():
    block, out = NormalBlock(torch.bfloat16, seed=0, elements=100), torch.empty(300, dtype=torch.bfloat16)
    block.copy_to(out, 0)
    assert torch.equal(out[:128], out[128:256]) and torch.equal(out[:44], out[256:])


def test_all_stretches_of_a_block_differ():
    block, out = NormalBlock(torch.float32, seed=0, elements=64 * 64), torch.empty(64)
    seen = set()
    for number in range(2 * 64):
        block.copy_to(out, number)
        seen.add(out.numpy().tobytes())
    assert len(seen) == 2 * 64


def test_a_bank_that_is_not_made_of_plain_numbers_is_refused():
    class Float64(DenseFormat):
        name, wire, dtype = "fp64", FORMATS[0].wire, torch.float64

    with pytest.raises(TypeError, match=r"torch\.float64 cannot be filled"):
        fill_pool(ExpertPool(plan_banks([LayerSpec(Float64(), 2, 64, 32)])), seed=0)


# -- the router


def test_a_scaled_router_routes_as_a_synthetic_trace():
    layers, experts, hidden, top_k, steps, slots = 4, 64, 512, 4, 400, 100
    generator = torch.Generator().manual_seed(1)
    routes = np.empty((steps, layers, top_k), np.int16)
    for layer in range(layers):
        router = (torch.randn(experts, hidden, generator=generator) * STD).bfloat16()
        scale_router(router, LOCALITY, generator)
        logits = torch.randn(steps, hidden, generator=generator) @ router.float().T
        routes[:, layer] = logits.topk(top_k).indices
    model = Trace(TraceHeader(layers, experts, top_k), routes, np.arange(steps + 1))
    made_up = synthetic_trace(layers, experts, top_k, steps, LOCALITY, seed=2)
    rates = [replay(trace, slots, warmup=100).miss_rate for trace in (model, made_up)]
    assert rates[0] == pytest.approx(rates[1], abs=0.015)
    assert rates[0] < 0.8 * (1 - slots / (layers * experts)), "far fewer than of uniform routes"


# -- the checkpoint


def config_of(family):
    config = tiny_models.FAMILIES[family]()
    auto = (
        transformers.AutoModelForImageTextToText
        if family == "qwen3_5_moe"
        else transformers.AutoModelForCausalLM
    )
    return config.to_dict() | {"architectures": [auto._model_mapping[type(config)].__name__]}


def shapes(folder):
    return {t.name: t.shape for t in read_checkpoint(folder)}


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    folder = tmp_path_factory.mktemp("qwen")
    synthetic.write(config_of("qwen3_5_moe_text"), folder, LOCALITY, seed=3, shard_bytes=300_000)
    return folder


@pytest.mark.parametrize("family", [f for f in tiny_models.FAMILIES if not f.startswith("qwen3_5")])
def test_names_and_shapes_are_those_of_the_family(tmp_path, family):
    tiny_models.write(family, tmp_path / "want")
    synthetic.write(config_of(family), tmp_path / "got")
    assert shapes(tmp_path / "got") == shapes(tmp_path / "want")


@pytest.mark.parametrize("family", ["qwen3_5_moe", "qwen3_5_moe_text"])
def test_transformers_loads_it_and_every_tensor_finds_its_place(tmp_path, family):
    config = config_of(family)
    synthetic.write(config, tmp_path, LOCALITY)
    model, report = getattr(transformers, config["architectures"][0]).from_pretrained(
        tmp_path, output_loading_info=True
    )
    assert not any(report.values()), report
    assert model.dtype == torch.bfloat16
    logits = model(input_ids=torch.arange(20).unsqueeze(0)).logits
    assert logits.isfinite().all() and logits.float().std() > 0.05


def test_the_experts_of_qwen3_5_are_stacked_as_on_the_hub(qwen):
    found = shapes(qwen)
    assert found["model.layers.0.mlp.experts.gate_up_proj"] == (16, 128, 128)
    assert found["model.layers.0.mlp.experts.down_proj"] == (16, 128, 64)


def test_every_tensor_is_drawn_by_its_role(qwen):
    model = transformers.AutoModelForCausalLM.from_pretrained(qwen, dtype=torch.float32).requires_grad_(False)
    layer = model.model.layers[0]
    assert model.model.embed_tokens.weight.std() == pytest.approx(1, rel=0.02)
    for weight in (layer.linear_attn.in_proj_qkv.weight, layer.mlp.experts.down_proj, model.lm_head.weight):
        assert weight.std() == pytest.approx(STD, rel=0.05)
    x = torch.randn(1, 128)
    torch.testing.assert_close(layer.input_layernorm(x), x / x.pow(2).mean().sqrt(), rtol=1e-4, atol=1e-4)
    scales = layer.mlp.gate.weight.std(dim=1).sort().values / STD
    torch.testing.assert_close(scales, router_scales(16, LOCALITY), rtol=0.25, atol=0)
    experts = torch.cat([block.mlp.experts.down_proj.flatten(1) for block in model.model.layers])
    assert (torch.corrcoef(experts) - torch.eye(len(experts))).abs().max() < 0.5


def test_shards_index_and_tokenizer_make_a_checkpoint_that_can_be_served(qwen):
    model = summarize(qwen)
    assert (model.num_moe_layers, model.num_experts, model.top_k, model.dtype) == (4, 16, 4, "bfloat16")
    assert len(list(qwen.glob("*.safetensors"))) > 3
    index = json.loads((qwen / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == model.total_bytes
    tokenizer = transformers.AutoTokenizer.from_pretrained(qwen)
    assert len(tokenizer) == tiny_models.VOCAB_SIZE
    text = "a b\n<think>ü</think>"
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert all(tokenizer.decode([token]) for token in range(tiny_models.VOCAB_SIZE))
    messages = [{"role": "user", "content": "hi"}]
    assert tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True).startswith(
        "<|im_start|>user\nhi<|im_end|>"
    )


def test_the_same_seed_gives_the_same_files(qwen, tmp_path):
    config = config_of("qwen3_5_moe_text")
    for seed in (3, 4):
        synthetic.write(config, tmp_path / str(seed), LOCALITY, seed=seed, shard_bytes=300_000)
    files = [file.name for file in qwen.glob("*.safetensors")]
    assert all((qwen / file).read_bytes() == (tmp_path / "3" / file).read_bytes() for file in files)
    assert not any((qwen / file).read_bytes() == (tmp_path / "4" / file).read_bytes() for file in files)


def test_the_command_cuts_layers_and_leaves_quantization_out(tmp_path):
    config = config_of("qwen3_5_moe_text") | {"quantization_config": {"quant_method": "fp8"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    command = [sys.executable, ROOT / "benchmark" / "synthetic.py", "--config", tmp_path / "config.json"]
    done = subprocess.run(
        [*command, "--out", tmp_path / "out", "--layers", "2", "--dtype", "float32"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    model = summarize(tmp_path / "out")
    assert (model.num_layers, model.num_moe_layers, model.dtype) == (2, 2, "float32")
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert len(written["layer_types"]) == 2 and "quantization_config" not in written
    refused = subprocess.run(
        [*command, "--out", tmp_path / "no", "--layers", "9"], capture_output=True, text=True
    )
    assert refused.returncode == 1 and "--layers 9: the config has 4" in refused.stderr


def test_an_architecture_that_transformers_lacks_is_refused(tmp_path):
    with pytest.raises(SystemExit, match="has no NewestForCausalLM"):
        synthetic.write(config_of("qwen3_moe") | {"architectures": ["NewestForCausalLM"]}, tmp_path)
