"""The cluster benchmark end to end on host devices: what it measures, records and draws."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import cluster, peer
from benchmarks.cluster_jobs import different
from benchmarks.cluster_rounds import simulated_cluster, simulated_profile
from benchmarks.cluster_sections import counts_up_to
from benchmarks.record import ROOT
from flextensor.store.inventory import list_stores

PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One tiny run, in a process of its own, as people start it: this one may have a Ray already."""
    output = tmp_path_factory.mktemp("results")
    command = [sys.executable, "-m", "benchmarks.cluster", "--tiny", "--time-limit", "0", "--output", str(output)]
    environment = os.environ | {"FLEXTENSOR_BENCH_COMMIT": "0123abcd"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=850)
    assert done.returncode == 0, done.stderr[-4000:]
    return output


@pytest.fixture(scope="module")
def data(results: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((results / "cluster-tiny.json").read_text())
    return found


pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.xdist_group("ray")]


def test_every_section_ran_and_is_written_and_drawn(results: Path, data: dict[str, Any]) -> None:
    assert data["status"] == dict.fromkeys(cluster.SECTIONS, "ok")
    assert data["environment"]["commit"] == "0123abcd"
    assert (results / "cluster-tiny.png").read_bytes().startswith(PNG)
    text = (results / "cluster-tiny.md").read_text()
    assert all(f"| {model} | 50% | {count} |" in text for model in ("llama", "stack") for count in (1, 2))
    assert "joint measurements" in text and "SIGKILL" in text


def test_rows_stream_within_their_budget_and_add_up(data: dict[str, Any]) -> None:
    for row in data["scaling"]:
        assert 0 < row["weight_bytes"] <= row["budget"] * row["total_bytes"] * 1.001
        assert row["streamed_bytes"] + row["weight_bytes"] >= row["total_bytes"]
        assert len(row["each"]) == row["workers"]
        assert row["steps_per_second"] == pytest.approx(sum(1 / one["step_seconds"] for one in row["each"]))
        assert 0 < row["link_bytes_per_second"] <= 1.1 * cluster.HOST_LINK
    alone = {row["model"]: row for row in data["scaling"] if row["workers"] == 1}
    assert all(row["efficiency"] == 1.0 and row["link_share"] == 1.0 for row in alone.values())


def test_replans_and_a_kill_change_no_output(data: dict[str, Any]) -> None:
    assert data["verified"]["identical"] == data["verified"]["checked"] > 0
    assert data["replans"]["different"] == [] and data["replans"]["items"] >= 16
    assert [one["to"] for one in data["replans"]["replans"]] == ["75%", "rollback"]
    assert all(one["committed"] and one["recovery_seconds"] > 0 for one in data["replans"]["replans"])
    assert data["kill"]["different"] == [] and data["kill"]["failed"] == 0
    assert 0 < data["kill"]["seconds_to_next_item"] < 90


def test_the_node_holds_one_copy_whatever_the_number_of_workers(results: Path, data: dict[str, Any]) -> None:
    rows = {(row["model"], row["workers"]): row for row in data["memory_by_workers"]}
    assert list(rows) == [(model, count) for model in ("llama", "stack") for count in (1, 2)]
    assert all(row["copies"] == pytest.approx(1, abs=0.1) and row["store_bytes"] > 0 for row in rows.values())
    assert "| llama: host memory of the weights, workers: 2 |" in (results / "cluster-tiny.md").read_text()


def test_the_coordinators_questions_cost_little(data: dict[str, Any]) -> None:
    cost = data["coordinator"]
    assert 0 < cost["cpu_share"] < 0.02 and cost["calls"] >= 100
    assert 0 <= cost["coordinator_cpu_share"] < 0.5


def test_the_contention_row_has_both_plans(data: dict[str, Any]) -> None:
    found = data["contention"]
    assert found["joint"]["weight_bytes"] > 0 and found["solo"]["weight_bytes"] > 0
    assert found["speedup"] == pytest.approx(found["joint"]["steps_per_second"] / found["solo"]["steps_per_second"])
    # The link that the solo plan is made for is not the one that both get.
    assert found["alone_link_bytes_per_second"] > 1.2 * found["solo"]["link_bytes_per_second"]


