"""A small model on disk, prompts, and the command line as people start it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cluster.conftest import local_ray as local_ray

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six Llama blocks with random weights, 6 MB."""
    from tests.launch.tiny_causal_lm import llama_config, save_model

    config = llama_config(num_hidden_layers=6, hidden_size=128, intermediate_size=512)
    return save_model(tmp_path_factory.mktemp("model"), config)


class Job:
    """A config file with its prompts in a folder of its own, and how to start commands on it."""

    def __init__(self, folder: Path, model: Path, *, items: int, lines: list[str] = [], **settings: Any) -> None:  # noqa: B006
        self.output = folder / "answers.jsonl"
        self.report = folder / "report.json"
        self.config = folder / "run.yaml"
        self.ids = [f"item-{k}" for k in range(items)]
        self.processes: list[subprocess.Popen[str]] = []
        prompts = [json.dumps({"id": key, "prompt": "word " * (k % 5) + key}) for k, key in enumerate(self.ids)]
        (folder / "prompts.jsonl").write_text("\n".join([*prompts[:3], *lines, *prompts[3:]]) + "\n")
        written = {
            "model": str(model),
            "prompts": str(folder / "prompts.jsonl"),
            "output": str(self.output),
            "report": str(self.report),
            "workers": 2,
            "device": "host",
            "budget": "50%",
            "batch_size": 3,
            "coordinator": {"automatic": False},
            "task_options": {"dtype": "float32", "max_new_tokens": 24},
            "offload": {
                "include_patterns": ["model.layers.*"],
                "host_link_bytes_per_second": "1GB/s",
                "resident_below_bytes": 4096,
                "shm_namespace": "launch-tests",
            },
        }
        for key, value in settings.items():
            written[key] = {**written[key], **value} if isinstance(value, dict) else value  # type: ignore[dict-item]
        self.config.write_text(yaml.safe_dump(written))

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        """``generate`` in a process of its own."""
        self.processes.append(start_command("generate", "--config", str(self.config), *arguments))
        return self.processes[-1]

    def end(self) -> None:
        """What still runs of a test that failed: it would keep its GPUs from the others'."""
        for process in self.processes:
            if process.poll() is None:
                process.terminate()
                end_of(process)

    def answers(self) -> dict[str, dict[str, Any]]:
        """The output by id; every line is whole and no id is there twice."""
        lines = [json.loads(line) for line in self.output.read_text().splitlines()]
        by_id = {line["id"]: line for line in lines}
        assert len(by_id) == len(lines)
        return by_id


def start_command(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "launch", *arguments],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def end_of(process: subprocess.Popen[str], *, timeout: float = 400) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a command."""
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
        raise AssertionError(f"still running after {timeout} s; stdout: {out}; stderr: {err}") from None
    return process.returncode, out, err


@pytest.fixture
def make_job(tmp_path: Path, small_model: Path) -> Iterator[Callable[..., Job]]:
    made: list[Job] = []

    def make(**settings: Any) -> Job:
        folder = tmp_path / f"job-{len(made)}"
        folder.mkdir()
        made.append(Job(folder, settings.pop("model", small_model), items=settings.pop("items", 6), **settings))
        return made[-1]

    yield make
    for job in made:
        job.end()
