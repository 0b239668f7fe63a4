"""``run_batch``: a batch job from a program's own functions."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from cluster import run_batch
from cluster.items import ItemError, items_of
from cluster.journal import JournalError
from cluster.task import TaskError
from flextensor.config import ConfigError

pytestmark = [pytest.mark.ray, pytest.mark.xdist_group("ray")]

CONFIG = {
    "include_patterns": ("blocks.*",),
    "resident_below_bytes": 0,
    "host_link_bytes_per_second": 1e9,
    "shm_namespace": "program-tests",
}


def functions() -> tuple[Callable[[], Any], Callable[[Any, Sequence[dict[str, Any]]], list[dict[str, Any]]]]:
    """Made in a function, so that they travel by value, as those of a script do."""

    def make() -> Any:
        import torch

        torch.manual_seed(0)
        model = torch.nn.Module()
        model.blocks = torch.nn.ModuleList(torch.nn.Linear(96, 96) for _ in range(5))

        class Chain(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.blocks = model.blocks

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                for block in self.blocks:
                    x = torch.tanh(block(x))
                return x

        return Chain()

    def run(model: Any, items: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        import torch
        from PIL import Image

        rows = torch.stack([torch.full((96,), float(item["value"])) for item in items])
        output = model(rows)
        results: list[dict[str, Any]] = [{"sum": row.sum(), "head": row[:3]} for row in output]
        for item, result in zip(items, results, strict=True):
            if item["value"] == 4:
                result["sum"] = object()
            if item["value"] == 5:
                result["picture"] = Image.new("RGB", (4, 4), (255, 0, 0))
        return results

    return make, run


def test_functions_of_a_script_answer_an_iterable_and_a_second_call_has_nothing_to_do(
    local_ray: str, tmp_path: Path
) -> None:
    make, run = functions()
    settings: dict[str, Any] = {
        "output": tmp_path / "answers.jsonl",
        "model": make,
        "run": run,
        "compile_fn": lambda module: module,
        "config": CONFIG,
        "budget": "50%",
        "workers": 2,
        "device": "host",
        "namespace": "program",
        "batch_size": "auto",
        "verify": 2,
    }
    outcome = run_batch((number for number in range(9)), **settings)
    results = {result["id"]: result for result in outcome.results()}
    assert list(results) == [f"item-{number}" for number in range(1, 10)]
    assert "'sum', which is no JSON" in results["item-5"]["error"]
    good = [result for key, result in results.items() if key != "item-5"]
    assert all(isinstance(result["sum"], float) and len(result["head"]) == 3 for result in good)
    assert outcome.progress.done == 9 and outcome.progress.failed == 1
    assert outcome.verify is not None and outcome.verify["checked"] == outcome.verify["identical"] >= 2
    assert outcome.batch_size is not None
    curve = {point.batch_size: point for point in outcome.batch_size.curve}
    assert {1, 2} <= set(curve) <= {1, 2, 4, 5} and outcome.batch_size.batch_size in curve
    assert all(point.streamed_bytes > 0 and point.job_tokens_per_second > 0 for point in curve.values())
    picture = Path(results["item-6"]["picture"])
    assert picture == tmp_path / "answers.files" / "item-6-picture.png" and picture.read_bytes()[:4] == b"\x89PNG"
    assert run_batch(range(9), **settings).progress.skipped == 9


def test_what_cannot_be_sent_is_named_before_ray_starts(tmp_path: Path) -> None:
    lock = threading.Lock()

    def make() -> Any:
        return lock

    def compile_it(module: Any) -> Any:
        return module if lock else None

    def run(model: Any, items: Any) -> Any:
        return items

    output = tmp_path / "a.jsonl"
    with pytest.raises(TaskError, match=r"model .*make cannot be sent to the workers: it captures 'lock'"):
        run_batch([1], model=make, run=run, output=output)
    with pytest.raises(TaskError, match=r"compile_fn .*compile_it cannot be sent to the workers: it captures 'lock'"):
        run_batch([1], model=dict, run=run, compile_fn=compile_it, output=output)
    with pytest.raises(ItemError, match=r"item 2: 'gate' \(lock\) cannot be sent"):
        run_batch([{"id": "a"}, {"gate": lock}], model=dict, run=run, output=output)
    with pytest.raises(TaskError, match=r"task_options dict cannot be sent to the workers: it captures 'gate' \(lock"):
        run_batch([1], task="launch.causal_lm:CausalLMTask", task_options={"gate": lock}, output=output)
    with pytest.raises(ConfigError, match="run is missing"):
        run_batch([1], model=dict, output=output)
    with pytest.raises(ConfigError, match="batch_size = 0"):
        run_batch([1], model=dict, run=run, output=output, batch_size=0)
    with pytest.raises(ConfigError, match="either task, or model and run"):
        run_batch([1], model=dict, run=run, task="x:y", output=output)
    with pytest.raises(ConfigError, match="device = 'cuda:0'; use auto, cuda or host"):
        run_batch([1], model=dict, run=run, output=output, device="cuda:0")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="num_gpus = 0"):
        run_batch([1], model=dict, run=run, output=output, num_gpus=0)
    with pytest.raises(ConfigError, match=r"coordinator setting.*hang"):
        run_batch([1], model=dict, run=run, output=output, coordinator={"hangs": 3})
    (tmp_path / "a.batch-size.json").write_text("{")
    with pytest.raises(JournalError, match=r"a\.batch-size\.json"):
        run_batch([1], model=dict, run=run, output=output, batch_size="auto")
    assert not output.exists()


def test_items_of_a_program_get_ids_and_equal_ones_are_refused() -> None:
    assert items_of(["a", {"id": 7, "x": 1}, 2.5]) == [
        {"id": "item-1", "prompt": "a"},
        {"id": "7", "x": 1},
        {"id": "item-3", "value": 2.5},
    ]
    with pytest.raises(ItemError, match="item 3: the id 'item-1' was taken by item 1"):
        items_of(["a", "b", {"id": "item-1"}])
    with pytest.raises(ItemError, match="item 1: the id is ''"):
        items_of([{"id": ""}])


def test_importing_cluster_brings_neither_ray_nor_torch() -> None:
    said = subprocess.run(
        [sys.executable, "-c", "import cluster, sys; print(sorted({'ray', 'torch'} & set(sys.modules)))"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert said.stdout.strip() == "[]"
