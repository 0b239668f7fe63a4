"""A checkpoint's safetensors files and what their headers say. No torch: a command line asks before anything starts.

The store's source and the launcher both stand on this; each says in its own words what to do about an error.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

INDEX = "model.safetensors.index.json"
ONE_FILE = "model.safetensors"
MOST_HEADER = 100_000_000
"""Bytes; what the safetensors library accepts."""

ITEM_BYTES: Mapping[str, int] = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 8),
    **dict.fromkeys(("F32", "I32", "U32"), 4),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 2),
    **dict.fromkeys(("I8", "U8", "BOOL", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 1),
}
"""Bytes of an element by the format's name of its type; of others only the stored size is known."""


class CheckpointFileError(ValueError):
    """A file that is no safetensors file or not whole; the message names it and what is wrong, not what to do."""


@dataclass(frozen=True)
class CheckpointTensor:
    """A tensor in a safetensors file.

    dtype: as the format spells it (``F32``, ``BF16``). start: its first byte in the file. nbytes: of the stored data.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    file: Path
    start: int


def listed_files(folder: Path) -> tuple[Path, ...]:
    """The files that hold a model: those of the index, or ``model.safetensors``, or all there are; in a fixed order.

    Raises CheckpointFileError for an index that is none.
    """
    index = folder / INDEX
    if index.is_file():
        try:
            names = set(json.loads(index.read_text())["weight_map"].values())
            return tuple(folder / name for name in sorted(names))
        except (KeyError, TypeError, AttributeError, ValueError, OSError, RecursionError) as error:
            raise CheckpointFileError(f"{index} is not a safetensors index ({error!r})") from error
    if (folder / ONE_FILE).is_file():
        return (folder / ONE_FILE,)
    return tuple(sorted(folder.glob("*.safetensors")))


def files_stamp(folder: Path) -> str:
    """Changes when a weight file below ``folder`` is written again: names, sizes and times of change, nothing read."""
    files = sorted(folder.rglob("*.safetensors"))
    return repr([(str(file.relative_to(folder)), file.stat().st_size, file.stat().st_mtime_ns) for file in files])


def read_tensors(file: Path) -> tuple[CheckpointTensor, ...]:
    """The tensors of one file, in the header's order, from the header alone.

    Raises CheckpointFileError when it is not safetensors or lies shorter than its tensors; OSError.
    """
    with open(file, "rb") as stream:
        size = os.fstat(stream.fileno()).st_size
        length = int.from_bytes(stream.read(8), "little")
        try:
            if not 2 <= length <= MOST_HEADER:
                raise ValueError(f"a header of {length} bytes")
            header = json.loads(stream.read(length))
            found = tuple(
                _tensor(name, entry, file, 8 + length) for name, entry in header.items() if name != "__metadata__"
            )
        except (KeyError, TypeError, AttributeError, ValueError, RecursionError) as error:
            raise CheckpointFileError(f"{file} is not a safetensors file ({error})") from error
    missing = max((tensor.start + tensor.nbytes for tensor in found), default=8 + length) - size
    if missing > 0:
        raise CheckpointFileError(f"{file} is cut short: {missing} bytes are missing")
    return found


def _tensor(name: str, entry: Mapping[str, object], file: Path, data: int) -> CheckpointTensor:
    dtype, shape = str(entry["dtype"]), _sizes(entry["shape"])
    start, end = _sizes(entry["data_offsets"])
    item = ITEM_BYTES.get(dtype)
    if start > end or (item is not None and math.prod(shape) * item != end - start):
        raise ValueError(f"{name!r} lies from byte {start} to {end}, which is not what its shape takes")
    return CheckpointTensor(name, dtype, shape, end - start, file, data + start)


def _sizes(value: object) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(type(number) is int and number >= 0 for number in value):
        raise ValueError(f"{value!r} are no sizes")
    return tuple(value)
