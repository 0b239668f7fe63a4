"""What people get wrong: one clear line on stderr, exit code 2, nothing lost, Ray never started."""

from __future__ import annotations

import pickle
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import typer
from typer.testing import CliRunner

from cluster.pool import NoWorkers
from flextensor.store import StoreSpaceError
from launch.cli import app
from launch.errors import clear_errors
from tests.launch.conftest import ROOT, Job


def refused(*arguments: str) -> str:
    """The one line on stderr of a command that must end with code 2."""
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == 2, result.output
    lines = result.stderr.strip().splitlines()
    assert len(lines) == 1, lines
    return lines[0]


def test_a_store_without_room_says_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    """A worker's error, as it comes from the worker."""
    error = pickle.loads(pickle.dumps(StoreSpaceError("512 bytes are needed, 64 are free: --shm-size=1g", 512, 64)))
    with pytest.raises(typer.Exit) as caught, clear_errors():
        raise NoWorkers("no worker is left; the last one failed", error)
    assert caught.value.exit_code == 2
    assert capsys.readouterr().err == "flextensor: 512 bytes are needed, 64 are free: --shm-size=1g\n"


def test_a_model_directory_that_is_not_there(make_job: Callable[..., Job], tmp_path: Path) -> None:
    job = make_job(model=tmp_path / "nowhere")
    assert "nowhere" in refused("generate", "--config", str(job.config))
    assert not job.output.exists()


def test_a_model_directory_without_safetensors(make_job: Callable[..., Job], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").touch()
    job = make_job(model=tmp_path)
    line = refused("generate", "--config", str(job.config))
    assert "no safetensors" in line and "pytorch_model.bin" in line


def test_an_unknown_key_names_the_nearest(make_job: Callable[..., Job]) -> None:
    job = make_job()
    assert "did you mean 'batch_size'" in refused("generate", "--config", str(job.config), "--set", "batchsize=3")
    assert "did you mean 'min_blocks'" in refused(
        "generate", "--config", str(job.config), "--set", "offload.min_block=3"
    )


def test_a_cluster_that_does_not_answer(make_job: Callable[..., Job]) -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{nobody.getsockname()[1]}"
        line = refused("generate", "--config", str(make_job().config), "--address", address)
    assert address in line and "--address" in line


def test_coordinator_settings_are_checked(make_job: Callable[..., Job]) -> None:
    config = str(make_job().config)
    line = refused("generate", "--config", config, "--set", "coordinator.automatc=true")
    assert "did you mean 'automatic'" in line
    assert "hang" in refused("generate", "--config", config, "--set", "coordinator.hang=-1")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cuda_where_there_is_none(make_job: Callable[..., Job]) -> None:
    assert "no CUDA device" in refused("generate", "--config", str(make_job().config), "--device", "cuda")


def test_prompts_that_are_not_there(make_job: Callable[..., Job], tmp_path: Path) -> None:
    line = refused("generate", "--config", str(make_job().config), "--prompts", str(tmp_path / "none.jsonl"))
    assert "none.jsonl" in line


def test_an_output_that_is_someone_elses(make_job: Callable[..., Job]) -> None:
    job = make_job()
    job.output.write_text("my notes\n")
    assert "line 1" in refused("generate", "--config", str(job.config))
    assert job.output.read_text() == "my notes\n"


def test_a_task_that_cannot_be_found(make_job: Callable[..., Job]) -> None:
    assert "no_such_module" in refused("generate", "--config", str(make_job(task="no_such_module:Task").config))


@pytest.mark.parametrize("budget", ["120%", "6 parsecs", "-1"])
def test_a_budget_that_is_none(make_job: Callable[..., Job], budget: str) -> None:
    assert budget in refused("generate", "--config", str(make_job().config), f"--budget={budget}")
    assert "refused" not in refused("replan", f"--budget={budget}")


@pytest.mark.parametrize("size", ["many", "0", "-3", "2.5"])
def test_a_batch_size_that_is_none(make_job: Callable[..., Job], size: str) -> None:
    line = refused("generate", "--config", str(make_job().config), f"--batch-size={size}")
    assert "batch_size" in line and size in line and "'auto' or a whole number" in line


def test_a_batch_size_that_cannot_be_tried(make_job: Callable[..., Job]) -> None:
    job = make_job(batch_size="auto", task_options={"batch_size": 2})
    assert "task option batch_size" in refused("generate", "--config", str(job.config))
    pytest.importorskip("diffusers")
    video = str(ROOT / "configs" / "wan-t2v-compiled.yaml")
    line = refused("generate", "--config", video, "--tiny", "--batch-size", "auto", "--device", "host")
    assert "batch_size auto: task launch.wan_t2v:WanT2VTask cannot be tried at several sizes; give a number" in line


def test_checkpoints_without_a_time(make_job: Callable[..., Job]) -> None:
    assert "checkpoint_seconds" in refused("generate", "--config", str(make_job(checkpoint_seconds=0).config))


def test_a_kept_batch_size_that_is_spoilt(make_job: Callable[..., Job]) -> None:
    job = make_job(batch_size="auto")
    kept = job.output.with_name("answers.batch-size.json")
    kept.write_text("{")
    line = refused("generate", "--config", str(job.config))
    assert str(kept) in line and "--overwrite" in line


def test_commands_without_a_run_say_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    for command in ("status", "replan", "rollback", "pause", "resume"):
        assert "no run" in refused(command)
    assert "0,2" in refused("replan", "--workers", "zero")
