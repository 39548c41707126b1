"""The demo model: its data is well formed and repeatable, its files are small, its checkpoint answers."""

from __future__ import annotations

import json
import random
from pathlib import Path

import jsonschema
import numpy as np
import pytest
import torch
from demo import data, evaluate
from demo.delta_rule import DeltaRule, largest_error, reference_rule
from demo.toolbox import TOOLS
from demo.values import Values, is_held_out
from demo.world import FACTS

MODEL = Path(__file__).resolve().parents[2] / "demo" / "model"
SEEDS = range(300)


@pytest.fixture(scope="module")
def tokenizer():
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(MODEL)


@pytest.fixture(scope="module")
def model() -> evaluate.Model:
    torch.set_num_threads(1)
    return evaluate.LocalModel(MODEL, "cpu")


def calls_of(sample: data.Sample) -> list[dict]:
    return [c["function"] for m in sample.messages for c in m.get("tool_calls", [])]


def test_a_seed_always_gives_the_same_sample():
    assert [data.make_sample(s) for s in SEEDS] == [data.make_sample(s) for s in SEEDS]
    assert data.make_sample(1) != data.make_sample(2)


@pytest.mark.parametrize("held_out", [False, True])
def test_every_call_fits_the_schema_of_an_offered_tool(held_out: bool):
    seen = 0
    for seed in SEEDS:
        sample = data.make_sample(seed, held_out)
        schemas = {t["function"]["name"]: t["function"]["parameters"] for t in sample.tools}
        for call in calls_of(sample):
            jsonschema.validate(call["arguments"], schemas[call["name"]])
            seen += 1
    assert seen > len(SEEDS) / 3


def test_values_of_the_two_splits_differ():
    for kind in ("city", "name", "path", "sentence", "code", "email", "date"):
        trained, held_out = (Values(random.Random(0), split) for split in (False, True))
        assert all(not is_held_out(trained.draw(kind)) for _ in range(200)), kind
        assert all(is_held_out(held_out.draw(kind)) for _ in range(200)), kind


def test_wordings_of_the_two_splits_differ():
    for tool in TOOLS:
        assert not set(tool.wordings(True)) & set(tool.wordings(False)), tool.names
    for fact in FACTS:
        assert not set(fact.asks(True)) & set(fact.asks()), fact.subject


def test_trained_tokens_are_the_assistants_words(tokenizer):
    samples = [s for s in data.training_samples(0, 60, seed=1) if s.messages]
    for sample, (ids, weights) in zip(samples, data.encode(samples, tokenizer), strict=True):
        written = tokenizer.decode([i for i, w in zip(ids, weights, strict=True) if w == 1])
        last = sample.messages[-1]
        assert written.endswith("<|im_end|>"), sample.kind
        assert last["content"] in written and "<|im_start|>" not in written
        for call in last.get("tool_calls", []):
            assert json.dumps(call["function"]["arguments"], ensure_ascii=False) in written


def test_tokens_give_the_text_back(tokenizer):
    for text in ["Grüße aus Zürich: 5 < 7!", '{"path": "src/a b.py"}', "日本", "<think>\nx\n</think>"]:
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_delta_rule_and_its_gradients_match_transformers():
    assert largest_error(DeltaRule(compile=False), reference_rule, "cpu") < 1e-5


def test_network_and_transformers_give_the_same_logits(model: evaluate.Model):
    from demo.delta_rule import chunk_order
    from demo.network import Network, Packed, kernels_for
    from safetensors.torch import load_file

    net = Network()
    net.load_state_dict({k: v.float() for k, v in load_file(MODEL / "model.safetensors").items()})
    starts = np.array([0, 64, 192], np.int32)
    ids = torch.randint(0, 2048, (192,), generator=torch.Generator().manual_seed(0))
    position = torch.cat([torch.arange(64), torch.arange(128)])
    packed = Packed(ids, position, torch.from_numpy(starts), 128, chunk_order(starts, "cpu"))
    with torch.no_grad():
        ours = net.logits(net(packed, kernels_for("cpu"))[0])
        theirs = model.model.float()(ids[None, 64:]).logits[0]
        model.model.bfloat16()
    assert (ours[64:] - theirs).norm() / theirs.norm() < 1e-4


def test_the_model_fits_in_12_megabytes():
    assert sum(f.stat().st_size for f in MODEL.parent.rglob("*") if f.is_file() and f.suffix != ".pyc") < 12e6


def test_many_experts_are_there():
    config = json.loads((MODEL / "config.json").read_text())
    assert config["num_experts"] >= 32 and config["num_experts_per_tok"] == 4
    assert {"linear_attention", "full_attention"} == set(config["layer_types"])


def test_the_checkpoint_answers_held_out_requests(model: evaluate.Model):
    items = [i for i in evaluate.held_out_items(12, new_wordings=False) if i.part == "single/call"][:4]
    scores = evaluate.evaluate(model, items, batch=4, limit=120)
    assert scores["all_calls"]["right"] >= 0.75
