"""Text to video: the offloaded pipeline gives diffusers' own frames, and files that outlive a failure."""

from __future__ import annotations

import importlib.util
import json
import logging
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import flextensor
from cluster.messages import Lease, WorkerStart
from cluster.whole_files import file_stem
from cluster.worker import Worker
from flextensor import registry
from launch import wan_t2v
from launch.model_files import TaskInputError
from launch.video_files import write_preview, write_video
from launch.wan_checkpoint import CastingSource, read_parts, read_whole
from launch.wan_files import read_index
from launch.wan_maker import digest
from launch.wan_t2v import WanT2VTask
from launch.wan_tiny import tiny_parts, whole_pipeline
from tests.launch.wan import BUDGET, ITEMS, SIZES, context, diffusers_frames, loaded, managers, save_checkpoint

pytest.importorskip("diffusers")


@pytest.fixture
def namespace() -> str:
    return f"test-{uuid.uuid4().hex[:12]}"


@pytest.fixture(autouse=True)
def managers_end() -> Iterator[None]:
    yield
    for name in registry.names():
        flextensor.release(name)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("wan"))


def test_frames_are_those_of_diffusers_own_pipeline_while_all_three_models_stream(
    namespace: str, tmp_path: Path
) -> None:
    task = loaded(namespace, tmp_path)
    first, second, text = managers("w0", "w0-2", "w0-text")
    before = [manager.live().copied_bytes_total for manager in (first, second, text)]
    results = task.run(ITEMS)
    whole = whole_pipeline(tiny_parts())
    for item, result in zip(ITEMS, results, strict=True):
        assert result["frames_sha256"] == digest(diffusers_frames(whole, item, result["seed"]))
    assert results[0]["seed"] == 3 and results[0]["frames_sha256"] != results[1]["frames_sha256"]
    for manager, copied in zip((first, second, text), before, strict=True):
        assert manager.live().copied_bytes_total > copied and manager.live().unforeseen_visits == 0
    for manager in (first, second):
        assert manager.profile is not None and manager.plan is not None
        assert manager.plan.weight_bytes + manager.profile.other_bytes <= BUDGET < manager.profile.total_bytes
    assert task.verify(ITEMS, results) == {"checked": 2, "identical": 2, "different": []}


def test_each_item_has_a_video_a_preview_and_no_leftovers(namespace: str, tmp_path: Path) -> None:
    task = loaded(namespace, tmp_path, format="gif")
    for result in task.run(ITEMS):
        with Image.open(result["video"]) as video:
            assert (video.n_frames, video.size) == (SIZES["frames"], (SIZES["width"], SIZES["height"]))
        with Image.open(result["preview"]) as preview:
            assert preview.size == (SIZES["width"], SIZES["height"])
        assert result["frames"] == SIZES["frames"]
        json.dumps(result)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cat.gif", "cat.png", "dog.gif", "dog.png"]
    described = task.describe()
    json.dumps(described)
    assert set(described["managers"]) == {"w0", "w0-2", "w0-text"}


def test_an_item_gives_the_same_video_alone_and_in_another_order(namespace: str, tmp_path: Path) -> None:
    task = loaded(namespace, tmp_path)
    together = {result["id"]: result["latents_sha256"] for result in task.run(ITEMS)}
    for item in reversed(ITEMS):
        (result,) = task.run([item])
        assert result["latents_sha256"] == together[item["id"]]


def test_verify_names_the_items_whose_frames_differ(namespace: str, tmp_path: Path) -> None:
    task = loaded(namespace, tmp_path)
    results = task.run(ITEMS)
    results[1]["frames_sha256"] = results[0]["frames_sha256"]
    assert task.verify(ITEMS, results) == {"checked": 2, "identical": 1, "different": ["dog"]}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_checkpoint_is_built_on_meta_as_diffusers_loads_it(checkpoint: Path, dtype: str) -> None:
    index = read_index(checkpoint)
    parts = read_parts(index, getattr(torch, dtype))
    whole = read_whole(index, getattr(torch, dtype))
    for name, model in parts.transformers.items():
        theirs = getattr(whole, name)
        wanted = {key: (value.dtype, value.shape) for key, value in theirs.named_parameters()}
        assert {key: (value.dtype, value.shape) for key, value in model.named_parameters()} == wanted
        assert all(parameter.is_meta for parameter in model.parameters())
        for (_, ours), (key, buffer) in zip(model.named_buffers(), theirs.named_buffers(), strict=True):
            assert torch.equal(ours, buffer), key
        assert isinstance(parts.sources[name], CastingSource)
    assert {p.dtype for p in whole.transformer.parameters()} == (
        {torch.float32} if dtype == "float32" else {torch.float32, torch.bfloat16}
    )
    ids = torch.tensor([[5, 9, 1]])
    assert torch.equal(parts.text_encoder.get_input_embeddings()(ids), whole.text_encoder.get_input_embeddings()(ids))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_checkpoint_streams_from_its_files_to_the_frames_that_diffusers_makes_of_it(
    checkpoint: Path, namespace: str, tmp_path: Path, dtype: str
) -> None:
    budget = BUDGET if dtype == "float32" else 900_000
    task = loaded(namespace, tmp_path, model=str(checkpoint), dtype=dtype, settings={"budget_bytes": budget})
    results = task.run(ITEMS)
    whole = read_whole(read_index(checkpoint), getattr(torch, dtype))
    for item, result in zip(ITEMS, results, strict=True):
        assert result["frames_sha256"] == digest(diffusers_frames(whole, item, result["seed"]))
    (first,) = managers("w0")
    assert first.plan is not None and first.plan.streamed_bytes > 0
    assert first.hosting.store.shared and task.describe()["model"] == checkpoint.name
    assert task.verify(ITEMS, results)["identical"] == 2


