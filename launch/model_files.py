"""A Hugging Face model directory on disk: which safetensors files it has, and what is in them by their headers.

No torch: the command line asks here before anything is started.
"""

from __future__ import annotations

from pathlib import Path

from cluster.task import TaskError
from flextensor.checkpoint_files import CheckpointFileError, listed_files, read_tensors
from flextensor.checkpoint_files import CheckpointTensor as StoredTensor


class TaskInputError(TaskError):
    """What the user gave cannot be used: one line that names it and the remedy."""


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
    try:
        files = listed_files(folder)
    except CheckpointFileError as error:
        raise TaskInputError(f"{error}; copy the model again") from error
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


def stored_tensors(directory: str | Path) -> dict[str, StoredTensor]:
    """Every tensor of the checkpoint by name, from the files' headers alone.

    Raises TaskInputError as ``checkpoint_files`` does, and for a file that is not whole or not safetensors.
    """
    found: dict[str, StoredTensor] = {}
    for file in checkpoint_files(directory):
        try:
            found |= {tensor.name: tensor for tensor in read_tensors(file)}
        except OSError as error:
            raise TaskInputError(f"cannot read {file}: {error.strerror}") from error
        except CheckpointFileError as error:
            raise TaskInputError(f"{error}; copy the model again") from error
    return found
