"""A run's settings: where they come from and what a wrong one says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from flextensor.config import ConfigError, OffloadConfig
from launch.compile_choice import CompileChoice
from launch.run_config import RunConfig, load_run_config, parse_assignments

ROOT = Path(__file__).parents[2]


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "run.yaml"
    path.write_text(
        "model: m\nprompts: p.jsonl\nbudget: 50%\ntask_options: {dtype: float32}\noffload: {min_blocks: 2}\n"
    )
    return path


def test_relative_paths_start_at_the_current_directory(file: Path, tmp_path: Path) -> None:
    run = load_run_config(file)
    assert run.model == tmp_path / "m"
    assert run.output == tmp_path / "out" / "answers.jsonl"
    assert run.task_settings() == {"model": str(tmp_path / "m"), "dtype": "float32"}


def test_the_command_line_wins_over_the_environment_and_that_over_the_file(file: Path) -> None:
    environ = {"FT_MIN_BLOCKS": "3", "FT_NUM_BLOCKS": "4"}
    assert load_run_config(file, environ={}).offload_config().min_blocks == 2
    assert load_run_config(file, environ=environ).offload_config().min_blocks == 3
    run = load_run_config(file, {"offload.min_blocks": 5, "workers": "2"}, environ=environ)
    assert (run.offload_config().min_blocks, run.offload_config().num_blocks, run.workers) == (5, 4, 2)


def test_overrides_reach_into_sections_and_keep_the_rest(file: Path) -> None:
    run = load_run_config(file, parse_assignments(["task_options.max_new_tokens=8", "overwrite=true", "report=null"]))
    assert run.task_options == {"dtype": "float32", "max_new_tokens": 8}
    assert run.overwrite is True and run.report is None


@pytest.mark.parametrize(("text", "value"), [("50%", 0.5), ("6MiB", 6 << 20), (1000, 1000), (0.25, 0.25), (None, None)])
def test_a_budget_is_bytes_a_share_or_none(file: Path, text: Any, value: Any) -> None:
    budget = load_run_config(file, {"budget": text}).budget
    assert budget == value and type(budget) is type(value)


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        ({"buget": "1GiB"}, "unknown setting 'buget'; did you mean 'budget'?"),
        (
            {"offload.include_pattern": "x"},
            "offload: unknown setting 'include_pattern'; did you mean 'include_patterns'?",
        ),
        ({"offload.min_blocks": 0}, "offload: min_blocks = 0: "),
        ({"budget": "140%"}, "budget: budget '140%' is outside 0% to 100%"),
        ({"budget": "lots"}, "budget: 'lots' is not a size"),
        ({"workers": "many"}, "workers = 'many': use 'auto' or a whole number, 1 or more"),
        ({"workers": 0}, "workers = 0: use 'auto'"),
        ({"device": "tpu"}, "device = 'tpu': Input should be 'auto', 'cuda' or 'host'"),
        ({"num_gpus": 0}, "num_gpus = 0: "),
        ({"batch_size": 0}, "batch_size = 0: "),
        ({"verify": -1}, "verify = -1: "),
        ({"task": "launch.causal_lm"}, "task = 'launch.causal_lm': write 'module:name'"),
        ({"model": None}, "setting 'model' is missing"),
        ({"offload": 3}, "offload = 3: "),
    ],
)
def test_a_wrong_setting_is_one_line_with_its_value(file: Path, overrides: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_run_config(file, overrides)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "says"),
    [("- a\n", "expected settings"), ("a: [", "is not YAML"), (None, "cannot read config")],
)
def test_a_config_file_that_is_none_is_named(tmp_path: Path, content: str | None, says: str) -> None:
    path = tmp_path / "run.yaml"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=says) as caught:
        load_run_config(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["min_blocks", "=3", "a=[1"])
def test_an_assignment_that_sets_nothing_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_assignments([text])


def test_the_demo_config_is_usable_and_its_prompts_are_all_good(monkeypatch: pytest.MonkeyPatch) -> None:
    from launch.items import read_items

    monkeypatch.chdir(ROOT)
    run = load_run_config("configs/demo.yaml")
    items, bad = read_items(run.prompts)
    assert len(items) >= 24 and bad == []
    assert "What is the capital of France? Answer in one sentence." in [item.get("prompt") for item in items]


def test_a_run_config_cannot_be_changed() -> None:
    with pytest.raises(ValueError):
        RunConfig(model=Path("m"), prompts=Path("p")).workers = 3  # type: ignore[misc]


def test_external_compilation_profiles_one_eager_step_unless_the_caller_asks_for_more() -> None:
    external = CompileChoice("external", "aot_eager", "")
    assert external.offload_config(OffloadConfig()).profiling_iters == 1
    assert external.offload_config(OffloadConfig(profiling_iters=5)).profiling_iters == 5
    assert external.offload_config(OffloadConfig(skip_discovery=True)).profiling_iters > 1
    inside = CompileChoice("compile_fn", "aot_eager", "")
    assert not inside.offload_config(OffloadConfig(external_compile=True)).external_compile
