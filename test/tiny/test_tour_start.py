"""A tour, part one: from a command line and a model directory to the plan that the server prints."""

import pytest
from handmade import write_checkpoint

from sglang_ft import preflight
from sglang_ft.checkpoint import summarize
from sglang_ft.config import FtConfig
from sglang_ft.errors import CheckpointError, ConfigError, MemoryBudgetError
from sglang_ft.plan import StartPlan, render


def test_from_command_line_to_plan(tmp_path):
    # Settings: ours are taken out of the command line, SGLang's stay.
    argv = ["--model-path", str(tmp_path), "--ft-worker-threads=6", "--port", "30000"]
    config, rest = FtConfig.parse(argv, {"SGLANG_FT_WORKER_ISA": "avx2"})
    assert (config.worker_threads, config.worker_isa) == (6, "avx2")
    assert rest == ["--model-path", str(tmp_path), "--port", "30000"]

    # The checkpoint: 2 layers x 4 experts, each 3 matrices of 8 x 4 in bfloat16.
    model = summarize(write_checkpoint(tmp_path))
    assert (model.num_moe_layers, model.num_experts, model.expert_bytes) == (2, 4, 3 * 8 * 4 * 2)

    # The plan: what will run where.
    plan = StartPlan(model, "cpu", "bfloat16", config.worker_threads, config.worker_isa, 64, 8 << 30, 2.0)
    assert "2 of 2 layers x 4, top 2" in render(plan)
    assert "6 threads, avx2" in render(plan)


def test_what_cannot_work_is_refused_before_anything_loads(tmp_path):
    with pytest.raises(ConfigError, match="did you mean --ft-worker-threads"):
        FtConfig.parse(["--ft-worker-threds", "6"], {})

    model = summarize(write_checkpoint(tmp_path))
    with pytest.raises(MemoryBudgetError, match=r"2\.00 GiB needed, 1\.00 GiB available"):
        preflight.check_memory(model, reserve_gib=2.0, available=1 << 30, dense_on_host=True)

    shard = tmp_path / "model-00002-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="model-00002-of-00002.safetensors: cut short"):
        summarize(tmp_path)
