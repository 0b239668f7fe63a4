"""Text generation on an offloaded model gives the un-offloaded model's tokens, from the first item on."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, MixtralConfig

import flextensor
from cluster.messages import Item
from cluster.task import TaskContext
from launch.causal_lm import CausalLMTask
from launch.model_files import TaskInputError

from .tiny_causal_lm import llama_config, save_model

ITEMS: list[Item] = [
    {"id": "a", "prompt": "one"},
    {"id": "b", "prompt": "a much longer prompt than the first one, so that the first is padded"},
    {"id": "c", "messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]},
    {"id": "d", "prompt": "two words"},
    {"id": "e", "prompt": "Grüße, 你好"},
]


@pytest.fixture
def namespace() -> str:
    return f"test-{uuid.uuid4().hex[:12]}"


@pytest.fixture(autouse=True)
def managers_end() -> Iterator[None]:
    yield
    for name in ("w0", "w1"):
        with contextlib.suppress(flextensor.OffloadError):
            flextensor.release(name=name)


def context(namespace: str, name: str = "w0", said: list[str] | None = None, **settings: Any) -> TaskContext:
    config = flextensor.OffloadConfig(
        **{
            "gpu_device": "host",
            "shm_enabled": True,
            "shm_namespace": namespace,
            "resident_below_bytes": 1,
            "host_link_bytes_per_second": "1GB/s",
            **settings,
        }
    )
    return TaskContext(config, name, namespace, (said if said is not None else []).append)


def expected(directory: Path, items: list[Item], new_tokens: int, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """What transformers' own generate gives for the items as one batch: id -> tokens up to the first end token."""
    tokenizer = AutoTokenizer.from_pretrained(directory, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, attn_implementation="sdpa").eval()
    conversations = [item.get("messages") or [{"role": "user", "content": item["prompt"]}] for item in items]
    texts = tokenizer.apply_chat_template(conversations, tokenize=False, add_generation_prompt=True)
    inputs = tokenizer(texts, padding=True, return_tensors="pt", add_special_tokens=False)
    with torch.inference_mode():
        output = model.generate(
            inputs["input_ids"], attention_mask=inputs["attention_mask"], do_sample=False, max_new_tokens=new_tokens
        )
    end = tokenizer.eos_token_id
    rows = output[:, inputs["input_ids"].shape[1] :].tolist()
    cut = [row[: row.index(end) + 1] if end in row else row for row in rows]
    return {item["id"]: row for item, row in zip(items, cut, strict=True)}


def tokens(results: list[dict[str, Any]]) -> dict[str, Any]:
    return {result["id"]: result["tokens"] for result in results}


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_tokens_are_those_of_the_whole_model_from_the_first_item_on(
    tmp_path: Path, namespace: str, tied: bool, dtype: str
) -> None:
    model = save_model(tmp_path, llama_config(tie_word_embeddings=tied))
    want = expected(model, ITEMS, 16, getattr(torch, dtype))
    task = CausalLMTask({"model": str(model), "dtype": dtype, "max_new_tokens": 16})
    task.load(context(namespace))
    assert tokens(task.run(ITEMS)) == want, "while the manager still discovers and profiles"
    task.warm_up(ITEMS)
    manager = flextensor.get_offload_manager("w0")
    least = manager.solve(_least(manager))
    manager.stage(least)
    assert tokens(task.run(ITEMS)) == want
    assert manager.plan is least and least.streamed_bytes > 0
    assert least.weight_bytes < manager.profile.total_bytes
    assert task.verify(ITEMS, task.run(ITEMS)) == {"checked": 5, "identical": 5, "different": []}


def _least(manager: flextensor.OffloadManager) -> int:
    try:
        manager.solve(1)
    except flextensor.BudgetError as error:
        return error.needed
    raise AssertionError("a budget of one byte was accepted")


def test_replans_between_the_tokens_of_a_batch_change_nothing(tmp_path: Path, namespace: str) -> None:
    model = save_model(tmp_path, llama_config())
    task = CausalLMTask({"model": str(model), "max_new_tokens": 24})
    task.load(context(namespace))
    task.warm_up([])
    manager = flextensor.get_offload_manager("w0")
    least, whole = manager.solve(_least(manager)), manager.solve(1.0)
    assert least.streamed_bytes > 0 == whole.streamed_bytes

    def replan(step: int) -> None:
        if step % 3 == 0:
            manager.stage(least if step % 2 else whole)

    manager.on_step_boundary(replan)
    before = manager.epoch
    copied = manager.live().copied_bytes_total
    assert tokens(task.run(ITEMS)) == expected(model, ITEMS, 24)
    assert manager.epoch >= before + 6
    assert manager.live().copied_bytes_total > copied