def test_a_checkpoint_with_one_transformer_has_one_manager_for_it(namespace: str, tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path / "one", stages=1)
    task = loaded(namespace, tmp_path / "out", model=str(folder))
    (result,) = task.run(ITEMS[:1])
    assert sorted(registry.names()) == ["w0", "w0-text"]
    assert result["frames_sha256"] == digest(diffusers_frames(read_whole(task.index, torch.float32), ITEMS[0], 3))  # type: ignore[arg-type]


def test_two_workers_share_one_copy_of_each_model(namespace: str, checkpoint: Path, tmp_path: Path) -> None:
    for name in ("w0", "w1"):
        WanT2VTask({**SIZES, "model": str(checkpoint), "output_dir": str(tmp_path)}).load(context(namespace, name))
    assert len([path for path in Path("/dev/shm").iterdir() if namespace in path.name]) == 3
    for name in registry.names():
        flextensor.release(name)
    assert not [path for path in Path("/dev/shm").iterdir() if namespace in path.name]


def test_close_leaves_only_the_workers_own_manager(namespace: str, tmp_path: Path) -> None:
    task = loaded(namespace, tmp_path)
    task.close()
    assert list(registry.names()) == ["w0"]


def test_a_replan_of_the_worker_reaches_both_transformers(namespace: str, tmp_path: Path) -> None:
    start = WorkerStart(
        namespace="unit",
        rank=0,
        workers=1,
        device="host",
        config=context(namespace).config,
        task="launch.wan_t2v:WanT2VTask",
        task_options={"tiny": True, **SIZES, "output_dir": str(tmp_path)},
        budget=BUDGET,
        store_namespace=namespace,
    )
    worker = Worker(start)
    worker.setup(tuple(ITEMS))
    try:
        first, second, text = managers("worker-0", "worker-0-2", "worker-0-text")
        (want,) = worker.run(Lease(0, (ITEMS[0],))).results
        before = {m.name: (m.plan.streamed_bytes, m.plan.budget_bytes) for m in (first, second, text) if m.plan}
        proposal = worker.propose(1, 2_600_000, None, None)
        worker.prepare(1, 2, proposal.plans, 2_600_000, 1.0)
        worker.commit(1)
        (got,) = worker.run(Lease(1, (ITEMS[0],))).results
        assert got["frames_sha256"] == want["frames_sha256"]
        for manager in (first, second):
            assert manager.plan is not None and manager.epoch == 2
            assert 0 < manager.plan.streamed_bytes < before[manager.name][0]
        assert text.plan is not None and text.epoch == 2 and text.plan.budget_bytes == before[text.name][1]
    finally:
        worker.close()


