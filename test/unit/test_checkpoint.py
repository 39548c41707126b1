"""What checkpoint.py finds in a model directory, and what it says about a damaged one."""

import json

import handmade
import pytest

from sglang_ft.checkpoint import locate, summarize, summarize_config
from sglang_ft.errors import CheckpointError

FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"

# family: MoE layers, bytes of one expert. Hidden 128, intermediate 64, float32: 3 * 128 * 64 * 4 bytes;
# gpt-oss has biases of 2 * 64 + 128 elements too.
EXPERT = 3 * 128 * 64 * 4
FAMILIES = {
    "qwen3_moe": (4, EXPERT),
    "qwen3_5_moe": (4, EXPERT),
    "qwen3_5_moe_text": (4, EXPERT),
    "qwen3_next": (4, EXPERT),
    "glm4_moe": (3, EXPERT),
    "gpt_oss": (4, EXPERT + (2 * 64 + 128) * 4),
    "olmoe": (4, EXPERT),
    "mixtral": (4, EXPERT),
    "deepseek_v2": (3, EXPERT),
    "deepseek_v3": (3, EXPERT),
}


def failure(folder, **kwargs):
    with pytest.raises(CheckpointError) as e:
        summarize(folder, **kwargs)
    return str(e.value)


@pytest.mark.parametrize("family", FAMILIES)
def test_experts_of_every_family_are_found(family, tiny_checkpoint):
    num_moe_layers, expert_bytes = FAMILIES[family]
    model = summarize(tiny_checkpoint(family))
    assert (model.num_layers, model.num_moe_layers, model.num_experts, model.top_k) == (
        4,
        num_moe_layers,
        16,
        4,
    )
    assert (model.hidden, model.moe_intermediate, model.context_length) == (128, 64, 4096)
    assert model.dtype == "float32"
    assert model.expert_bytes == expert_bytes
    assert model.pool_bytes == num_moe_layers * 16 * expert_bytes
    assert model.pool_bytes_as("bfloat16") == model.pool_bytes // 2


@pytest.mark.parametrize("family", [*FAMILIES, "qwen3"])
def test_config_json_alone_tells_the_same_of_the_experts(family, tiny_checkpoint):
    whole, config = summarize(tiny_checkpoint(family)), summarize_config(tiny_checkpoint(family))
    biases = 16 * 4 * (2 * 64 + 128) * 4 if family == "gpt_oss" else 0  # not in config.json
    assert config.pool_bytes == whole.pool_bytes - biases
    sizes = ("num_layers", "num_moe_layers", "num_experts", "top_k", "hidden", "moe_intermediate")
    for name in (*sizes, "architecture", "dtype", "context_length", "is_moe"):
        assert getattr(config, name) == getattr(whole, name), name
    assert (config.other_bytes, config.unused_bytes) == (0, 0)


def test_config_json_alone_needs_no_other_file(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(handmade.CONFIG | {"first_k_dense_replace": 1}))
    model = summarize_config(tmp_path)
    assert (model.num_moe_layers, model.dtype) == (1, "bfloat16")
    assert model.pool_bytes == 4 * 3 * 8 * 4 * 2
    for name, dtype in (("torch_dtype", "float32"), ("dtype", "float16")):
        (tmp_path / "config.json").write_text(json.dumps(handmade.CONFIG | {name: dtype}))
        assert summarize_config(tmp_path).dtype == dtype
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="names no architecture"):
        summarize_config(tmp_path)


def test_bytes_add_up_to_the_files(tiny_checkpoint):
    from safetensors import safe_open

    folder = tiny_checkpoint("qwen3_5_moe")
    with safe_open(folder / "model.safetensors", "pt") as file:
        expected = sum(file.get_tensor(name).nbytes for name in file.keys())
    assert summarize(folder).total_bytes == expected


def test_a_dense_model_is_no_error(tiny_checkpoint):
    model = summarize(tiny_checkpoint("qwen3"))
    assert not model.is_moe
    assert (model.pool_bytes, model.num_experts, model.expert_bytes) == (0, 0, 0)
    assert model.other_bytes > 0


def test_handmade_checkpoint(tmp_path):
    model = summarize(handmade.write_checkpoint(tmp_path))
    assert model.expert_bytes == 3 * 8 * 4 * 2
    assert model.pool_bytes == 2 * 4 * model.expert_bytes
    assert (model.other_bytes, model.unused_bytes) == (64, 0)


