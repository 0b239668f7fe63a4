"""Real pipelines, compiled and offloaded, on both paths: diffusers' Wan text to video, and a causal LM with a static
key-value cache. Numbers are those of the same pipeline un-offloaded and compiled in the same way."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaDecoderLayer

import flextensor as ft
from cluster.messages import Item
from cluster.task import TaskContext
from flextensor import registry
from launch.causal_lm import CausalLMTask
from launch.compile_choice import CompileChoice
from launch.model_files import TaskInputError
from launch.static_cache import StaticCaches
from launch.wan_t2v import WanT2VTask
from launch.wan_tiny import BLOCKS
from tests.launch.tiny_causal_lm import llama_config, save_model
from tests.launch.wan import BUDGET, ITEMS, SIZES, context, loaded, managers

pytest.importorskip("diffusers")

PROMPTS: list[Item] = [
    {"id": "a", "prompt": "the end"},
    {"id": "b", "prompt": "a longer prompt"},
    {"id": "c", "prompt": "tell me more of it"},
]
LAYERS = 3
EXTERNAL = {"compile": "external", "compile_backend": "aot_eager"}


@pytest.fixture(autouse=True)
def managers_end() -> Any:
    yield
    for name in registry.names():
        ft.release(name)


@pytest.fixture
def namespace() -> str:
    return f"test-{uuid.uuid4().hex[:12]}"


def graphs() -> int:
    """Graphs that Dynamo made in this process so far."""
    made: int = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    return made


# ---- Wan


@pytest.mark.parametrize(
    ("how", "backend"),
    [
        ("compile_fn", "aot_eager"),
        ("external", "aot_eager"),
        ("compile_fn", "inductor"),
        pytest.param("external", "inductor", marks=pytest.mark.slow),
    ],
)
def test_wan_compiled_gives_the_frames_of_the_whole_pipeline_compiled_per_block(
    namespace: str, tmp_path: Path, how: str, backend: str
) -> None:
    task = loaded(namespace, tmp_path, compile=how, compile_backend=backend)
    first, second, text = managers("w0", "w0-2", "w0-text")
    made = graphs()
    results = task.run(ITEMS)
    assert graphs() == made, "nothing is compiled after the warm-up"
    for manager in (first, second):
        report = manager.compile_report()
        assert (report.eager, report.pending, report.compiled + report.shared) == (0, 0, BLOCKS)
        assert manager.plan is not None and manager.profile is not None
        assert manager.plan.streamed_bytes > 0 and manager.live().unforeseen_visits == 0
        assert manager.plan.weight_bytes + manager.profile.other_bytes <= BUDGET
        assert manager.external_compile_active == (how == "external")
        assert manager.strategy_replan_status.applied is (True if how == "external" else None)
    # Both transformers' blocks are of one shape: one graph for all sixteen.
    assert first.compile_report().graphs + second.compile_report().graphs == 1
    assert text.compile_report().eager == 3
    assert task.verify(ITEMS, results) == {"checked": 2, "identical": 2, "different": []}


def test_a_replan_between_two_denoising_steps_recompiles_nothing_and_changes_nothing(
    namespace: str, tmp_path: Path
) -> None:
    task = loaded(namespace, tmp_path, compile="compile_fn", compile_backend="aot_eager")
    (first,) = managers("w0")
    want = task.run(ITEMS)
    made, epoch = graphs(), first.epoch
    plans = [first.solve(budget) for budget in (2_600_000, BUDGET, 4_000_000)]

    def replan(step: int) -> None:
        first.stage(plans[step % len(plans)])

    remove = first.on_step_boundary(replan)
    got = task.run(ITEMS)
    remove()
    assert first.epoch >= epoch + 4 and graphs() == made
    assert [r["latents_sha256"] for r in got] == [r["latents_sha256"] for r in want]


def test_a_plan_from_compiled_times_that_cannot_be_is_told_before_the_first_video(
    namespace: str, tmp_path: Path
) -> None:
    task = WanT2VTask({"tiny": True, **SIZES, "output_dir": str(tmp_path), **EXTERNAL})
    task.load(context(namespace))
    (first,) = managers("w0")

    def shrink(step: int) -> None:
        if first.phase == "inference":  # what was room enough for the first plan is gone
            first.config = first.config.updated(budget_bytes=1)

    first.on_step_boundary(shrink)
    with pytest.raises(ft.BudgetError, match="budget of 1 bytes"):
        task.warm_up(ITEMS)
    choice = CompileChoice.parse(EXTERNAL)
    with pytest.raises(ft.OffloadError, match="w0: no replan for externally compiled units: the last replan failed"):
        choice.compile_externally(first)
    with pytest.raises(ft.OffloadError, match="was not put in force: the last replan failed"):
        choice.require_replanned(first)


# ---- a causal LM with a static cache


SMOLLM2 = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "num_hidden_layers": 8,
}
"""Of its 135M model, but for the number of layers and the vocabulary."""


def language_task(
    folder: Path, namespace: str, *, shape: dict[str, int] | None = None, budget: int = 500_000, **options: Any
) -> CausalLMTask:
    """Loaded and warm, about half of the weights streamed."""
    model = save_model(folder, llama_config(**(shape or {"num_hidden_layers": LAYERS})))
    task = CausalLMTask({"model": str(model), "max_new_tokens": 12, "cache": "static", **options})
    config = ft.OffloadConfig(
        gpu_device="host",
        shm_enabled=True,
        shm_namespace=namespace,
        resident_below_bytes=4096,
        host_link_bytes_per_second="1GB/s",
        budget_bytes=budget,
    )
    task.load(TaskContext(config, "w0", namespace, lambda text: None))
    task.warm_up(PROMPTS)
    return task


@pytest.mark.parametrize(
    ("how", "backend"),
    [
        ("compile_fn", "aot_eager"),
        ("external", "aot_eager"),
        pytest.param("compile_fn", "inductor", marks=pytest.mark.slow),
    ],
)
def test_a_static_cache_llm_gives_the_tokens_of_the_same_model_compiled_whole(
    namespace: str, tmp_path: Path, how: str, backend: str
) -> None:
    task = language_task(tmp_path, namespace, compile=how, compile_backend=backend)
    (manager,) = managers("w0")
    made = graphs()
    results = task.run(PROMPTS)
    # Prompts of other lengths and a smaller batch: padded to the shapes that are there.
    again = task.run(
        [{"id": "b", "prompt": "a longer prompt"}, {"id": "z", "prompt": "another one, of another length"}]
    )
    assert graphs() == made, "prefill and decode steps run what the warm-up compiled"
    assert made == 2, "one for prefill and one for all decode steps, of all layers, though each has an index"
    report = manager.compile_report()
    assert (report.compiled, report.shared, report.eager, report.pending) == (1, LAYERS - 1, 0, 0)
    assert report.graphs == made
    assert manager.plan is not None and manager.plan.streamed_bytes > 0 and manager.live().unforeseen_visits == 0
    by_id = {result["id"]: result["tokens"] for result in results}
    assert {len(tokens) for tokens in by_id.values()} == {12} and len(set(map(tuple, by_id.values()))) == 3
    assert again[0]["tokens"] == by_id["b"]
    assert task.verify(PROMPTS, results) == {"checked": 3, "identical": 3, "different": []}
    ft.release("w0")
    plain = language_task(tmp_path, namespace, cache="dynamic")
    assert {result["id"]: result["tokens"] for result in plain.run(PROMPTS)} == by_id


@pytest.mark.slow
@pytest.mark.parametrize("how", ["compile_fn", "external"])
def test_a_static_cache_llm_of_smollm2s_shape_keeps_its_tokens_across_replans(
    namespace: str, tmp_path: Path, how: str
) -> None:
    task = language_task(tmp_path, namespace, shape=SMOLLM2, budget=60_000_000, compile=how)
    (manager,) = managers("w0")
    results, made = task.run(PROMPTS), graphs()
    for share in (0.7, 0.4):
        epoch = manager.epoch
        manager.replan(share)
        assert [r["tokens"] for r in task.run(PROMPTS)] == [r["tokens"] for r in results]
        assert manager.epoch == epoch + 1 and manager.plan is not None and manager.plan.streamed_bytes > 0
    assert graphs() == made == 2
    report = manager.compile_report()
    assert (report.compiled, report.shared, report.eager, report.graphs) == (1, 7, 0, 2)
    assert task.verify(PROMPTS, results) == {"checked": 3, "identical": 3, "different": []}


def test_layers_that_read_their_index_elsewhere_keep_it(namespace: str, tmp_path: Path) -> None:
    """Such a layer must not be told that it is the first."""

    class Scaled(LlamaDecoderLayer):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return super().forward(*args, **kwargs) * (1.0 + 0.1 * self.self_attn.layer_idx)

    class ScaledAttention(LlamaAttention):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            hidden, weights = super().forward(*args, **kwargs)
            return hidden * (1.0 + 0.1 * self.layer_idx), weights

    model = AutoModelForCausalLM.from_config(llama_config(num_hidden_layers=LAYERS)).eval()
    assert StaticCaches(model, torch.device("cpu"), one_graph=True).layers_alike == LAYERS
    for cls, place in ((Scaled, lambda layer: layer), (ScaledAttention, lambda layer: layer.self_attn)):
        model = AutoModelForCausalLM.from_config(llama_config(num_hidden_layers=LAYERS)).eval()
        for layer in model.model.layers:
            place(layer).__class__ = cls
        assert StaticCaches(model, torch.device("cpu"), one_graph=True).layers_alike == 0
        assert [layer.self_attn.layer_idx for layer in model.model.layers] == list(range(LAYERS))


def test_a_static_cache_gives_the_tokens_of_a_growing_one(namespace: str, tmp_path: Path) -> None:
    task = language_task(tmp_path, namespace)
    static = {result["id"]: result["tokens"] for result in task.run(PROMPTS)}
    ft.release("w0")
    grown = language_task(tmp_path, namespace, cache="dynamic")
    assert {result["id"]: result["tokens"] for result in grown.run(PROMPTS)} == static


def test_a_longer_prompt_makes_a_larger_cache_and_right_tokens(namespace: str, tmp_path: Path) -> None:
    task = language_task(tmp_path, namespace, compile="compile_fn", compile_backend="aot_eager")
    long: list[Item] = [{"id": "long", "prompt": "word " * 30}]
    assert task.verify(long, task.run(long)) == {"checked": 1, "identical": 1, "different": []}


def test_compiling_without_a_static_cache_is_refused(tmp_path: Path) -> None:
    model = save_model(tmp_path, llama_config(num_hidden_layers=LAYERS))
    with pytest.raises(TaskInputError, match="compile = 'compile_fn' needs cache = 'static'"):
        CausalLMTask({"model": str(model), "compile": "compile_fn"})
