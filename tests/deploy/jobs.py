"""Jobs of the tiny task, as files that commands take, and what they leave."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

OPTIONS = {"units": 6, "width": 128}
TOTAL_BYTES = 6 * (128 * 128 + 128) * 4


def deployment() -> list[pytest.MarkDecorator]:
    """The marks of a deployment's tests: one after another in a process."""
    mark = pytest.mark
    return [mark.deploy, mark.xdist_group("deploy"), mark.slow, mark.ray, mark.timeout(1800)]


@dataclass(frozen=True)
class Job:
    """A config file, and the items behind it."""

    config: Path
    output: Path
    items: list[dict[str, Any]]
    haste: Path

    def hurry(self) -> None:
        """What was to come in the middle has come: the steps that are left take no longer than they must."""
        self.haste.touch()

    @property
    def lines(self) -> list[dict[str, Any]]:
        """What is in the output now."""
        text = self.output.read_text() if self.output.exists() else ""
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]

    @property
    def pids(self) -> set[int]:
        """The worker processes that the answers come from."""
        return {line["pid"] for line in self.lines}

    @property
    def events(self) -> list[dict[str, Any]]:
        """The run's event log."""
        path = self.output.with_name(self.output.stem + ".events.jsonl")
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def assert_complete(self) -> None:
        """Each item once, and every answer the un-offloaded model's, bit for bit."""
        from tests.cluster.tiny_task import expected

        lines = self.lines
        assert sorted(line["id"] for line in lines) == sorted(item["id"] for item in self.items)
        want = expected(self.items, OPTIONS)
        assert {line["id"]: line.get("text", line.get("error")) for line in lines} == want

    def replans(self) -> list[dict[str, Any]]:
        """The rounds that moved all workers."""
        return [event for event in self.events if event["event"] == "replanned"]


def write_job(folder: Path, name: str, *, items: int = 400, seconds: float = 1.0, **settings: Any) -> Job:
    """``items`` items of 4 slow steps each; ``seconds``: the least that a step takes until the job is to hurry.

    However long the commands of a test take, the job outlasts them: a quarter of an hour with two workers.
    """
    haste = folder / f"{name}.haste"
    slow = {"prompt": "-", "steps": 4, "seconds": seconds, "hurry": str(haste)}
    entries = [{"id": f"{name}-{k}"} | slow for k in range(items)]
    prompts = folder / f"{name}.prompts.jsonl"
    prompts.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    output = folder / f"{name}.jsonl"
    config = folder / f"{name}.yaml"
    data = {
        "model": str(folder),
        "prompts": str(prompts),
        "output": str(output),
        "report": str(folder / f"{name}.report.json"),
        "task": "tiny_task:TinyTask",
        "task_options": OPTIONS,
        "namespace": name,
        "batch_size": 2,
        "workers": 2,
        "budget": "50%",
        "coordinator": {"automatic": False},
        "offload": {"host_link_bytes_per_second": 1_000_000_000, "shm_namespace": name},
        **settings,
    }
    config.write_text(yaml.safe_dump(data))
    return Job(config, output, entries, haste)


def wait_for(what: str, condition: Callable[[], Any], *, timeout: float = 600) -> None:
    """Wait until it is true; ``what`` is in the error."""
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout} s: {what}"
        time.sleep(0.1)