def test_next_token_layers_do_not_count_as_experts(tmp_path):
    folder = handmade.write_checkpoint(tmp_path)
    (folder / "model.safetensors.index.json").unlink()
    handmade.write_safetensors(
        folder / "mtp.safetensors", handmade.expert_tensors(2) | {"mtp.fc.weight": ("F32", (2,))}
    )
    model = summarize(folder)
    assert model.num_moe_layers == 2
    assert model.unused_bytes == 4 * model.expert_bytes + 8


def test_no_directory(tmp_path):
    assert "no such directory" in failure(tmp_path / "nowhere")


def test_a_name_that_cannot_be_downloaded(tmp_path):
    assert locate(str(tmp_path)) == tmp_path
    with pytest.raises(CheckpointError, match="nobody/nothing: neither a directory here nor"):
        locate("nobody/nothing")


@pytest.mark.parametrize(
    "text,words", [(None, "no config.json"), ("{", "not JSON"), ("{}", "no architecture")]
)
def test_unusable_config(tmp_path, text, words):
    folder = handmade.write_checkpoint(tmp_path)
    (folder / "config.json").unlink()
    if text is not None:
        (folder / "config.json").write_text(text)
    assert words in failure(folder)


def test_no_tokenizer(tmp_path):
    folder = handmade.write_checkpoint(tmp_path)
    (folder / "tokenizer.json").unlink()
    assert "--tokenizer-path" in failure(folder)
    assert summarize(folder, needs_tokenizer=False).is_moe


def test_no_weights(tmp_path):
    folder = handmade.write_checkpoint(tmp_path)
    for file in folder.glob("model*"):
        file.unlink()
    (folder / "pytorch_model.bin").write_bytes(b"x")
    assert "no *.safetensors file" in failure(folder)


def test_all_damaged_files_are_named_at_once(tmp_path):
    folder = handmade.write_checkpoint(tmp_path)
    size = (folder / FIRST).stat().st_size
    (folder / FIRST).write_bytes((folder / FIRST).read_bytes()[:-1])
    (folder / SECOND).unlink()
    text = failure(folder)
    assert f"{FIRST}: cut short: {size - 1} bytes on disk, {size} expected" in text
    assert f"{SECOND}: missing" in text


@pytest.mark.parametrize(
    "content,words",
    [
        (b"", "not a safetensors file (0 bytes)"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", "git lfs pull"),
        (b"\x89PNG\r\n\x1a\n" + bytes(100), "not a safetensors file"),
        ((1000).to_bytes(8, "little") + b"{}", "10 bytes on disk, 1008 expected"),
        ((2).to_bytes(8, "little") + b"[[", "not a safetensors file"),
        ((2).to_bytes(8, "little") + b"{}" + b"x", "11 bytes on disk, 10 expected"),
        ((8).to_bytes(8, "little") + b'{"a":{}}', "damaged header at tensor a"),
    ],
)
def test_a_file_that_is_not_what_it_should_be(tmp_path, content, words):
    folder = handmade.write_checkpoint(tmp_path)
    (folder / SECOND).write_bytes(content)
    text = failure(folder)
    assert SECOND in text and words in text


def test_a_tensor_that_the_index_lists_but_the_file_lacks(tmp_path):
    folder = handmade.write_checkpoint(tmp_path)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    index["weight_map"]["model.norm.weight"] = SECOND
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert (
        f"{SECOND}: 1 tensors that model.safetensors.index.json lists are not in it, like model.norm.weight"
        in (failure(folder))
    )


def test_missing_experts(tmp_path):
    assert "layer 0: 2 of 6 experts lack down_proj.weight, like 4" in failure(
        handmade.write_checkpoint(tmp_path / "a", num_experts=6)
    )
    folder = handmade.write_checkpoint(tmp_path / "b")
    (folder / "model.safetensors.index.json").unlink()
    for name in (FIRST, SECOND):
        handmade.write_safetensors(folder / name, {})
    assert "4 experts, but no tensor belongs to one" in failure(folder)


def test_quantized_experts_are_refused_with_the_format_named(tmp_path):
    quantization = {"quant_method": "fp8", "fmt": "e4m3"}
    text = failure(handmade.write_checkpoint(tmp_path, dtype="F8_E4M3", quantization_config=quantization))
    assert "quantized (fp8 e4m3; tensors of type F8_E4M3)" in text
    assert "BF16, FP16 and FP32" in text
