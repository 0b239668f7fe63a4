"""An offloaded model as a stage of a Ray Data pipeline."""

from __future__ import annotations

import gc
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cluster.ray_data import OffloadedModel, map_offloaded
from cluster.task import TaskError
from flextensor.config import ConfigError
from tests.cluster.conftest import TINY, TINY_BYTES, TINY_OPTIONS


def settings(namespace: str) -> dict[str, Any]:
    config = {"host_link_bytes_per_second": 1e9, "shm_namespace": namespace}
    return {"task": TINY, "task_options": TINY_OPTIONS, "config": config, "budget": "50%", "device": "host"}


def test_a_batch_of_columns_gets_the_results_beside_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    from tiny_task import expected

    import flextensor
    from flextensor import registry

    stage = OffloadedModel(**settings("ray-data-here"))
    name = stage._name
    try:
        items = [{"id": f"i{k}", "steps": k + 1} for k in range(4)]
        batch = {"id": np.array([item["id"] for item in items]), "steps": np.array([item["steps"] for item in items])}
        for _ in range(2):
            out = stage(batch)
        assert dict(zip(out["id"].tolist(), out["text"].tolist(), strict=True)) == expected(items, TINY_OPTIONS)
        assert out["steps"].tolist() == out["tokens"].tolist() == [1, 2, 3, 4]
        manager = flextensor.get_offload_manager(name)
        assert manager.plan is not None and manager.plan.streamed_bytes > 0
        assert manager.plan.weight_bytes <= TINY_BYTES / 2
    finally:
        del stage
        gc.collect()
    assert name not in registry.names(), "who is let go of gives everything back"
    assert not [path for path in Path("/dev/shm").iterdir() if "ray-data-here" in path.name]


def test_without_ray_data_one_line_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(TaskError, match=r"pip install 'flextensor-ray\[data\]'"):
        map_offloaded(object(), workers=1)
    with pytest.raises(ConfigError, match="give model and run, or a task"):
        OffloadedModel()


@pytest.mark.ray
@pytest.mark.xdist_group("ray")
def test_a_dataset_goes_through_two_workers_that_stream(local_ray: str) -> None:
    pytest.importorskip("pandas")
    pytest.importorskip("pyarrow")
    import ray
    from tiny_task import expected

    ray.data.DataContext.get_current().enable_progress_bars = False
    items = [{"id": f"i{k}", "steps": 2} for k in range(24)]
    dataset = map_offloaded(ray.data.from_items(items), workers=2, batch_size=4, **settings("ray-data-stage"))
    rows = dataset.take_all()
    assert {row["id"]: row["text"] for row in rows} == expected(items, TINY_OPTIONS)
    assert len({row["pid"] for row in rows}) <= 2
