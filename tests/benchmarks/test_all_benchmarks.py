"""``python -m benchmarks``: one after another, and what happens to one that hangs."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from benchmarks.__main__ import command, finish, main, runs
from benchmarks.record import ROOT

HANGS = """
import signal, subprocess, time
signal.signal(signal.SIGINT, signal.default_int_handler)
print(subprocess.Popen(["sleep", "600"]).pid, flush=True)
time.sleep(600)
"""


def test_one_that_runs_past_its_limit_ends_with_all_that_it_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.__main__.GRACE", 120.0)
    process = subprocess.Popen([sys.executable, "-c", HANGS], start_new_session=True, stdout=subprocess.PIPE)
    assert process.stdout is not None
    child = psutil.Process(int(process.stdout.readline()))
    assert finish(process, 0.1) == "ran past 0 s"
    assert process.returncode == -signal.SIGINT, "asked to end, it did: no need to kill it"
    child.wait(120)


def test_how_one_ends_is_told() -> None:
    for code, told in ((0, ""), (3, "exit code 3")):
        process = subprocess.Popen([sys.executable, "-c", f"raise SystemExit({code})"], start_new_session=True)
        assert finish(process, 120) == told


@pytest.mark.parametrize("gpus", [0, 1, 4])
def test_each_command_names_a_benchmark_that_exists(gpus: int) -> None:
    for run in runs(gpus, tiny=False):
        assert run.gpus <= gpus and run.limit > 0
        assert (ROOT / "benchmarks" / f"{run.name}.py").is_file()
        assert command(run, Path("out"))[-1] == "out"


def test_an_unknown_name_is_told_with_those_that_exist(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--only", "motor"])
    assert ended.value.code == 2
    assert "'motor'" in capsys.readouterr().err


@pytest.mark.slow
def test_a_tiny_run_writes_its_results(tmp_path: Path) -> None:
    assert main(["--tiny", "--only", "engine", "--output", str(tmp_path)]) == 0
    assert json.loads((tmp_path / "engine-tiny.json").read_text())
