"""Models built on meta: every weight has its place in the checkpoint, every buffer its value."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import nn
from transformers import AutoModelForCausalLM, GPT2Config, GPT2Model, MixtralConfig

from launch.meta_model import NeedsTransformers, build_on_meta, parameters_on_meta, repeated_block_pattern
from launch.model_files import TaskInputError, stored_tensors

from .tiny_causal_lm import byte_tokenizer, llama_config, save_model


def assert_same_as_loaded(directory: Path, dtype: torch.dtype) -> None:
    built = build_on_meta(directory, dtype, "sdpa")
    loaded = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, attn_implementation="sdpa")
    files = {tensor.name: tensor.file for tensor in stored_tensors(directory).values()}
    parameters = dict(loaded.named_parameters())
    assert set(built.names) == set(parameters)
    for name, parameter in built.model.named_parameters():
        assert parameter.is_meta and not parameter.requires_grad
        assert (parameter.shape, parameter.dtype) == (parameters[name].shape, parameters[name].dtype)
        with safe_open(files[built.names[name]], framework="pt") as file:
            assert torch.equal(file.get_tensor(built.names[name]).to(dtype), parameters[name])
    buffers = dict(loaded.named_buffers())
    assert {name for name, _ in built.model.named_buffers()} == set(buffers)
    for name, buffer in built.model.named_buffers():
        assert not buffer.is_meta and buffer.dtype == buffers[name].dtype and torch.equal(buffer, buffers[name])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tied", [True, False])
def test_weights_and_buffers_are_those_that_transformers_loads(tmp_path: Path, dtype: torch.dtype, tied: bool) -> None:
    save_model(tmp_path, llama_config(tie_word_embeddings=tied))
    assert_same_as_loaded(tmp_path, dtype)
    model = build_on_meta(tmp_path, dtype, "sdpa").model
    assert (model.lm_head.weight is model.model.embed_tokens.weight) is tied


def test_a_checkpoint_in_several_files_is_read_by_its_index(tmp_path: Path) -> None:
    save_model(tmp_path, llama_config(), max_shard_size="200KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert_same_as_loaded(tmp_path, torch.float32)


def test_a_base_models_checkpoint_has_no_prefix_and_its_computed_buffers_are_left_out(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=264, n_embd=64, n_layer=3, n_head=4, n_positions=128)
    GPT2Model(config).save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    assert build_on_meta(tmp_path, torch.float32, "sdpa").names["transformer.wte.weight"] == "wte.weight"
    assert_same_as_loaded(tmp_path, torch.float32)


def test_a_checkpoint_that_transformers_rearranges_is_left_to_transformers(tmp_path: Path) -> None:
    config = MixtralConfig(
        vocab_size=264,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=2,
    )
    save_model(tmp_path, config)
    with pytest.raises(NeedsTransformers, match="rearranges the checkpoint of MixtralForCausalLM"):
        build_on_meta(tmp_path, torch.float32, "sdpa")


def test_a_checkpoint_of_another_model_is_not_taken_for_this_one(tmp_path: Path) -> None:
    save_model(tmp_path, llama_config(num_hidden_layers=3))
    llama_config(num_hidden_layers=4).save_pretrained(tmp_path)
    with pytest.raises(NeedsTransformers, match=r"has nothing for model.layers.3"):
        build_on_meta(tmp_path, torch.float32, "sdpa")
    llama_config(num_hidden_layers=2).save_pretrained(tmp_path)
    with pytest.raises(NeedsTransformers, match=r"tensors that the model has not, first model.layers.2"):
        build_on_meta(tmp_path, torch.float32, "sdpa")


def test_a_quantised_or_foreign_config_is_one_line(tmp_path: Path) -> None:
    save_model(tmp_path, llama_config())
    config = tmp_path / "config.json"
    text = config.read_text()
    config.write_text(text.replace("{", '{"quantization_config": {"quant_method": "gptq", "bits": 4},', 1))
    with pytest.raises(TaskInputError, match=r"is quantised \(gptq\)"):
        build_on_meta(tmp_path, torch.float32, "sdpa")
    config.write_text('{"model_type": "no-such-model"}')
    with pytest.raises(TaskInputError, match=r"config.json cannot be used") as caught:
        build_on_meta(tmp_path, torch.float32, "sdpa")
    assert "\n" not in str(caught.value)


def test_parameters_go_to_meta_only_inside_the_context_and_buffers_never() -> None:
    class Computed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(4, 4)
            self.register_buffer("table", torch.arange(4.0), persistent=False)
            self.register_parameter("absent", None)

    with pytest.raises(RuntimeError, match="stop"), parameters_on_meta():
        module = Computed()
        assert module.lin.weight.is_meta and module.absent is None
        assert torch.equal(module.table, torch.arange(4.0))
        raise RuntimeError("stop")
    assert not nn.Linear(2, 2).weight.is_meta


def test_the_repeated_block_is_the_longest_list_of_one_class() -> None:
    model = nn.Module()
    model.heads = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    model.mixed = nn.ModuleList([nn.Linear(2, 2), nn.ReLU(), nn.LayerNorm(2), nn.Linear(2, 2)])
    model.drops = nn.ModuleList([nn.Dropout() for _ in range(9)])
    model.body = nn.Module()
    model.body.layers = nn.ModuleList([nn.Linear(2, 2) for _ in range(3)])
    assert repeated_block_pattern(model) == "body.layers.*"
    assert repeated_block_pattern(nn.Linear(2, 2)) is None