def test_verify_names_the_items_whose_tokens_differ(tmp_path: Path, namespace: str) -> None:
    model = save_model(tmp_path, llama_config())
    task = CausalLMTask({"model": str(model), "max_new_tokens": 4})
    task.load(context(namespace))
    results = task.run(ITEMS)
    results[1]["tokens"] = [*results[1]["tokens"][:-1], 5 if results[1]["tokens"][-1] != 5 else 6]
    assert task.verify(ITEMS, results) == {"checked": 5, "identical": 4, "different": ["b"]}


def test_an_item_alone_gets_the_tokens_that_it_gets_in_a_batch(tmp_path: Path, namespace: str) -> None:
    model = save_model(tmp_path, llama_config())
    task = CausalLMTask({"model": str(model), "max_new_tokens": 16})
    task.load(context(namespace))
    together = tokens(task.run(ITEMS))
    for item in ITEMS:
        assert tokens(task.run([item])) == {item["id"]: together[item["id"]]}


def test_batch_size_splits_what_run_is_given(tmp_path: Path, namespace: str) -> None:
    model = save_model(tmp_path, llama_config())
    task = CausalLMTask({"model": str(model), "max_new_tokens": 4, "batch_size": 2})
    task.load(context(namespace))
    manager = flextensor.get_offload_manager("w0")
    steps: list[int] = []
    manager.on_step_boundary(steps.append)
    assert [result["id"] for result in task.run(ITEMS)] == ["a", "b", "c", "d", "e"]
    assert 3 <= len(steps) <= 12


def test_answers_end_at_the_end_token_or_at_the_limit(tmp_path: Path, namespace: str) -> None:
    model = save_model(tmp_path, llama_config())
    first = expected(model, ITEMS[:1], 8)["a"]
    # Whatever the random model says third is made its end token.
    text = (model / "generation_config.json").read_text()
    assert '"eos_token_id": 2' in text
    (model / "generation_config.json").write_text(text.replace('"eos_token_id": 2', f'"eos_token_id": {first[2]}'))
    task = CausalLMTask({"model": str(model), "max_new_tokens": 8})
    task.load(context(namespace))
    (result,) = task.run(ITEMS[:1])
    at = first.index(first[2])
    assert (result["tokens"], result["finish"]) == (first[: at + 1], "eos")
    assert result["prompt"] == "one" and isinstance(result["answer"], str)
    task = CausalLMTask({"model": str(model), "max_new_tokens": 1})
    task.load(context(namespace, "w1"))
    (result,) = task.run(ITEMS[:1])
    assert (result["tokens"], result["finish"]) == (first[:1], "eos" if first[0] == first[2] else "length")


def test_a_system_prompt_is_put_before_conversations_without_one(tmp_path: Path, namespace: str) -> None:
    model = save_model(tmp_path, llama_config())
    task = CausalLMTask({"model": str(model), "max_new_tokens": 6, "system_prompt": "Be brief."})
    task.load(context(namespace))
    system = {"role": "system", "content": "Be brief."}
    explicit: list[Item] = [{"id": "a", "messages": [system, {"role": "user", "content": "one"}]}]
    assert tokens(task.run(ITEMS[:1])) == tokens(task.run(explicit)) == expected(model, explicit, 6)


def test_an_item_that_cannot_be_run_costs_no_other(tmp_path: Path, namespace: str) -> None:
    config = llama_config(max_position_embeddings=96)
    model = save_model(tmp_path, config)
    task = CausalLMTask({"model": str(model), "max_new_tokens": 8})
    task.load(context(namespace))
    task.warm_up([{"id": "long", "prompt": "x" * 200}])
    assert flextensor.get_offload_manager("w0").phase == "inference"
    good = ITEMS[:1]
    results = {result["id"]: result for result in task.run([*good, {"id": "long", "prompt": "x" * 200}])}
    assert "exceed the model's 96 positions" in results["long"]["error"]
    assert results["a"]["tokens"] == expected(model, good, 8)["a"]


