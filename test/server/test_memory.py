"""The experts are in memory once, however many processes use them."""

from __future__ import annotations

from pathlib import Path

import httpx
import psutil
import pytest
import tiny_models
import torch
import transformers
from safetensors.torch import save_file
from serving import serving

POOL = "memfd:sglang-ft-pool"


@pytest.fixture(scope="module")
def two_gib_checkpoint(tmp_path_factory) -> Path:
    """A Qwen3-MoE checkpoint with 2.1 GB of experts, written a layer at a time."""
    folder = tmp_path_factory.mktemp("large") / "model"
    config = tiny_models.qwen3_moe()
    config.update(
        {"hidden_size": 1024, "moe_intermediate_size": 1024, "num_experts": 86, "dtype": "bfloat16"}
    )
    config.architectures = ["Qwen3MoeForCausalLM"]
    config.save_pretrained(folder)
    tiny_models.make_tokenizer().save_pretrained(folder)
    with torch.device("meta"):
        network = transformers.AutoModelForCausalLM.from_config(config)
    for layer, tensors in tensors_by_layer(network, config.num_experts).items():
        save_file(tensors, folder / f"layer-{layer}.safetensors", {"format": "pt"})
    return folder


def tensors_by_layer(network: torch.nn.Module, num_experts: int) -> dict[str, dict[str, torch.Tensor]]:
    """Random tensors under the hub's names: one gate, up and down projection an expert."""
    noise = torch.randn(1 << 22, dtype=torch.bfloat16) * 0.02

    def fill(shape: torch.Size) -> torch.Tensor:
        return noise.repeat(shape.numel() // noise.numel() + 1)[: shape.numel()].reshape(shape).clone()

    layers: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in network.state_dict().items():
        parts = name.split(".")
        layer = layers.setdefault(parts[2] if parts[1] == "layers" else "rest", {})
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            layer[name] = fill(tensor.shape)
            continue
        prefix = name.rpartition(".")[0]
        for expert in range(num_experts):
            matrix = fill(tensor.shape[1:])
            if name.endswith("down_proj"):
                layer[f"{prefix}.{expert}.down_proj.weight"] = matrix
            else:
                gate, up = matrix.chunk(2)
                layer[f"{prefix}.{expert}.gate_proj.weight"] = gate.clone()
                layer[f"{prefix}.{expert}.up_proj.weight"] = up.clone()
    return layers


def status(process: psutil.Process, field: str) -> int:
    """A memory field of /proc/PID/status, in bytes."""
    lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field + ":"))


def pool_mapping(process: psutil.Process) -> tuple[str, int]:
    """Permissions and resident bytes of the pool's mapping."""
    lines = iter(Path(f"/proc/{process.pid}/smaps").read_text().splitlines())
    header = next(line for line in lines if POOL in line)
    resident = next(line for line in lines if line.startswith("Rss:"))
    return header.split()[1], int(resident.split()[1]) * 1024


@pytest.mark.timeout(900)
def test_scheduler_and_worker_share_one_pool_and_nobody_has_a_copy(two_gib_checkpoint):
    with serving(two_gib_checkpoint, "--max-total-tokens", "8192", "--context-length", "4096") as server:
        prompt = [20 + i % 250 for i in range(1000)]  # touches every expert
        body = {"input_ids": prompt, "sampling_params": {"temperature": 0, "max_new_tokens": 4}}
        assert httpx.post(server.url + "/generate", json=body, timeout=120).status_code == 200
        worker = server.worker
        scheduler = worker.parent()
        pool = server.metrics()["sglang_ft_expert_pool_bytes"]
        assert pool > 2e9

        permissions, resident = pool_mapping(scheduler)
        assert resident >= 0.99 * pool, "the loader filled the pool itself"
        permissions, resident = pool_mapping(worker)
        assert permissions == "r--s" and resident >= 0.99 * pool, "the worker reads the same pages"

        assert status(scheduler, "RssAnon") < pool, "a second copy would not fit in this"
        assert status(worker, "RssAnon") < 0.2 * pool
        everything = sum(p.memory_full_info().pss for p in server.children().values())
        private = sum(status(p, "RssAnon") for p in server.children().values())
        assert everything - private < 1.5 * pool, "pages of the pool count once"
