"""A Hugging Face model directory on disk: which safetensors files it has, and what is in them by their headers.

No torch: the command line asks here before anything is started.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from cluster.task import TaskError

_MAX_HEADER = 100_000_000
_INDEX = "model.safetensors.index.json"
_ONE_FILE = "model.safetensors"


class TaskInputError(TaskError):
    """What the user gave cannot be used: one line that names it and the remedy."""


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a safetensors file. ``dtype`` as the format spells it (``F32``, ``BF16``)."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    file: Path


def checkpoint_files(directory: str | Path) -> tuple[Path, ...]:
    """The safetensors files that hold the model: those of the index, or ``model.safetensors``, or all there are.

    Raises TaskInputError when the directory is missing, is no Hugging Face model, or has no safetensors.
    """
    folder = Path(directory)
    if not folder.is_dir():
        what = "is a file, not a directory" if folder.exists() else "does not exist"
        raise TaskInputError(f"model directory {folder} {what}; name a Hugging Face model directory")
    if not (folder / "config.json").is_file():
        raise TaskInputError(f"model directory {folder} has no config.json; name a Hugging Face model directory")
    files = _listed(folder)
    if not files:
        others = sorted(p.name for pattern in ("*.bin", "*.gguf", "*.pt", "*.pth") for p in folder.glob(pattern))
        found = f" (it has {', '.join(others[:3])})" if others else ""
        raise TaskInputError(
            f"model directory {folder} has no safetensors{found}; "
            "save the model with save_pretrained, or convert a GGUF file with python -m launch.convert"
        )
    for file in files:
        if not file.is_file():
            raise TaskInputError(f"model directory {folder} lacks {file.name}, which its index names; copy it there")
    return files


def _listed(folder: Path) -> tuple[Path, ...]:
    index = folder / _INDEX
    if index.is_file():
        try:
            names = set(json.loads(index.read_text())["weight_map"].values())
        except (ValueError, KeyError, AttributeError) as error:
            raise TaskInputError(f"{index} is not a safetensors index ({error}); copy the model again") from error
        return tuple(folder / name for name in sorted(names))
    if (folder / _ONE_FILE).is_file():
        return (folder / _ONE_FILE,)
    return tuple(sorted(folder.glob("*.safetensors")))


def stored_tensors(directory: str | Path) -> dict[str, StoredTensor]:
    """Every tensor of the checkpoint by name, from the files' headers alone.

    Raises TaskInputError as ``checkpoint_files`` does, and for a file that is not whole or not safetensors.
    """
    found: dict[str, StoredTensor] = {}
    for file in checkpoint_files(directory):
        for tensor in _read_header(file):
            found[tensor.name] = tensor
    return found


def _read_header(file: Path) -> list[StoredTensor]:
    tensors: list[StoredTensor] = []
    end = 0
    try:
        with open(file, "rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if not 2 <= length <= _MAX_HEADER:
                raise ValueError(f"header of {length} bytes")
            header = json.loads(stream.read(length))
        for name, entry in header.items():
            if name != "__metadata__":
                start, stop = entry["data_offsets"]
                shape = tuple(int(size) for size in entry["shape"])
                tensors.append(StoredTensor(name, str(entry["dtype"]), shape, stop - start, file))
                end = max(end, stop)
    except OSError as error:
        raise TaskInputError(f"cannot read {file}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise TaskInputError(f"{file} is not a safetensors file ({error}); copy the model again") from error
    missing = 8 + length + end - file.stat().st_size
    if missing > 0:
        raise TaskInputError(f"{file} is cut short: {missing} bytes are missing; copy the model again")
    return tensors
