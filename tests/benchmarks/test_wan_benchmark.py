"""The Wan benchmark end to end on the host device: both paths, cold starts, files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import wan
from benchmarks.rows import KEYS

pytest.importorskip("diffusers")

PNG = b"\x89PNG\r\n\x1a\n"
BLOCKS = 6


pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("wan_benchmark")]
"""One run serves all of them."""


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("wan")
    assert wan.main(["--tiny", "--repeats", "1", "--seconds", "0.02", "--output", str(output)]) == 0
    return output


@pytest.fixture(scope="module")
def data(results: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((results / "wan-tiny.json").read_text())
    return found


def test_each_path_streams_within_its_budget_and_equals_the_compiled_resident_model(data: dict[str, Any]) -> None:
    rows = data["rows"]
    assert [(row["contender"], row["target"]) for row in rows] == [
        (contender, target) for contender in ("wan-compile-fn", "wan-external") for target in wan.TINY_TARGETS
    ]
    for row in rows:
        assert tuple(row) == KEYS
        assert row["status"] == "ok" and row["identical"] is True and row["unforeseen_visits"] == 0
        assert row["streamed_bytes"] > 0 and row["device_weight_bytes"] <= row["budget_bytes"]
        assert row["budget_bytes"] < row["total_weight_bytes"] <= row["device_weight_bytes"] + row["streamed_bytes"]
        assert row["ratio"] == pytest.approx(row["step_seconds"] / row["floor_seconds"])


def test_one_graph_is_made_for_all_blocks_and_none_by_replans(data: dict[str, Any]) -> None:
    starts = {start["contender"]: start for start in data["starts"]}
    assert set(starts) == {"resident", "wan-compile-fn", "wan-external"}
    for start in starts.values():
        assert (start["graphs"], start["later_graphs"], start["eager"]) == (1, 0, 0)
        assert start["compiled"] + start["shared"] == BLOCKS
        assert 0 < start["compile_seconds"] < start["compiled_output_seconds"] < start["planned_seconds"]
        assert sum(start["parts"].values()) == pytest.approx(start["planned_seconds"], rel=0.05)
    assert starts["wan-external"]["first_output_seconds"] < starts["wan-external"]["compiled_output_seconds"]


def test_results_and_traces_are_written(results: Path, data: dict[str, Any]) -> None:
    assert data["environment"]["torch"] == torch.__version__
    text = (results / "wan-tiny.md").read_text()
    assert "## Cold start" in text and "| x resident |" in text
    assert "Compiled with aot_eager; diffusers " in text and "Weights: " in text and "Link, " in text
    starts = {start["contender"]: start["planned_seconds"] for start in data["starts"]}
    assert f"| {starts['wan-external'] / starts['resident']:.2f} |" in text
    for name in ("trace-wan-compile-fn-48", "trace-wan-external-48"):
        assert (results / f"{name}.png").read_bytes().startswith(PNG) and f"{name}.png" in text
        json.loads((results / f"{name}.json").read_text())