def test_an_item_whose_decoding_failed_starts_from_its_latents(
    namespace: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = loaded(namespace, tmp_path)
    want = task.run(ITEMS[:1])
    assert task._maker is not None
    decode = task._maker.decode
    monkeypatch.setattr(task._maker, "decode", _fails)
    with pytest.raises(torch.OutOfMemoryError):
        task.run(ITEMS[:1])
    assert (tmp_path / "cat.latents.safetensors").is_file()
    monkeypatch.setattr(task._maker, "decode", decode)
    (first,) = managers("w0")
    steps = first.live().steps
    with caplog.at_level(logging.INFO, "launch.wan_latents"):
        got = task.run(ITEMS[:1])
    assert first.live().steps == steps, "nothing was denoised"
    assert got[0] | {"seconds": 0} == want[0] | {"seconds": 0} and "denoised before" in caplog.text
    assert not (tmp_path / "cat.latents.safetensors").exists()
    # Those of another request are not taken.
    monkeypatch.setattr(task._maker, "decode", _fails)
    with pytest.raises(torch.OutOfMemoryError):
        task.run(ITEMS[:1])
    monkeypatch.setattr(task._maker, "decode", decode)
    (other,) = task.run([{**ITEMS[0], "seed": 4}])
    assert other["latents_sha256"] != want[0]["latents_sha256"] and first.live().steps > steps


def _fails(*_: Any) -> Any:
    raise torch.OutOfMemoryError("no room to decode")


def test_a_full_disk_is_the_items_error_and_its_latents_stay(
    namespace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    task = loaded(namespace, tmp_path)
    monkeypatch.setattr(wan_t2v, "write_video", full)
    (result,) = task.run(ITEMS[:1])
    assert "No space left" in result["error"] and str(tmp_path) in result["error"]
    assert (tmp_path / "cat.latents.safetensors").is_file()


def test_an_item_that_is_none_costs_no_other(namespace: str, tmp_path: Path) -> None:
    task = loaded(namespace, tmp_path)
    bad = [
        {"id": "chat", "messages": [{"role": "user", "content": "hi"}]},
        {"id": "seed", "prompt": "x", "seed": "three"},
        {"id": "minus", "prompt": "x", "seed": -1},
        {"id": "negative", "prompt": "x", "negative_prompt": 3},
    ]
    results = {result["id"]: result for result in task.run([*bad, ITEMS[0]])}
    assert "needs a 'prompt'" in results["chat"]["error"] and "seed = 'three'" in results["seed"]["error"]
    assert "seed = -1" in results["minus"]["error"] and "negative_prompt = 3" in results["negative"]["error"]
    assert "error" not in results["cat"]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"hight": 64}, "unknown task option 'hight'; did you mean 'height'?"),
        ({"height": 100}, "height = 100; use a whole number, a multiple of 16"),
        ({"frames": 80}, "frames = 80; use a whole number, a multiple of 4, plus 1"),
        ({"steps": True}, "steps = True"),
        ({"guidance": "high"}, "guidance = 'high'; use a number"),
        ({"dtype": "int8"}, "dtype = 'int8'; use one of auto, float32, bfloat16"),
        ({"format": "avi"}, "format = 'avi'; use one of auto, mp4, webp, gif"),
        ({"compile": "yes"}, "compile = 'yes'; use one of none, compile_fn, external"),
        ({"compile_backend": "inductr"}, "compile_backend = 'inductr'; use one of"),
        ({"compile_mode": "fast"}, "compile_mode = 'fast'; use one of"),
        ({"tiny": "no"}, "tiny = 'no'; use true or false"),
        ({"tiny": False}, "'model' is missing"),
        ({"tiny": False, "model": "/no/such"}, "/no/such does not exist"),
    ],
)
def test_wrong_options_are_one_line_before_anything_is_loaded(options: dict[str, Any], says: str) -> None:
    with pytest.raises(TaskInputError) as caught:
        WanT2VTask({"tiny": True, **options})
    assert says in str(caught.value) and "\n" not in str(caught.value)


def test_a_directory_that_is_no_wan_checkpoint_is_named(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "model_index.json").write_text('{"_class_name": "FluxPipeline"}')
    with pytest.raises(TaskInputError, match="is a FluxPipeline"):
        WanT2VTask({"model": str(tmp_path)})
    (tmp_path / "model_index.json").write_text((checkpoint / "model_index.json").read_text())
    with pytest.raises(TaskInputError, match="text_encoder does not exist"):
        WanT2VTask({"model": str(tmp_path)})


def test_videos_are_whole_when_they_appear_and_names_are_plain(tmp_path: Path) -> None:
    frames = np.random.default_rng(0).integers(0, 255, (5, 32, 48, 3), dtype=np.uint8)
    write_preview(frames, tmp_path / "x.png")
    with Image.open(tmp_path / "x.png") as preview:
        assert np.array_equal(np.asarray(preview), frames[2])
    for suffix in (".gif", ".webp"):
        write_video(frames, tmp_path / f"x{suffix}", fps=10)
        with Image.open(tmp_path / f"x{suffix}") as video:
            assert video.n_frames == 5
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x.gif", "x.png", "x.webp"]
    assert file_stem("plain-1.a") == "plain-1.a"
    stems = {file_stem(key) for key in ("a/b", "a b", "../a", "ä", "a" * 200, "")}
    assert len(stems) == 6 and all("/" not in stem and not stem.startswith(".") for stem in stems)


def test_without_diffusers_the_task_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(TaskInputError, match=r"need diffusers and PIL: pip install 'flextensor-ray\[diffusers\]'"):
        WanT2VTask({"tiny": True})
