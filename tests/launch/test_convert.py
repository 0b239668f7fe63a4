"""The demo's model: made once from its package, whole or not at all, and it answers."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from launch.convert import convert_gguf, is_model, main, package_folder, prepare_demo_model
from launch.model_files import TaskInputError, stored_tensors

ROOT = Path(__file__).parents[2]
QUESTION = "What is the capital of France? Answer in one sentence."


@pytest.mark.xdist_group("smollm2")
def test_the_converted_model_answers_with_its_chat_template(converted: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(converted)
    model = AutoModelForCausalLM.from_pretrained(converted, dtype=torch.float32)
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": QUESTION}], tokenize=False, add_generation_prompt=True
    )
    assert text.endswith(f"<|im_start|>user\n{QUESTION}<|im_end|>\n<|im_start|>assistant\n")
    inputs = tokenizer(text, return_tensors="pt", add_special_tokens=False)
    output = model.generate(**inputs, do_sample=False, max_new_tokens=24)
    answer = tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    assert answer == "The capital of France is Paris."


@pytest.mark.xdist_group("smollm2")
def test_each_weight_is_written_once_in_float32_and_nothing_lies_beside(converted: Path) -> None:
    stored = stored_tensors(converted)
    assert {tensor.dtype for tensor in stored.values()} == {"F32"}
    assert sum(tensor.nbytes for tensor in stored.values()) == 134_515_008 * 4
    assert "model.embed_tokens.weight" in stored and "lm_head.weight" not in stored
    assert [file.name for file in converted.parent.iterdir()] == ["SmolLM2"]
    gguf = pytest.importorskip("gguf")
    assert isinstance(gguf.GGUFReader, type), "what the conversion keeps for itself is nobody else's"


@pytest.mark.xdist_group("smollm2")
def test_a_model_that_is_there_is_kept(converted: Path) -> None:
    before = (converted / "model.safetensors").stat().st_mtime_ns
    assert prepare_demo_model(converted) == converted
    assert (converted / "model.safetensors").stat().st_mtime_ns == before


HALF = """
import sys, time
from launch import convert

def half(source, gguf_file, folder):
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"half")
    time.sleep(600)

convert._write = half
convert.main(["--target", sys.argv[1]])
"""


def test_an_interrupted_conversion_leaves_nothing_under_the_models_name(tmp_path: Path) -> None:
    target = tmp_path / "model"
    process = subprocess.Popen([sys.executable, "-c", HALF, str(target)], cwd=ROOT)
    try:
        deadline = time.monotonic() + 120
        while not list(tmp_path.rglob("model.safetensors")) and time.monotonic() < deadline:
            time.sleep(0.01)
    finally:
        process.kill()
        process.wait()
    assert list(tmp_path.rglob("model.safetensors")), "the conversion did not begin"
    assert not target.exists()
    assert not is_model(target)


def test_what_cannot_be_converted_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(TaskInputError, match=r"package no-such-package is not installed; run: pip install"):
        package_folder("no_such_package")
    (tmp_path / "other.gguf").write_bytes(b"GGUF")
    with pytest.raises(TaskInputError, match=r"has no 'x.gguf'; it has other.gguf"):
        convert_gguf(tmp_path, "x.gguf", tmp_path / "target")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    assert main(["--target", str(tmp_path / "full")]) == 2
    assert "exists and is no whole model" in capsys.readouterr().err
    assert (tmp_path / "full" / "notes.txt").read_text() == "mine"
