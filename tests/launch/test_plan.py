"""``flextensor plan``: what it says of a model from its headers, or from a saved profile."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
from safetensors.numpy import save_file
from typer.testing import CliRunner

from flextensor.profile import Profile, StepKind, TensorInfo, TransferCurve, UnitInfo
from launch.estimate import Machine, estimate_profile, parse_flops
from launch.plan import plan

app = typer.Typer(pretty_exceptions_enable=False)
app.command()(plan)
BLOCKS, WIDTH = 6, 768
MACHINE = ["--link", "1GB/s", "--flops", "1TFLOPS", "--memory-bandwidth", "100GB/s", "--device-memory", "1GiB"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six blocks of two float32 matrices, an embedding tied to the head, a final norm."""
    folder = tmp_path_factory.mktemp("plan") / "model"
    folder.mkdir()
    tensors: dict[str, Any] = {"model.embed_tokens.weight": np.zeros((1000, WIDTH), np.float32)}
    for block in range(BLOCKS):
        for name in ("up", "down"):
            tensors[f"model.layers.{block}.mlp.{name}.weight"] = np.zeros((WIDTH, WIDTH), np.float32)
        tensors[f"model.layers.{block}.norm.weight"] = np.zeros(WIDTH, np.float32)
    tensors["model.norm.weight"] = np.zeros(WIDTH, np.float32)
    save_file(tensors, folder / "model.safetensors")
    config = {"hidden_size": WIDTH, "num_hidden_layers": BLOCKS, "vocab_size": 1000, "tie_word_embeddings": True}
    (folder / "config.json").write_text(json.dumps({**config, "num_attention_heads": 4, "intermediate_size": WIDTH}))
    return folder


def ask(*arguments: str | Path) -> Any:
    """The command's result."""
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_blocks_become_units_and_the_rest_stays_resident(model: Path) -> None:
    machine = Machine(flops=1e12, link=1e9, memory_bandwidth=1e11)
    profile = estimate_profile(model, machine, tokens=512)
    assert [unit.name for unit in profile.units] == [f"model.layers.{b}" for b in range(BLOCKS)]
    resident = {t.name for t in profile.tensors if t.keep_resident}
    assert resident == {"model.embed_tokens.weight", "model.norm.weight"} | {
        f"model.layers.{b}.norm.weight" for b in range(BLOCKS)
    }
    assert profile.kinds[0].compute[0] == pytest.approx(2 * 2 * WIDTH * WIDTH * 512 / 1e12)
    assert profile.kinds[0].gap[0] == pytest.approx(2 * 1000 * WIDTH * 512 / 1e12)
    one = estimate_profile(model, machine, tokens=1, dtype="bfloat16")
    assert one.kinds[0].compute[0] == pytest.approx((2 * WIDTH * WIDTH + WIDTH) * 2 / 1e11)
    assert one.total_bytes == profile.total_bytes // 2


def test_experts_count_by_the_share_that_a_token_takes(tmp_path: Path) -> None:
    tensors = {f"layers.{b}.experts.{e}.w": np.zeros((512, 512), np.float32) for b in range(2) for e in range(8)}
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"num_local_experts": 8, "num_experts_per_tok": 2}))
    profile = estimate_profile(tmp_path, Machine(1e12, 1e9, 1e15), tokens=100)
    assert profile.kinds[0].compute[0] == pytest.approx(2 * 2 * 512 * 512 * 100 / 1e12)


def test_the_json_says_step_stall_residency_and_host_memory(model: Path) -> None:
    result = ask("--model", model, *MACHINE, "--tokens", "512", "--budget", "50%", "--json")
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    best = told["plans"][0]
    assert best["weight_bytes"] <= told["room_bytes"] == told["weights_bytes"] // 2
    assert best["streamed_bytes"] > 0 and best["host_bytes"] == told["weights_bytes"]
    assert best["step_seconds"] >= best["floor_seconds"] >= max(told["resident_step_seconds"].values())
    assert told["compute"] == "estimated"
    steps = [point["step_seconds"] for point in told["curve"]]
    budgets = [point["budget_bytes"] for point in told["curve"]]
    assert budgets == sorted(budgets) and steps[0] > steps[-1] == min(steps)
    assert told["curve"][-1]["streamed_bytes"] == 0


def test_the_table_says_that_times_are_estimated(model: Path) -> None:
    result = ask("--model", model, *MACHINE, "--tokens", "512", "--budget", "9MB")
    assert result.exit_code == 0, result.output
    for words in ("estimated from FLOPs", "host memory, pinned", "of that stalled", "Over budgets", "█"):
        assert words in result.stdout


def test_a_saved_profile_replaces_estimates_and_a_link_scales_its_curve(tmp_path: Path) -> None:
    tensors = tuple(TensorInfo(f"t{i}", 1 << 20, i << 20) for i in range(6))
    units = tuple(UnitInfo(f"u{i}", (i,)) for i in range(6))
    kind = StepKind("prefill", (0.0,) * 6, (0.0,) * 6, (0.0,) * 6)
    link = TransferCurve.from_bandwidth(1e9, 0.0)
    Profile(tensors, units, tuple(range(6)), (kind,), link, device="H200").save(tmp_path / "p.json")
    budget = ("--budget", str(3 << 20), "--json")
    slow = json.loads(ask("--profile", tmp_path / "p.json", *budget).stdout)
    fast = json.loads(ask("--profile", tmp_path / "p.json", "--link", "2GB/s", *budget).stdout)
    assert slow["compute"] == "measured"
    assert slow["plans"][0]["step_seconds"] == pytest.approx(2 * fast["plans"][0]["step_seconds"], rel=1e-3)


def test_a_picture_is_drawn(model: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "new" / "curve.png"
    assert ask("--model", model, *MACHINE, "--budget", "50%", "--png", picture).exit_code == 0
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--model", "/no/such/model"], "does not exist"),
        ([], "--model DIR"),
        (["--profile", "/no/such/profile.json"], "does not exist"),
        (["--model", "MODEL", "--budget", "1MB"], "at least"),
        (["--model", "MODEL", "--link", "fast"], "not a size"),
        (["--model", "MODEL", "--link", "0GB/s"], "above 0"),
        (["--model", "MODEL", "--flops", "many"], "not a compute rate"),
        (["--model", "MODEL", "--dtype", "int3"], "dtype 'int3'"),
        (["--model", "MODEL", "--device-memory", "1kB"], "beside the weights"),
    ],
)
def test_what_cannot_be_planned_is_one_line_and_exit_code_2(
    model: Path, arguments: list[str], words: str, capfd: pytest.CaptureFixture[str]
) -> None:
    result = ask(*[str(model) if argument == "MODEL" else argument for argument in arguments])
    assert result.exit_code == 2
    told = (result.stderr + capfd.readouterr().err).strip()
    assert words in told and len(told.splitlines()) == 1


def test_a_directory_without_safetensors_or_blocks_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert ask("--model", tmp_path).exit_code == 2
    save_file({"weight": np.zeros(4, np.float32)}, tmp_path / "model.safetensors")
    result = ask("--model", tmp_path)
    assert result.exit_code == 2 and "no repeated blocks" in result.stderr


def test_rates_are_parsed() -> None:
    assert parse_flops("150TFLOPS") == 150e12 and parse_flops("1.5 PFLOP/s") == 1.5e15