def test_a_checkpoint_that_transformers_rearranges_is_loaded_by_it_and_streams(tmp_path: Path, namespace: str) -> None:
    config = MixtralConfig(
        vocab_size=264,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=2,
        max_position_embeddings=512,
        eos_token_id=2,
        bos_token_id=1,
        pad_token_id=0,
    )
    model = save_model(tmp_path, config)
    said: list[str] = []
    task = CausalLMTask({"model": str(model), "max_new_tokens": 8})
    task.load(context(namespace, said=said))
    task.warm_up(ITEMS)
    manager = flextensor.get_offload_manager("w0")
    manager.stage(manager.solve(_least(manager)))
    assert tokens(task.run(ITEMS)) == expected(model, ITEMS, 8)
    assert manager.plan is not None and manager.plan.streamed_bytes > 0
    assert any("loading through transformers" in note for note in said)
    assert task.describe()["loaded_from"].startswith("transformers: ")


def test_the_units_are_the_repeated_block_and_said_so_unless_the_config_names_others(
    tmp_path: Path, namespace: str
) -> None:
    model = save_model(tmp_path, llama_config())
    said: list[str] = []
    task = CausalLMTask({"model": str(model)})
    task.load(context(namespace, said=said))
    assert "no include_patterns given; the units are model.layers.*" in said
    assert len(flextensor.offload_units("w0") + flextensor.resident_units("w0")) == 4
    assert task.describe()["include_patterns"] == ["model.layers.*"]
    other = CausalLMTask({"model": str(model)})
    other.load(context(namespace, "w1", include_patterns=["*.mlp"]))
    assert other.describe()["include_patterns"] == ["*.mlp"]


def test_two_tasks_of_one_model_share_one_store(tmp_path: Path, namespace: str) -> None:
    model = save_model(tmp_path, llama_config())
    for name in ("w0", "w1"):
        CausalLMTask({"model": str(model)}).load(context(namespace, name))
    assert len([path for path in Path("/dev/shm").iterdir() if namespace in path.name]) == 1
    flextensor.release("w0")
    flextensor.release("w1")
    assert not [path for path in Path("/dev/shm").iterdir() if namespace in path.name]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"max_new_token": 3}, "unknown task option 'max_new_token'; did you mean 'max_new_tokens'?"),
        ({"dtype": "int8"}, "dtype = 'int8'; use one of auto, float32, bfloat16, float16"),
        ({"attention": "fast"}, "attention = 'fast'; use one of"),
        ({"max_new_tokens": 0}, "max_new_tokens = 0; use a whole number, 1 or more"),
        ({"max_new_tokens": "9"}, "max_new_tokens = '9'"),
        ({"batch_size": True}, "batch_size = True"),
        ({"system_prompt": 3}, "system_prompt = 3 is not text"),
        ({"model": None}, "'model' is missing"),
        ({"model": "/no/such/model"}, "model directory /no/such/model does not exist"),
    ],
)
def test_wrong_options_are_one_line_before_anything_is_loaded(
    tmp_path: Path, options: dict[str, Any], says: str
) -> None:
    model = save_model(tmp_path, llama_config(num_hidden_layers=2))
    with pytest.raises(TaskInputError) as caught:
        CausalLMTask({"model": str(model), **options})
    assert says in str(caught.value) and "\n" not in str(caught.value)


def test_a_directory_without_a_tokenizer_is_named(tmp_path: Path, namespace: str) -> None:
    model = save_model(tmp_path, llama_config(num_hidden_layers=2))
    for file in model.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(TaskInputError, match="no usable tokenizer") as caught:
        CausalLMTask({"model": str(model)}).load(context(namespace))
    assert "\n" not in str(caught.value)


@pytest.mark.xdist_group("smollm2")
def test_the_real_model_answers_while_half_of_it_streams(smollm2: Path, namespace: str) -> None:
    items: list[Item] = [
        {"id": "france", "prompt": "What is the capital of France? Answer in one sentence."},
        {"id": "rivers", "prompt": "Name three rivers of Europe."},
    ]
    budget = 269_000_000
    task = CausalLMTask({"model": str(smollm2), "max_new_tokens": 12})
    settings = {"budget_bytes": budget, "host_link_bytes_per_second": "6GB/s", "resident_below_bytes": 1 << 20}
    task.load(context(namespace, **settings))
    task.warm_up(items)
    manager = flextensor.get_offload_manager("w0")
    results = task.run(items)
    assert results[0]["answer"] == "The capital of France is Paris."
    assert tokens(results) == expected(smollm2, items, 12)
    assert manager.plan is not None and manager.plan.streamed_bytes > 200_000_000
    assert manager.plan.weight_bytes + manager.profile.other_bytes <= budget
    assert manager.device.allocated_bytes() <= budget