def test_workers_with_a_link_each_run_plans_from_solo_and_from_joint_measurements(
    results: Path, data: dict[str, Any]
) -> None:
    found = data["links"]
    assert [row["budget"] for row in found["plans"]] == [None, 0.5]
    assert found["verified"]["identical"] == found["verified"]["checked"] == 1
    for row in found["plans"]:
        solo, joint, again = row["solo"], row["joint"], row["again"]
        usual = (solo["steps_per_second"] + again["steps_per_second"]) / 2
        assert row["speedup"] == pytest.approx(joint["steps_per_second"] / usual)
        for before, between, after in zip(solo["each"], joint["each"], again["each"], strict=True):
            assert min(one["streamed_bytes"] for one in (before, between, after)) > 0
            assert before["predicted_step_seconds"] == after["predicted_step_seconds"] > 0
    alone, together = (
        [one["planned_link_bytes_per_second"] for row in found["plans"] for one in row[which]["each"]]
        for which in ("solo", "joint")
    )
    assert max(alone) > 1.2 * statistics.median(together)  # the host's links are halved while all work
    text = (results / "cluster-tiny.md").read_text()
    assert "| latency | solo measurements |" in text and "| 50% | joint measurements |" in text


def test_each_workers_curve_is_measured_alone_and_with_all_at_once(results: Path, data: dict[str, Any]) -> None:
    curves = data["links"]["curves"]
    assert [one["rank"] for one in curves] == [0, 1]
    for one in curves:
        (size, alone), (_, together) = one["alone"][-1], one["together"][-1]
        assert together > 1.2 * alone
        assert size / alone <= 1.1 * cluster.HOST_LINK and len(one["setup"]) > 0
    assert "| 1 | alone, others idle |" in (results / "cluster-tiny.md").read_text()


def test_a_run_leaves_no_store_behind(data: dict[str, Any]) -> None:
    assert [entry for entry in list_stores("/dev/shm") if entry.namespace.startswith("bench-")] == []


def test_a_simulated_cluster_moves_as_one_and_workers_of_one_gpu_plan_for_one_link() -> None:
    found = simulated_cluster(8, workers_a_gpu=2, kinds=2, blocks=6)
    assert found["links_shared_alike"] and found["calls"] == 64
    assert (found["gpus"], found["workers"]) == (8, 16)
    assert found["seconds"] >= found["slowest_solve_seconds"] > 0


def test_a_simulated_cluster_has_as_many_gpus_as_it_says() -> None:
    found = simulated_cluster(12, kinds=3, blocks=6)
    assert (found["gpus"], found["workers"], found["calls"]) == (12, 12, 48)
    assert found["seconds"] >= found["slowest_solve_seconds"] > 0


def test_the_simulated_profile_is_the_engine_models() -> None:
    from benchmarks.model import FULL, Stack, weight_bytes

    with torch.device("meta"):
        assert simulated_profile().total_bytes == pytest.approx(weight_bytes(Stack(FULL)), rel=0.06)


def test_workers_are_counted_by_doubling() -> None:
    assert [counts_up_to(n) for n in (1, 2, 3, 4, 8)] == [[1], [1, 2], [1, 2, 3], [1, 2, 4], [1, 2, 4, 8]]


def test_an_answer_that_differs_is_named() -> None:
    answers = [{"id": "a", "seed": 0, "digest": "x"}, {"id": "b", "seed": 1, "digest": "y"}]
    assert different(answers, {0: "x", 1: "z"}) == ["b"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device to measure")
def test_peer_skips_with_a_reason_without_a_gpu(tmp_path: Path) -> None:
    assert peer.main(["--tiny", "--output", str(tmp_path)]) == 0
    assert json.loads((tmp_path / "peer-tiny.json").read_text())["status"].startswith("no CUDA device")
    assert "Not measured: no CUDA device" in (tmp_path / "peer-tiny.md").read_text()
